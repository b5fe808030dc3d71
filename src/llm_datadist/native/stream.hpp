// One contiguous copy that bypasses the caches on the way out, where the processor offers that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace datadist {

// Copies between ranges that do not overlap (memmove excepted: it takes any).
using Mover = void (*)(char* dst, const char* src, std::size_t bytes);

inline void move_plain(char* dst, const char* src, std::size_t bytes) { std::memmove(dst, src, bytes); }

#if defined(__x86_64__)

// Below this the unaligned head and tail cost more than the caches give back.
constexpr std::size_t stream_min_bytes = 4096;

// Copies up to the next multiple of `alignment` of dst; returns the bytes that took.
inline std::size_t align_head(char* dst, const char* src, std::size_t alignment) {
    const std::size_t head = (alignment - reinterpret_cast<std::uintptr_t>(dst) % alignment) % alignment;
    std::memcpy(dst, src, head);
    return head;
}

__attribute__((target("avx512f"))) inline void stream_avx512(char* dst, const char* src, std::size_t bytes) {
    if (bytes < stream_min_bytes) return move_plain(dst, src, bytes);
    std::size_t at = align_head(dst, src, 64);
    for (; bytes - at >= 256; at += 256) {
        const __m512i a = _mm512_loadu_si512(src + at), b = _mm512_loadu_si512(src + at + 64);
        const __m512i c = _mm512_loadu_si512(src + at + 128), d = _mm512_loadu_si512(src + at + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 192), d);
    }
    std::memcpy(dst + at, src + at, bytes - at);
}

__attribute__((target("avx2"))) inline void stream_avx2(char* dst, const char* src, std::size_t bytes) {
    if (bytes < stream_min_bytes) return move_plain(dst, src, bytes);
    std::size_t at = align_head(dst, src, 32);
    for (; bytes - at >= 128; at += 128) {
        const auto* from = reinterpret_cast<const __m256i*>(src + at);
        auto* to = reinterpret_cast<__m256i*>(dst + at);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    std::memcpy(dst + at, src + at, bytes - at);
}

inline Mover best_streaming_mover() {
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    if (__builtin_cpu_supports("avx2")) return stream_avx2;
    return move_plain;
}

#else

inline Mover best_streaming_mover() { return move_plain; }

#endif

}  // namespace datadist
