// Unmapping and closing by a thread of its own. It needs nothing of the interpreter, which may have no memory left for
// a thread.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "thread.hpp"

namespace datadist {

// Piece by piece: until the kernel has done one, no other thread of the process can map anything. Returns false when
// no thread can be had.
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

inline std::atomic<int> closing{0};  // descriptors that close_elsewhere() has not closed yet

// The last close of a socket may block for as long as its sender wants: SO_LINGER. Closes here if no thread can be had.
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
