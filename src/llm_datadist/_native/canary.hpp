// A page at a random address, by which a process that writes into this one knows the address space.
#pragma once

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace datadist {

// A private page of zeros. A forked child does not have it, nor what runs after exec or gets the pid again.
class Canary {
public:
    Canary() {
        for (int tries = 0; page_ == nullptr; ++tries) {
            if (tries == max_tries) throw std::bad_alloc();
            page_ = map_at(random_address(tries));
        }
        ::madvise(page_, page_bytes(), MADV_DONTFORK);
    }

    ~Canary() { close(); }

    Canary(const Canary&) = delete;
    Canary& operator=(const Canary&) = delete;

    std::uint64_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(page_); }

    // From now on writers find nothing here. Idempotent. In a forked child the address may be another's.
    void close() noexcept {
        if (page_ != nullptr && ::getpid() == owner_) ::munmap(page_, page_bytes());
        page_ = nullptr;
    }

private:
    static constexpr int max_tries = 64;

    static std::size_t page_bytes() noexcept { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

    // Of 46 bits, which x86-64 and most of arm64 have for a process; later of 38, which all have.
    static std::uint64_t random_address(int tries) {
        std::uint64_t drawn = 0;
        if (::getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) throw std::bad_alloc();
        return (drawn >> (tries < max_tries / 2 ? 18 : 26)) / page_bytes() * page_bytes();
    }

    // Returns null if the address is taken or impossible.
    static void* map_at(std::uint64_t address) noexcept {
        void* wanted = reinterpret_cast<void*>(address);
        void* found = ::mmap(wanted, page_bytes(), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        if (found == wanted) return found;
        ::munmap(found, page_bytes());  // a kernel before 4.17
        return nullptr;
    }

    void* page_ = nullptr;
    pid_t owner_ = ::getpid();
};

}  // namespace datadist
