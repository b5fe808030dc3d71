// A GPU: its context, its streams with windows of host memory, and the movers of plans.
//
// Each use pushes the primary context, which torch uses too, and pops it: a caller's current device stays. A call leases
// a channel (a stream, two windows), so that calls run beside each other. Devices and their first 16 channels live as
// long as the process: when destructors run at its end, the driver may be gone.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy/chunks.hpp"
#include "copy/cuda.hpp"
#include "copy/spans.hpp"
#include "copy_ptx.hpp"
#include "ticket.hpp"

namespace datadist {

constexpr std::uint64_t window_bytes = 1u << 20;
constexpr std::uint64_t plan_bytes = 256u << 10;  // of one launch
constexpr std::uint64_t piece_bytes = 16u << 10;  // longest run of the kernel: keeps its warps equally busy
constexpr std::uint64_t device_chunk_bytes = 128u << 20;  // between two checks of Stop, on the device
constexpr std::uint64_t host_chunk_bytes = 32u << 20;  // the same, between host and device
constexpr std::uint64_t copies_from_bytes = 1u << 20;  // mean run from which plain copies do, on the device
constexpr std::uint64_t host_copies_from_bytes = 64u << 10;  // the same, between pinned memory and the device
constexpr std::uint64_t kernel_from_runs = 16;  // fewer go by plain copies to and from the host
constexpr std::size_t most_copies = 256;  // between two waits: a driver with a full queue blocks its caller
constexpr std::int64_t longest_wait_ns = 60'000'000'000;  // for one chunk of a call without a deadline

// Waits a little, longer after some turns.
inline void pause(int turn) {
    if (turn < 64)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
}

class Device {
public:
    class Channel;

    // Lets this thread call the driver while another one, as an engine's, captures a graph.
    class Relaxed {
    public:
        explicit Relaxed(const Device& device) : cuda_(device.cuda_) {
            cuda_.cuThreadExchangeStreamCaptureMode(&mode_);
        }
        ~Relaxed() { cuda_.cuThreadExchangeStreamCaptureMode(&mode_); }
        Relaxed(const Relaxed&) = delete;
        Relaxed& operator=(const Relaxed&) = delete;

    private:
        const Cuda& cuda_;
        CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    };

    // Makes a context current. Work between a push and its pop must not call others' code.
    class Scope {
    public:
        explicit Scope(const Device& device) : device_(device), relaxed_(device) {
            device.check(device.cuda_.cuCtxPushCurrent_v2(device.context_), "cuCtxPushCurrent");
        }
        ~Scope() {
            CUcontext popped = nullptr;
            device_.cuda_.cuCtxPopCurrent_v2(&popped);
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        const Device& device_;
        const Relaxed relaxed_;
    };

    // Work that may use memory, from before its first copy on until its last one has ended.
    class Use {
    public:
        explicit Use(Device& device) : device_(device), number_(device.begin_use()) {}
        ~Use() {
            const std::lock_guard<std::mutex> lock(device_.mutex_);
            device_.uses_.erase(number_);
        }
        Use(const Use&) = delete;
        Use& operator=(const Use&) = delete;

    private:
        Device& device_;
        const std::uint64_t number_;
    };

    // Devices that this process sees. Throws DeviceError without a driver.
    static int count() {
        const Cuda& cuda = Cuda::get();
        int found = 0;
        start(cuda, cuda.cuInit(0), "cuInit");
        start(cuda, cuda.cuDeviceGetCount(&found), "cuDeviceGetCount");
        return found;
    }

    // Returns the device, made at first use. Throws DeviceError.
    static Device& open(int ordinal) {
        if (ordinal < 0 || ordinal >= most) throw DeviceError(DeviceError::missing, text("no device ", ordinal));
        std::atomic<Device*>& slot = all()[static_cast<std::size_t>(ordinal)];
        Device* found = slot.load(std::memory_order_acquire);
        if (found == nullptr) {
            static std::mutex making;
            const std::lock_guard<std::mutex> lock(making);
            found = slot.load(std::memory_order_acquire);
            if (found == nullptr) slot.store(found = new Device(ordinal), std::memory_order_release);
        }
        if (found->owner_ != ::getpid())
            throw DeviceError(CUDA_ERROR_NOT_INITIALIZED, "the device belongs to the process that forked this one");
        found->require_sound();
        return *found;
    }

    const Cuda& cuda() const { return cuda_; }
    int ordinal() const { return ordinal_; }
    const std::array<char, 16>& uuid() const { return uuid_; }
    const std::string& name() const { return name_; }
    int version() const { return version_; }

    bool has_kernel() const { return kernel_ != nullptr; }
    const std::string& no_kernel() const { return no_kernel_; }  // why there is none

    // True if the kernel reaches registered host memory by the host's addresses.
    bool reaches_pinned() const { return reaches_pinned_; }

    int attribute(CUdevice_attribute which) const {
        int value = 0;
        check(cuda_.cuDeviceGetAttribute(&value, which, ordinal_), "cuDeviceGetAttribute");
        return value;
    }

    // Bytes (free, in all).
    std::pair<std::size_t, std::size_t> memory() const {
        const Scope scope(*this);
        std::size_t free = 0, total = 0;
        check(cuda_.cuMemGetInfo_v2(&free, &total), "cuMemGetInfo");
        return {free, total};
    }

    // Lets the device reach host memory, which must be unpinned before it is unmapped.
    void pin(std::uint64_t address, std::uint64_t nbytes) const {
        const Scope scope(*this);
        check(cuda_.cuMemHostRegister_v2(reinterpret_cast<void*>(address), nbytes,
                                         CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
              "cuMemHostRegister");
    }

    void unpin(std::uint64_t address) const noexcept {
        try {
            const Scope scope(*this);
            cuda_.cuMemHostUnregister(reinterpret_cast<void*>(address));
        } catch (const DeviceError&) {  // the driver is gone, and what it pinned
        }
    }

    // Ordinal of the device whose memory lies at an address; -1 for memory of the host.
    int device_of(std::uint64_t address) const {
        const Scope scope(*this);
        unsigned kind = 0;
        int ordinal = -1;
        const auto at = static_cast<CUdeviceptr>(address);
        const CUresult code = cuda_.cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
        if (code == CUDA_ERROR_INVALID_VALUE) return -1;
        check(code, "cuPointerGetAttribute");
        if (kind != CU_MEMORYTYPE_DEVICE) return -1;
        check(cuda_.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at), "cuPointerGetAttribute");
        return ordinal;
    }

    // Throws DeviceError for a failure, and remembers one that the context does not survive.
    void check(CUresult code, const char* what) const {
        if (code == CUDA_SUCCESS) return;
        const std::string why = cuda_.describe(code, what);
        if (ends_context(code)) fail(code, why);
        throw DeviceError(code, text(name_, ": ", why));
    }

    // Throws once the device has failed for good.
    void require_sound() const {
        if (failed_.load(std::memory_order_acquire) == 0) return;
        const std::lock_guard<std::mutex> lock(why_mutex_);
        const int code = failed_.load() == DeviceError::unfinished ? DeviceError::failed : failed_.load();
        throw DeviceError(code, text(name_, " has failed in this process: ", why_));
    }

    // A copy does not end: what it may use stays mapped and pinned.
    bool unfinished() const { return failed_.load(std::memory_order_acquire) == DeviceError::unfinished; }

    // For a copy that does not end, or of which nothing can be learned.
    [[noreturn]] void give_up(const std::string& why) const {
        fail(DeviceError::unfinished, why);
        throw DeviceError(DeviceError::unfinished, text(name_, ": ", why));
    }

    void fail(int code, const std::string& why) const {
        const std::lock_guard<std::mutex> lock(why_mutex_);
        if (failed_.load() != 0) return;
        why_ = why;
        failed_.store(code, std::memory_order_release);
    }

    // How long after a deadline a call still waits for a copy that has begun.
    static std::atomic<std::int64_t>& patience_ns() {
        static std::atomic<std::int64_t> value{10'000'000'000};
        return value;
    }

    // Of this process, in all: bytes that went through windows, and time that data lanes have waited for one.
    mutable std::atomic<std::uint64_t> window_total{0};
    mutable std::atomic<std::int64_t> waited_ns{0};

    class Lease;

    static const Device* await(std::int64_t tag, std::int64_t until_ns);

    // Waits for all work that has begun; false if some does not end in time: what it uses must stay mapped.
    bool quiet() {
        if (owner_ != ::getpid()) return false;
        const std::int64_t until = monotonic_ns() + patience_ns();
        const std::uint64_t later = begin_use();
        for (int turn = 0;; pause(turn++)) {
            const std::lock_guard<std::mutex> lock(mutex_);
            take_ended();
            const bool ended = *uses_.begin() >= later;
            if (!ended && !unfinished() && monotonic_ns() < until) continue;
            uses_.erase(later);
            return ended;
        }
    }

    // True for answers about an event that say nothing about it: it has not ended, or a thread captures a graph.
    static bool says_nothing(CUresult code) {
        return code == CUDA_ERROR_NOT_READY || (code >= first_of_capture && code <= last_of_capture);
    }

private:
    static constexpr int most = 64;
    static constexpr CUresult first_of_capture = 900, last_of_capture = 909;  // CUDA_ERROR_STREAM_CAPTURE_*
    static constexpr std::size_t most_pinned = 16;  // channels; further ones have pageable windows and a short life

    static std::array<std::atomic<Device*>, most>& all() {
        static std::array<std::atomic<Device*>, most> devices{};
        return devices;
    }

    explicit Device(int ordinal) : cuda_(Cuda::get()), ordinal_(ordinal), owner_(::getpid()) {
        const int seen = count();
        if (ordinal >= seen)
            throw DeviceError(DeviceError::missing, text("no device ", ordinal, ": this process sees ", seen));
        CUuuid uuid{};
        start(cuda_.cuDeviceGetUuid_v2(&uuid, ordinal), "cuDeviceGetUuid");
        std::memcpy(uuid_.data(), &uuid, uuid_.size());
        char name[128] = {};
        start(cuda_.cuDeviceGetName(name, sizeof name - 1, ordinal), "cuDeviceGetName");
        start(cuda_.cuDriverGetVersion(&version_), "cuDriverGetVersion");
        name_ = text("cuda:", ordinal, " (", name, ")");
        processors_ = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        for (const auto needed :
             {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING})
            if (attribute(needed) == 0)
                throw DeviceError(DeviceError::missing, text(name_, " lacks attribute ", static_cast<int>(needed),
                                                             ", virtual memory management or unified addressing"));
        reaches_pinned_ = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0;
        start(cuda_.cuDevicePrimaryCtxRetain(&context_, ordinal), "cuDevicePrimaryCtxRetain");
        load_kernel();
    }

    // As check(), for what makes the device.
    static void start(const Cuda& cuda, CUresult code, const char* what) {
        if (code != CUDA_SUCCESS) throw DeviceError(DeviceError::missing, cuda.describe(code, what));
    }
    void start(CUresult code, const char* what) const { start(cuda_, code, what); }

    // Without a compiler of PTX, as in a container that lacks that library of the driver, plain copies do.
    void load_kernel() {
        const Scope scope(*this);
        CUmodule module = nullptr;
        CUresult code = cuda_.cuModuleLoadData(&module, copy_ptx);
        if (code == CUDA_SUCCESS) code = cuda_.cuModuleGetFunction(&kernel_, module, "datadist_copy");
        if (code == CUDA_SUCCESS) return;
        kernel_ = nullptr;
        no_kernel_ = cuda_.describe(code, "the kernel cannot be compiled");
    }

    // Codes after which, by cuda.h, "the process is in an inconsistent state".
    static bool ends_context(int code) {
        static constexpr int codes[] = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 723};
        return std::find(std::begin(codes), std::end(codes), code) != std::end(codes);
    }

    struct Ending {
        std::unique_ptr<Channel> channel;
        std::int64_t tag;
        std::uint64_t use;
    };

    std::uint64_t begin_use() {
        const std::lock_guard<std::mutex> lock(mutex_);
        uses_.insert(++newest_use_);
        return newest_use_;
    }

    void take_ended() noexcept;
    bool ending(std::int64_t tag);

    const Cuda& cuda_;
    const int ordinal_;
    const pid_t owner_;
    std::array<char, 16> uuid_{};
    std::string name_;
    int version_ = 0;
    int processors_ = 1;
    bool reaches_pinned_ = false;
    CUcontext context_ = nullptr;
    CUfunction kernel_ = nullptr;
    std::string no_kernel_;

    mutable std::mutex mutex_;  // guards the next five
    std::vector<std::unique_ptr<Channel>> idle_;
    std::vector<Ending> ending_;
    std::size_t pinned_ = 0;
    std::set<std::uint64_t> uses_;  // by number, of what may use memory
    std::uint64_t newest_use_ = 0;
    mutable std::mutex why_mutex_;  // guards the next one
    mutable std::string why_;
    mutable std::atomic<int> failed_{0};
};

// A stream with two windows, used in turn. One thread at a time; all but wait() need a Scope.
class Device::Channel {
public:
    struct Window {
        char* memory = nullptr;
        char* plan = nullptr;  // of a launch, on its way to `device_plan`
        CUdeviceptr device_plan = 0;
        CUevent event = nullptr;  // of the last work that uses this window
        bool busy = false;
    };

    Channel(Device& device, bool pinned) : device_(device), pinned_(pinned) {
        const Cuda& cuda = device.cuda();
        constexpr std::size_t room = window_bytes + plan_bytes;
        try {
            device.check(cuda.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
            if (pinned) {
                void* memory = nullptr;
                device.check(cuda.cuMemAllocHost_v2(&memory, 2 * room), "cuMemAllocHost");
                memory_ = static_cast<char*>(memory);
            } else {
                heap_.resize(2 * room);
                memory_ = heap_.data();
            }
            device.check(cuda.cuMemAlloc_v2(&plans_, 2 * plan_bytes), "cuMemAlloc");
            for (std::size_t i = 0; i < 2; ++i) {
                device.check(cuda.cuEventCreate(&windows[i].event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
                windows[i].memory = memory_ + i * room;
                windows[i].plan = windows[i].memory + window_bytes;
                windows[i].device_plan = plans_ + i * plan_bytes;
            }
        } catch (...) {
            give_back();
            throw;
        }
    }

    // Needs a Scope; no work runs. Errors are ignored: the driver may be gone.
    void give_back() noexcept {
        const Cuda& cuda = device_.cuda();
        for (Window& window : windows)
            if (window.event != nullptr) cuda.cuEventDestroy_v2(window.event);
        if (plans_ != 0) cuda.cuMemFree_v2(plans_);
        if (pinned_ && memory_ != nullptr) cuda.cuMemFreeHost(memory_);
        if (stream_ != nullptr) cuda.cuStreamDestroy_v2(stream_);
    }

    bool pinned() const { return pinned_; }

    void copy(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) {
        unmarked_ = true;
        device_.check(
            device_.cuda().cuMemcpyAsync(static_cast<CUdeviceptr>(dst), static_cast<CUdeviceptr>(src), bytes, stream_),
            "cuMemcpyAsync");
    }

    // Most runs of a launch over so many pairs of tensors.
    static std::size_t most_runs(std::size_t pairs) { return (plan_bytes - 2 * 8 * pairs) / sizeof(Run); }

    // Starts the kernel: every pair of bases times every run. The window is idle, its plan is overwritten.
    void launch(Window& window, const std::uint64_t* dst, const std::uint64_t* src, std::size_t pairs, const Run* runs,
                std::size_t count) {
        const std::size_t bases = 8 * pairs;
        std::memcpy(window.plan, dst, bases);
        std::memcpy(window.plan + bases, src, bases);
        std::memcpy(window.plan + 2 * bases, runs, count * sizeof(Run));
        copy(window.device_plan, reinterpret_cast<std::uint64_t>(window.plan), 2 * bases + count * sizeof(Run));
        CUdeviceptr at[] = {window.device_plan, window.device_plan + bases, window.device_plan + 2 * bases};
        auto pair_count = static_cast<std::uint32_t>(pairs), run_count = static_cast<std::uint32_t>(count);
        void* arguments[] = {&at[0], &at[1], &at[2], &pair_count, &run_count};
        constexpr unsigned threads = 256;  // eight warps, each of which takes a pair and a run at a time
        const auto most = static_cast<std::size_t>(device_.processors_) * 4;
        const auto blocks = static_cast<unsigned>(std::clamp<std::size_t>((pairs * count + 7) / 8, 1, most));
        device_.check(
            device_.cuda().cuLaunchKernel(device_.kernel_, blocks, 1, 1, threads, 1, 1, 0, stream_, arguments, nullptr),
            "cuLaunchKernel");
    }

    // All work so far belongs to the window: wait() is for its end.
    void mark(Window& window) {
        window.busy = true;
        device_.check(device_.cuda().cuEventRecord(window.event, stream_), "cuEventRecord");
        unmarked_ = false;
    }

    // Waits for the end of all work. Needs no Scope.
    void settle(const Stop& stop) {
        mark_all();
        for (Window& window : windows) wait(window, stop);
    }

    // True if all work has ended.
    bool settled() {
        mark_all();
        return ended(windows[0]) && ended(windows[1]);
    }

    // Work that belongs to no window yet: an error has ended its call.
    void mark_all() {
        if (!unmarked_) return;
        for (int tries = 0; unmarked_; ++tries) try {
                const Scope scope(device_);
                mark(windows[0]);
            } catch (const DeviceError& error) {
                if (Device::ends_context(error.code))
                    unmarked_ = false;
                else if (tries == most_doubts)
                    device_.give_up(error.what());
            }
    }

    // True if a window's work has ended.
    bool ended(Window& window) {
        if (!window.busy) return true;
        const Relaxed relaxed(device_);
        const CUresult code = device_.cuda().cuEventQuery(window.event);
        if (says_nothing(code)) {
            if (device_.unfinished()) device_.give_up("it does not answer");
            return false;
        }
        // After an error that ends the context nothing runs; after another one, it is asked again.
        if (code != CUDA_SUCCESS && !Device::ends_context(code)) {
            if (++doubts_ > most_doubts) device_.give_up(device_.cuda().describe(code, "whether a copy has ended"));
            return false;
        }
        doubts_ = 0;
        window.busy = false;
        device_.check(code, "a copy failed, the bytes addressed are undefined");
        std::atomic_thread_fence(std::memory_order_acquire);  // before the guards are compared
        return true;
    }

    // Waits for that, at most until some time after the deadline; `stop` only lets handlers run.
    void wait(Window& window, const Stop& stop) {
        const std::int64_t now = monotonic_ns();
        const std::int64_t until = std::min(std::max(stop.deadline_ns, now), now + longest_wait_ns);
        for (int turn = 0; !ended(window); ++turn) {
            pause(turn);
            if (turn < 64) continue;
            stop.now();
            if (monotonic_ns() - until > patience_ns().load(std::memory_order_relaxed))
                device_.give_up("it does not answer: a copy that it has begun does not end");
        }
    }

    std::array<Window, 2> windows;

private:
    Device& device_;
    const bool pinned_;
    CUstream stream_ = nullptr;
    CUdeviceptr plans_ = 0;
    char* memory_ = nullptr;
    std::vector<char> heap_;
    bool unmarked_ = false;  // work that belongs to no window yet
    int doubts_ = 0;  // errors one after the other about an event

    static constexpr int most_doubts = 8;
};

// A channel for one call or payload. It goes back once its work has ended, which the end of a lease does not wait for:
// await() does, for the work of a tag.
class Device::Lease {
public:
    explicit Lease(Device& device, std::int64_t tag = 0) : device_(device), tag_(tag) {
        bool pinned;
        {
            const std::lock_guard<std::mutex> lock(device.mutex_);
            device.take_ended();
            device.uses_.insert(use_ = ++device.newest_use_);
            if (!device.idle_.empty()) {
                channel_ = std::move(device.idle_.back());
                device.idle_.pop_back();
                return;
            }
            pinned = device.pinned_ < most_pinned;
            if (pinned) ++device.pinned_;
        }
        try {
            const Scope scope(device);
            channel_ = std::make_unique<Channel>(device, pinned);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(device.mutex_);
            if (pinned) --device.pinned_;
            device.uses_.erase(use_);
            throw;
        }
    }

    ~Lease() {
        const std::lock_guard<std::mutex> lock(device_.mutex_);
        device_.ending_.push_back({std::move(channel_), tag_, use_});
        device_.take_ended();
    }

    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    Channel& operator*() const { return *channel_; }
    Channel* operator->() const { return channel_.get(); }

private:
    Device& device_;
    const std::int64_t tag_;
    std::uint64_t use_ = 0;
    std::unique_ptr<Channel> channel_;
};

// Under the lock: gives channels back whose work has ended. Those of a device that does not answer stay for ever.
inline void Device::take_ended() noexcept {
    for (std::size_t i = 0; i < ending_.size();) {
        Channel& channel = *ending_[i].channel;
        try {
            if (!channel.settled()) {
                ++i;
                continue;
            }
        } catch (const DeviceError& error) {
            if (error.code == DeviceError::unfinished) {
                ++i;
                continue;
            }
            (void)ending_[i].channel.release();  // the context has ended, and all work with it
        }
        if (ending_[i].channel && channel.pinned()) {
            idle_.push_back(std::move(ending_[i].channel));
        } else if (ending_[i].channel) {
            try {
                const Scope scope(*this);
                channel.give_back();
            } catch (const DeviceError&) {
            }
        }
        uses_.erase(ending_[i].use);
        ending_.erase(ending_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

// Waits for the end of all work of ended leases with that tag; returns the device of which it has not come until then.
inline const Device* Device::await(std::int64_t tag, std::int64_t until_ns) {
    for (auto& slot : all()) {
        Device* const device = slot.load(std::memory_order_acquire);
        if (device == nullptr || device->owner_ != ::getpid()) continue;
        for (int turn = 0; device->ending(tag); pause(turn++))
            if (device->unfinished() || monotonic_ns() >= until_ns) return device;
    }
    return nullptr;
}

inline bool Device::ending(std::int64_t tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    take_ended();
    return std::any_of(ending_.begin(), ending_.end(), [tag](const Ending& each) { return each.tag == tag; });
}

}  // namespace datadist
