// Unmapping and closing on new threads, without the interpreter, which may lack memory for a thread.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "thread.hpp"

namespace datadist {

// In pieces: while the kernel unmaps one, no other thread can map memory. False if no thread can be started.
inline bool unmap_elsewhere(std::uint64_t address, std::uint64_t nbytes, std::uint64_t piece) {
    try {
        quiet_thread("lldd-unmap", [=] {
            for (std::uint64_t done = 0; done < nbytes; done += piece)
                ::munmap(reinterpret_cast<void*>(address + done), std::min(piece, nbytes - done));
        }).detach();
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

inline std::atomic<int> closing{0};  // not yet closed by close_elsewhere()

inline void forget_closers_in_children() {
    pthread_atfork(nullptr, nullptr, [] { closing = 0; });
}

// With SO_LINGER, set by a socket's sender, the last close may block. Closes here if no thread can be started.
inline void close_elsewhere(const std::vector<int>& fds) {
    const int count = static_cast<int>(fds.size());
    closing += count;
    const auto close_all = [fds, count] {
        for (const int fd : fds) ::close(fd);
        closing -= count;
    };
    try {
        quiet_thread("lldd-close", close_all).detach();
    } catch (const std::exception&) {
        close_all();
    }
}

}  // namespace datadist
