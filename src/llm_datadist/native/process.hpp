// The executor between this process and another one: process_vm_readv and process_vm_writev, many ranges a call.
#pragma once

#include <errno.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ios>
#include <stdexcept>
#include <string>
#include <system_error>

#include "chunks.hpp"
#include "ends.hpp"
#include "error.hpp"
#include "pool.hpp"

namespace datadist {

// The kernel refused. Becomes OSError with that errno.
struct ProcessError : std::runtime_error {
    ProcessError(int code, const std::string& what) : std::runtime_error(what), code(code) {}

    int code;
};

// The process at the far end, and which end it is: the destination when writing.
struct FarEnd {
    pid_t pid;
    bool writing;

    const char* call() const { return writing ? "process_vm_writev" : "process_vm_readv"; }

    ssize_t move(const iovec* near, const iovec* far, std::size_t ranges) const {
        const auto count = static_cast<unsigned long>(ranges);
        return writing ? process_vm_writev(pid, near, count, far, count, 0)
                       : process_vm_readv(pid, near, count, far, count, 0);
    }
};

// What stopped a transfer: the story of the thread that was the first to fail. Read once all threads have ended.
class Failure {
public:
    void tell(int code, const iovec& far) noexcept {
        if (told_.exchange(true, std::memory_order_relaxed)) return;
        code_ = code;
        far_ = far;
    }

    void raise_if_told(const FarEnd& end) const {
        if (!told_.load(std::memory_order_relaxed)) return;
        throw ProcessError(code_, text(end.call(), " of pid ", end.pid, ", ", far_.iov_len, " bytes at its address 0x",
                                       std::hex, reinterpret_cast<std::uintptr_t>(far_.iov_base), ": ",
                                       std::system_category().message(code_)));
    }

private:
    std::atomic<bool> told_{false};
    int code_ = 0;
    iovec far_{};
};

inline iovec range(std::uintptr_t address, std::size_t bytes) { return {reinterpret_cast<void*>(address), bytes}; }

inline void drop_front(iovec& range_left, std::size_t bytes) {
    range_left = range(reinterpret_cast<std::uintptr_t>(range_left.iov_base) + bytes, range_left.iov_len - bytes);
}

// Collects the ranges of a chunk and moves them by as few calls as possible. The kernel takes them in their order.
class ProcessCarrier {
public:
    static constexpr std::size_t max_ranges = 1024;  // UIO_MAXIOV: the kernel refuses more

    ProcessCarrier(const FarEnd& end, Failure& failure) noexcept : end_(end), failure_(failure) {}

    bool add(char* dst, char* src, std::uint64_t bytes) noexcept {
        if (bytes == 0) return true;
        near_[count_] = {end_.writing ? src : dst, static_cast<std::size_t>(bytes)};
        far_[count_] = {end_.writing ? dst : src, static_cast<std::size_t>(bytes)};
        return ++count_ < max_ranges || flush();
    }

    // A call may move less than asked, always from the front: it is told why only when it cannot move anything.
    bool flush() noexcept {
        for (std::size_t at = 0; at < count_;) {
            const ssize_t moved = end_.move(&near_[at], &far_[at], count_ - at);
            if (moved <= 0) {
                failure_.tell(moved < 0 ? errno : EFAULT, far_[at]);
                return false;
            }
            done_ += static_cast<std::uint64_t>(moved);
            at = skip(at, static_cast<std::size_t>(moved));
        }
        count_ = 0;
        return true;
    }

    std::uint64_t done() const noexcept { return done_; }

private:
    // Returns the first range that is not all moved, cut to what is left of it.
    std::size_t skip(std::size_t at, std::size_t moved) noexcept {
        for (; at < count_ && moved >= near_[at].iov_len; ++at) moved -= near_[at].iov_len;
        if (moved > 0 && at < count_) {
            drop_front(near_[at], moved);
            drop_front(far_[at], moved);
        }
        return at;
    }

    const FarEnd& end_;
    Failure& failure_;
    // Not initialised: the first count_ are in use. Together 32 KiB of the thread's stack.
    std::array<iovec, max_ranges> near_;
    std::array<iovec, max_ranges> far_;
    std::size_t count_ = 0;
    std::uint64_t done_ = 0;
};

struct ProcessCarriers {
    const FarEnd& end;
    Failure& failure;

    ProcessCarrier carrier() const noexcept { return ProcessCarrier(end, failure); }
};

// Moves a checked plan whose far end has addresses in another process; the memory of the two ends must not overlap.
// Returns the bytes done, fewer than all only when the deadline passed between two chunks; throws ProcessError.
inline std::uint64_t execute_process(const Copy& copy, std::uint64_t per_pair, const FarEnd& end, CopyPool* pool,
                                     std::int64_t deadline_ns) {
    const std::uint64_t total = per_pair * copy.pairs;
    if (total == 0) return 0;
    const bool alone = copy.ordered || total <= share_above_bytes;
    Failure failure;
    const std::uint64_t done =
        copy_in_chunks(copy, per_pair, alone ? nullptr : pool, deadline_ns, ProcessCarriers{end, failure});
    failure.raise_if_told(end);
    return done;
}

constexpr std::int64_t max_peek_bytes = 1 << 20;

// Returns bytes of another process: a probe, not a transfer. Throws ProcessError.
inline std::string peek_process(pid_t pid, std::uint64_t address, std::int64_t nbytes) {
    if (nbytes < 0 || nbytes > max_peek_bytes)
        refuse("nbytes is ", nbytes, ": must be in [0, ", max_peek_bytes, "]");
    const FarEnd end{pid, false};
    std::string bytes(static_cast<std::size_t>(nbytes), '\0');
    Failure failure;
    ProcessCarrier carrier(end, failure);
    // The address is only a number here, whatever it is: the kernel says what is wrong with it.
    carrier.add(bytes.data(), reinterpret_cast<char*>(address), bytes.size());
    carrier.flush();
    failure.raise_if_told(end);
    return bytes;
}

}  // namespace datadist
