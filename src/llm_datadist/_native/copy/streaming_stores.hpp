// Contiguous copies by streaming stores, which bypass the caches, if the processor has them.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace datadist {

// Copies between ranges that do not overlap; move_plain allows any.
using Mover = void (*)(char* dst, const char* src, std::size_t bytes);

// Streaming stores of this processor, and their width in bits; move_plain and 0 if it has none.
struct Streaming {
    Mover move;
    int bits;
};

inline void move_plain(char* dst, const char* src, std::size_t bytes) { std::memmove(dst, src, bytes); }

// Measured: with 1 KiB, blocks of 4 KiB take a fifth longer.
constexpr std::size_t prefetched_bytes = 256;

// Prefetches a block's first lines and its page, which the processor cannot foresee. Takes any address.
inline void prefetch_head(const char* src, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes && at < prefetched_bytes; at += 64) __builtin_prefetch(src + at);
}

#if defined(__x86_64__) || defined(__aarch64__)

// Measured on x86: from here on streaming out of a buffer in the cache is faster, even for unaligned blocks. Below,
// partly filled lines cost more than it saves.
constexpr std::size_t stream_min_bytes = 512;
constexpr std::size_t line_bytes = 64;

// Copies up to dst's next line; returns the bytes copied.
inline std::size_t align_head(char* dst, const char* src) {
    const std::size_t head = (line_bytes - reinterpret_cast<std::uintptr_t>(dst) % line_bytes) % line_bytes;
    if (head != 0) std::memcpy(dst, src, head);
    return head;
}

inline void finish_tail(char* dst, const char* src, std::size_t bytes) {
    if (bytes != 0) std::memcpy(dst, src, bytes);
}

#endif

#if defined(__x86_64__)

__attribute__((target("avx512f"))) inline void stream_line_avx512(char* dst, const char* src) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

__attribute__((target("avx512f"))) inline void stream_avx512(char* dst, const char* src, std::size_t bytes) {
    if (bytes < stream_min_bytes) return move_plain(dst, src, bytes);
    std::size_t at = align_head(dst, src);
    for (; bytes - at >= 4 * line_bytes; at += 4 * line_bytes) {
        const __m512i a = _mm512_loadu_si512(src + at), b = _mm512_loadu_si512(src + at + 64);
        const __m512i c = _mm512_loadu_si512(src + at + 128), d = _mm512_loadu_si512(src + at + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 192), d);
    }
    for (; bytes - at >= line_bytes; at += line_bytes) stream_line_avx512(dst + at, src + at);
    finish_tail(dst + at, src + at, bytes - at);
}

__attribute__((target("avx2"))) inline void stream_line_avx2(char* dst, const char* src) {
    const auto* from = reinterpret_cast<const __m256i*>(src);
    auto* to = reinterpret_cast<__m256i*>(dst);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
}

__attribute__((target("avx2"))) inline void stream_avx2(char* dst, const char* src, std::size_t bytes) {
    if (bytes < stream_min_bytes) return move_plain(dst, src, bytes);
    std::size_t at = align_head(dst, src);
    for (; bytes - at >= line_bytes; at += line_bytes) stream_line_avx2(dst + at, src + at);
    finish_tail(dst + at, src + at, bytes - at);
}

inline Streaming best_streaming() {
    if (__builtin_cpu_supports("avx512f")) return {stream_avx512, 512};
    if (__builtin_cpu_supports("avx2")) return {stream_avx2, 256};
    return {move_plain, 0};
}

#elif defined(__aarch64__)

// Assembler: gcc has no intrinsic. A hint: these stores are as weakly ordered as others.
inline void stream_pair(char* dst, uint8x16_t low, uint8x16_t high) {
    asm volatile("stnp %q0, %q1, [%2]" : : "w"(low), "w"(high), "r"(dst) : "memory");
}

inline void stream_line_stnp(char* dst, const char* src) {
    const auto* from = reinterpret_cast<const std::uint8_t*>(src);
    const uint8x16_t a = vld1q_u8(from), b = vld1q_u8(from + 16), c = vld1q_u8(from + 32), d = vld1q_u8(from + 48);
    stream_pair(dst, a, b);
    stream_pair(dst + 32, c, d);
}

inline void stream_stnp(char* dst, const char* src, std::size_t bytes) {
    if (bytes < stream_min_bytes) return move_plain(dst, src, bytes);
    std::size_t at = align_head(dst, src);
    for (; bytes - at >= line_bytes; at += line_bytes) stream_line_stnp(dst + at, src + at);
    finish_tail(dst + at, src + at, bytes - at);
}

inline Streaming best_streaming() { return {stream_stnp, 256}; }

#else

inline Streaming best_streaming() { return {move_plain, 0}; }

#endif

// Shortest run that is streamed if its source is in no cache. Measured in runs of 512 bytes to 16 KiB: on AMD (Zen 4)
// streaming takes half to three quarters of memcpy's time in all of them. In runs of 4 KiB it is a fifth faster on one
// Intel machine and a fifth slower on another; there the caches give memcpy's speed on both.
inline std::size_t stream_cold_bytes() {
    constexpr std::size_t anywhere = 16u << 10;
#if defined(__x86_64__)
    static const bool amd = __builtin_cpu_is("amd");
    return amd ? stream_min_bytes : anywhere;
#else
    return anywhere;
#endif
}

// Streaming pays if source and destination exceed the caches together. The cap is measured on a Xeon with 2 MiB of
// cache per core and 260 MiB shared, in runs of 16 KiB and more. Below it the next reader finds the destination in a
// cache.
inline std::uint64_t stream_above_bytes() {
    static const std::uint64_t limit = [] {
        constexpr std::uint64_t cap = 2u << 20;
        const long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
        return size > 0 ? std::min(static_cast<std::uint64_t>(size) / 2, cap) : cap;
    }();
    return limit;
}

inline Mover mover_for(std::uint64_t bytes) {
    static const Mover streaming = best_streaming().move;
    return bytes > stream_above_bytes() ? streaming : move_plain;
}

}  // namespace datadist
