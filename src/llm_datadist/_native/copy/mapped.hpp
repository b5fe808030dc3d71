// Check by the kernel that user memory exists: reading it here could crash.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ios>
#include <string>
#include <vector>

#include "error.hpp"

namespace datadist {

// The kernel copies the set, with EFAULT if it cannot, before it refuses the verb. Unlike process_vm_readv it needs no
// permission that a container may lack.
inline bool kernel_reads(std::uint64_t address) {
    constexpr std::size_t set_bytes = 8;
    constexpr int no_verb = -1;
    ::syscall(SYS_rt_sigprocmask, no_verb, address / set_bytes * set_bytes, nullptr, set_bytes);
    return errno != EFAULT;
}

// True if all of it is mapped, and its first and last page are readable (devices reserve unreadable addresses).
// MS_ASYNC only finds holes; its time depends on the number of mappings, not on their size.
inline bool is_mapped(std::uint64_t address, std::uint64_t nbytes) {
    static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t start = address / page * page;
    return ::msync(reinterpret_cast<void*>(start), address - start + nbytes, MS_ASYNC) == 0 && kernel_reads(address) &&
           kernel_reads(address + nbytes - 1);
}

// Throws RuleError, beginning with `name`, unless `nbytes` (at least 1) such bytes are at each address.
inline void check_mapped(const std::string& name, const std::vector<std::uint64_t>& addresses, std::uint64_t nbytes) {
    for (std::size_t i = 0; i < addresses.size(); ++i)
        if (!is_mapped(addresses[i], nbytes))
            refuse(name, "[", i, "]=0x", std::hex, addresses[i], std::dec, ": its ", nbytes,
                   " bytes must be mapped and readable in this process; device memory is not reachable: give memory of "
                   "the host");
}

}  // namespace datadist
