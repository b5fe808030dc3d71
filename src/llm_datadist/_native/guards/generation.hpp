// Generations: 64-bit counters in shared pages that tell whether bytes just read are valid.
#pragma once

#include <cstdint>

#include "error.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace datadist {

inline std::uint64_t* generation_at(std::uint64_t address) {
    if (address == 0 || address % alignof(std::uint64_t) != 0)
        refuse("address is ", address, ": a generation needs a non-null address divisible by 8");
    return reinterpret_cast<std::uint64_t*>(address);
}

// Loads of the copied bytes stay before the load of the generation.
inline std::uint64_t load_generation(std::uint64_t address) {
    const std::uint64_t* generation = generation_at(address);
#if defined(__x86_64__)
    _mm_lfence();  // the manuals order ordinary loads, but not those of string copies
#endif
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(generation, __ATOMIC_ACQUIRE);
}

// A reader that saw any store after this finds the new generation by load_generation().
inline std::uint64_t advance_generation(std::uint64_t address) {
    const std::uint64_t generation = __atomic_add_fetch(generation_at(address), 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_RELEASE);  // else later stores may become visible before the new generation
    return generation;
}

// Makes earlier stores, streaming ones too, visible to all cores before later stores.
inline void store_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace datadist
