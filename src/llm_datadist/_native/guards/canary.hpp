// Page at a random address, which a writing process must hit first.
#pragma once

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace datadist {

// Private page of zeros. A forked child, a program after exec or a later process with this pid lacks it.
class Canary {
public:
    // Addresses of 46 bits, usual on x86-64 and arm64; in later tries 38 bits, available everywhere.
    Canary() {
        for (int tries = 0; page_ == MAP_FAILED; ++tries) {
            std::uint64_t drawn = 0;
            if (tries == max_tries || ::getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) throw std::bad_alloc();
            drawn = (drawn >> (tries < max_tries / 2 ? 18 : 26)) / page_bytes_ * page_bytes_;
            page_ = ::mmap(reinterpret_cast<void*>(drawn), page_bytes_, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        }
        ::madvise(page_, page_bytes_, MADV_DONTFORK);
    }

    ~Canary() { close(); }

    Canary(const Canary&) = delete;
    Canary& operator=(const Canary&) = delete;

    std::uint64_t address() const noexcept {
        return page_ == MAP_FAILED ? 0 : static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(page_));
    }

    // Makes later writers fail. Idempotent. A forked child unmaps nothing: there the address may be in use.
    void close() noexcept {
        if (page_ != MAP_FAILED && ::getpid() == owner_) ::munmap(page_, page_bytes_);
        page_ = MAP_FAILED;
    }

private:
    static constexpr int max_tries = 64;

    const std::size_t page_bytes_ = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    void* page_ = MAP_FAILED;
    pid_t owner_ = ::getpid();
};

}  // namespace datadist
