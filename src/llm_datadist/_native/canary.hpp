// A page at a random address, by which a process that writes into this one knows the address space.
#pragma once

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace datadist {

// A private page of zeros. A forked child does not have it, nor what runs after exec or gets the pid again.
class Canary {
public:
    // Addresses of 46 bits, which x86-64 and most of arm64 have for a process; later of 38, which all have.
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

    // From now on writers find nothing here. Idempotent. In a forked child the address may be another's.
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
