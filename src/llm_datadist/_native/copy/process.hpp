// Execution between two processes by process_vm_readv and process_vm_writev.
#pragma once

#include <errno.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <ios>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "copy/chunks.hpp"
#include "copy/pool.hpp"
#include "copy/sides.hpp"
#include "error.hpp"
#include "fd.hpp"

namespace datadist {

// The kernel refused. Becomes OSError with this errno.
struct ProcessError : std::runtime_error {
    ProcessError(int code, const std::string& what) : std::runtime_error(what), code(code) {}

    int code;
};

// One side of a call, moved from the front on.
class Ranges {
public:
    static constexpr std::size_t max_ranges = 1024;  // UIO_MAXIOV, the kernel's limit
    static constexpr std::size_t max_proofs = 2;

    bool full() const noexcept { return end_ == max_ranges; }

    bool empty() const noexcept { return begin_ == end_; }

    const iovec* data() const noexcept { return &ranges_[begin_]; }

    std::size_t size() const noexcept { return end_ - begin_; }

    // The ranges behind at most max_proofs others.
    const iovec* data_behind(std::initializer_list<iovec> proofs) noexcept {
        return std::copy(proofs.begin(), proofs.end(), &ranges_[begin_ - proofs.size()]) - proofs.size();
    }

    void clear() noexcept { begin_ = end_ = max_proofs; }

    // Requires !full(). Extends the last range if possible: small ranges mostly cost the kernel a page lookup each.
    void add(char* at, std::size_t bytes) noexcept {
        if (!empty() && end_of(ranges_[end_ - 1]) == at)
            ranges_[end_ - 1].iov_len += bytes;
        else
            ranges_[end_++] = {at, bytes};
    }

    void drop_front(std::size_t bytes) noexcept {
        for (; bytes > 0 && bytes >= ranges_[begin_].iov_len; ++begin_) bytes -= ranges_[begin_].iov_len;
        if (bytes == 0) return;
        iovec& cut = ranges_[begin_];
        cut = {static_cast<char*>(cut.iov_base) + bytes, cut.iov_len - bytes};
    }

private:
    static char* end_of(const iovec& range) noexcept { return static_cast<char*>(range.iov_base) + range.iov_len; }

    std::array<iovec, max_ranges> ranges_;  // uninitialized, except [begin_, end_)
    std::size_t begin_ = max_proofs;        // before it: space for data_behind()
    std::size_t end_ = max_proofs;
};

// Proof of one process: its pidfd, a cookie in its address space, and two canaries. These are pages writable at
// addresses that no other process has. -1 and an empty cookie: unknown.
struct ProcessProof {
    static constexpr std::size_t max_cookie_bytes = 16;

    int pidfd = -1;
    std::uint64_t cookie_address = 0;
    std::string cookie{};
    std::array<std::uint64_t, Ranges::max_proofs> canaries{};
};

inline const ProcessProof no_proof;

// Process at the far side: destination when writing, else source.
struct FarSide {
    pid_t pid;
    bool writing;
    const ProcessProof& proof = no_proof;

    const char* call() const { return writing ? "process_vm_writev" : "process_vm_readv"; }

    // Returns the bytes moved, or -1 with errno. The two sides may be cut differently.
    //
    // The proof comes first. A call looks up the address space once, takes ranges in order, and stops at the first
    // missing one. A write begins with a byte for each canary. So another address space keeps its bytes, even if it
    // came after every check. A read begins with the cookie, because exec keeps a pid and its pidfd. ESRCH: not the
    // proof's address space.
    ssize_t move(Ranges& near, Ranges& far) const {
        const auto at = [](std::uint64_t address) { return reinterpret_cast<void*>(address); };
        std::array<char, ProcessProof::max_cookie_bytes> found{};  // zeros for canaries
        const std::size_t bytes = proof.cookie.empty() ? 0 : writing ? proof.canaries.size() : proof.cookie.size();
        const iovec* here = near.data_behind({{found.data(), bytes}});
        const iovec* there =
            writing ? far.data_behind({{at(proof.canaries[0]), bytes / 2}, {at(proof.canaries[1]), bytes / 2}})
                    : far.data_behind({{at(proof.cookie_address), bytes}, {nullptr, 0}});
        const ssize_t moved = (writing ? process_vm_writev : process_vm_readv)(pid, here, near.size() + 1, there,
                                                                               far.size() + Ranges::max_proofs, 0);
        const auto proven = static_cast<ssize_t>(bytes);
        if (moved >= proven && (writing || std::string_view(found.data(), bytes) == proof.cookie))
            return moved - proven;
        if (moved >= 0 || (writing && bytes > 0 && errno == EFAULT)) errno = ESRCH;
        return -1;
    }

    // Throws ProcessError once the process has ended: its pid may be reused.
    void check_alive() const {
        if (readable(proof.pidfd)) throw ProcessError(ESRCH, text("pid ", pid, " has ended"));
    }
};

// First failure of a transfer; read after all threads.
class Failure {
public:
    void tell(int code, const iovec& far) noexcept {
        if (told_.exchange(true, std::memory_order_relaxed)) return;
        code_ = code;
        far_ = far;
    }

    void raise_if_told(const FarSide& side) const {
        if (!told_.load(std::memory_order_relaxed)) return;
        throw ProcessError(
            code_, text(side.call(), " of pid ", side.pid, ", ", far_.iov_len, " bytes at its address 0x", std::hex,
                        reinterpret_cast<std::uintptr_t>(far_.iov_base), ": ", std::system_category().message(code_)));
    }

private:
    std::atomic<bool> told_{false};
    int code_ = 0;
    iovec far_{};
};

// Moves a chunk's ranges in order, by as few calls as possible.
class ProcessCarrier {
public:
    ProcessCarrier(const FarSide& side, Failure& failure) noexcept : side_(side), failure_(failure) {}

    bool add(char* dst, char* src, std::uint64_t bytes) noexcept {
        if (bytes == 0) return true;
        near_.add(side_.writing ? src : dst, bytes);
        far_.add(side_.writing ? dst : src, bytes);
        return (!near_.full() && !far_.full()) || flush();
    }

    // A call may move less, from the front; its reason shows when it moves nothing.
    bool flush() noexcept {
        while (!far_.empty()) {
            const ssize_t moved = side_.move(near_, far_);
            if (moved <= 0) {
                failure_.tell(moved < 0 ? errno : EFAULT, *far_.data());
                return false;
            }
            const auto bytes = static_cast<std::size_t>(moved);
            done_ += bytes;
            near_.drop_front(bytes);
            far_.drop_front(bytes);
        }
        near_.clear();
        far_.clear();
        return true;
    }

    std::uint64_t done() const noexcept { return done_; }

private:
    const FarSide& side_;
    Failure& failure_;
    Ranges near_;  // each takes 16 KiB of the stack
    Ranges far_;
    std::uint64_t done_ = 0;
};

struct ProcessCarriers {
    const FarSide& side;
    Failure& failure;

    ProcessCarrier carrier() const noexcept { return ProcessCarrier(side, failure); }
};

// Moves a checked plan; far addresses are in another process, and the sides must not overlap. Returns the bytes done,
// fewer than all only if it stopped between two chunks; throws ProcessError.
inline std::uint64_t execute_process(const Copy& copy, std::uint64_t per_pair, const FarSide& side, CopyPool* pool,
                                     const Stop& stop) {
    const std::uint64_t total = per_pair * copy.pairs;
    if (total == 0) return 0;
    const bool alone = copy.ordered || total <= share_above_bytes;
    Failure failure;
    if (side.writing) side.check_alive();
    const std::uint64_t done =
        copy_in_chunks(copy, per_pair, alone ? nullptr : pool, stop, ProcessCarriers{side, failure});
    failure.raise_if_told(side);
    side.check_alive();
    return done;
}

constexpr std::int64_t max_peek_bytes = 1 << 20;

// Probe of another process. Throws ProcessError.
inline std::string peek_process(pid_t pid, std::uint64_t address, std::int64_t nbytes) {
    if (nbytes < 0 || nbytes > max_peek_bytes) refuse("nbytes is ", nbytes, ": must be in [0, ", max_peek_bytes, "]");
    const FarSide side{pid, false};
    std::string bytes(static_cast<std::size_t>(nbytes), '\0');
    Failure failure;
    ProcessCarrier carrier(side, failure);
    // Here a mere number, which the kernel checks.
    carrier.add(bytes.data(), reinterpret_cast<char*>(address), bytes.size());
    carrier.flush();
    failure.raise_if_told(side);
    return bytes;
}

}  // namespace datadist
