// Unmapping by a thread of its own. It needs nothing of the interpreter, which may have no memory left for a thread.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <exception>

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

}  // namespace datadist
