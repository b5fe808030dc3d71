// Both sides of a copy, and the check that a plan stays inside them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/plan.hpp"
#include "error.hpp"

namespace datadist {

enum class DeviceMover : std::uint8_t { automatic = 0, kernel = 1, copy = 2 };

// Where memory is, and who reaches it.
struct Place {
    int device = -1;      // ordinal of a GPU; -1: the host
    bool mapped = false;  // of the host: only this library can unmap or protect it
    bool pinned = false;  // of the host: devices reach it
    DeviceMover mover = DeviceMover::automatic;

    bool on_device() const { return device >= 0; }
};

// Tensors of one side, with addresses in this or in another process.
struct CopySide {
    const std::uint64_t* bases;
    std::size_t tensors;
    std::int64_t extent;  // bytes of each tensor
    std::int64_t first;   // the first tensor of the plan
    const char* name;     // "dst" or "src", for errors
    Place place = {};

    char* address(std::size_t pair, std::uint64_t offset) const {
        return reinterpret_cast<char*>(bases[static_cast<std::size_t>(first) + pair] + offset);
    }
};

struct Copy {
    CopySide dst;
    CopySide src;
    std::size_t pairs;
    const Run* runs;
    std::size_t run_count;
    bool ordered;
};

inline void check_tensors(const CopySide& side, std::int64_t pairs) {
    const auto tensors = static_cast<std::int64_t>(side.tensors);
    if (side.first < 0 || pairs < 0 || side.first > tensors || pairs > tensors - side.first)
        refuse("plan.", side.name, "_first is ", side.first, " and plan.count ", pairs, ": the ", side.name,
               " side has ", tensors, " tensors");
    if (side.extent < 0) refuse(side.name, ".extent is ", side.extent, ": must not be negative");
    for (std::int64_t i = side.first; i < side.first + pairs; ++i) {
        const std::uint64_t base = side.bases[i];
        if (base == 0 || base > UINT64_MAX - static_cast<std::uint64_t>(side.extent))
            refuse(side.name, ".bases[", i, "] is ", base, ": no address of ", side.extent, " bytes");
    }
}

inline bool run_ends_outside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t extent) {
    return offset > extent || bytes > extent - offset;
}

[[noreturn]] inline void refuse_run(const Copy& copy, std::size_t at) {
    const Run& run = copy.runs[at];
    const bool dst = run_ends_outside(run.dst, run.bytes, static_cast<std::uint64_t>(copy.dst.extent));
    refuse("plan.runs[", at, "] is ", run.bytes, " bytes at ", dst ? "dst" : "src", " offset ", dst ? run.dst : run.src,
           ": ends outside the tensor of ", dst ? copy.dst.extent : copy.src.extent, " bytes");
}

// Checks each run against both extents; returns the bytes of one tensor.
inline std::uint64_t check_runs(const Copy& copy) {
    const auto dst_extent = static_cast<std::uint64_t>(copy.dst.extent);
    const auto src_extent = static_cast<std::uint64_t>(copy.src.extent);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < copy.run_count; ++i) {
        const Run& run = copy.runs[i];
        if (run_ends_outside(run.dst, run.bytes, dst_extent) || run_ends_outside(run.src, run.bytes, src_extent))
            refuse_run(copy, i);
        if (__builtin_add_overflow(total, run.bytes, &total)) refuse("plan.runs hold more than 2**64 - 1 bytes");
    }
    return total;
}

// Returns the bytes of one tensor. Throws RuleError unless both sides contain all bytes of the plan.
inline std::uint64_t check(const Copy& copy, std::int64_t pairs, std::int64_t nbytes) {
    check_tensors(copy.dst, pairs);
    check_tensors(copy.src, pairs);
    const std::uint64_t per_pair = check_runs(copy);
    std::uint64_t total = 0;
    const bool overflow = __builtin_mul_overflow(per_pair, copy.pairs, &total);
    if (overflow || nbytes < 0 || total != static_cast<std::uint64_t>(nbytes))
        refuse("plan.nbytes is ", nbytes, ": the plan is ", pairs, " tensors of ", per_pair, " bytes");
    return per_pair;
}

}  // namespace datadist
