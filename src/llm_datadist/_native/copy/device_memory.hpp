// Memory of a device that other processes of the host can map: virtual memory with a descriptor.
#pragma once

#include <cstdint>
#include <utility>

#include "copy/device.hpp"

namespace datadist {

// Host memory that a device reaches, until this ends.
class PinnedMemory {
public:
    PinnedMemory(int ordinal, std::uint64_t address, std::uint64_t nbytes)
        : device_(Device::open(ordinal)), address_(address) {
        device_.pin(address, nbytes);
    }
    ~PinnedMemory() { release(); }
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    // False if the memory must stay mapped: a copy of it does not end.
    bool release() noexcept {
        if (address_ != 0 && !device_.quiet()) return false;
        if (const auto address = std::exchange(address_, 0)) device_.unpin(address);
        return true;
    }

private:
    Device& device_;
    std::uint64_t address_;
};

// Mapped memory of a device: ours, or that of a peer by its descriptor. The driver keeps it as long as anybody maps it.
class DeviceMemory {
public:
    DeviceMemory(int ordinal, std::uint64_t nbytes) : device_(Device::open(ordinal)) {
        const Device::Scope scope(device_);
        const CUmemAllocationProp properties = this->properties();
        size_ = whole_pages(nbytes, properties);
        check(cuda().cuMemCreate(&handle_, size_, &properties, 0), "cuMemCreate");
        map(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }

    // Uses the descriptor for the time of this call. It may be anything: the driver may wait for its other end.
    DeviceMemory(int ordinal, std::uint64_t nbytes, int fd, bool writable) : device_(Device::open(ordinal)) {
        const Device::Scope scope(device_);
        size_ = whole_pages(nbytes, properties());
        check(cuda().cuMemImportFromShareableHandle(&handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              "cuMemImportFromShareableHandle");
        map(writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ);
    }

    ~DeviceMemory() { close(); }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    std::uint64_t address() const { return at_; }
    std::uint64_t size() const { return size_; }

    // A descriptor for peers, which the caller closes.
    int export_fd() const {
        const Device::Scope scope(device_);
        int fd = -1;
        check(cuda().cuMemExportToShareableHandle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              "cuMemExportToShareableHandle");
        return fd;
    }

    // Waits for copies that run; if one does not end, the memory stays mapped until the process ends. Errors are
    // ignored: the driver may be gone.
    void close() noexcept {
        if (handle_ == 0) return;
        if (!device_.quiet()) {
            mapped_ = false;
            at_ = handle_ = 0;
            return;
        }
        try {
            const Device::Scope scope(device_);
            release();
        } catch (const DeviceError&) {
        }
    }

private:
    const Cuda& cuda() const { return device_.cuda(); }
    void check(CUresult code, const char* what) const { device_.check(code, what); }

    CUmemAllocationProp properties() const {
        CUmemAllocationProp found{};
        found.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        const auto exported = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        found.requestedHandleTypes = device_.attribute(exported) ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
        found.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_.ordinal()};
        return found;
    }

    std::uint64_t whole_pages(std::uint64_t nbytes, const CUmemAllocationProp& properties) const {
        std::size_t grain = 0;
        check(cuda().cuMemGetAllocationGranularity(&grain, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
              "cuMemGetAllocationGranularity");
        return (nbytes + grain - 1) / grain * grain;
    }

    void map(int access) {
        try {
            check(cuda().cuMemAddressReserve(&at_, size_, 0, 0, 0), "cuMemAddressReserve");
            check(cuda().cuMemMap(at_, size_, 0, handle_, 0), "cuMemMap");
            mapped_ = true;
            const CUmemAccessDesc ours{{CU_MEM_LOCATION_TYPE_DEVICE, device_.ordinal()}, access};
            check(cuda().cuMemSetAccess(at_, size_, &ours, 1), "cuMemSetAccess");
        } catch (...) {
            release();
            throw;
        }
    }

    void release() noexcept {
        if (std::exchange(mapped_, false)) cuda().cuMemUnmap(at_, size_);
        if (const CUdeviceptr at = std::exchange(at_, 0)) cuda().cuMemAddressFree(at, size_);
        if (const auto handle = std::exchange(handle_, 0)) cuda().cuMemRelease(handle);
    }

    Device& device_;
    std::uint64_t size_ = 0;
    CUmemGenericAllocationHandle handle_ = 0;
    CUdeviceptr at_ = 0;
    bool mapped_ = false;
};

}  // namespace datadist
