// Moves blocks of every alignment by every way of moving that this processor has, whichever of them the library would
// choose, and looks at every byte in and around the destination.
//
//   g++ -std=c++17 -g -O1 -fsanitize=address,undefined -Isrc/llm_datadist/_native tests/native/movers_driver.cpp
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "copy/streaming_stores.hpp"
#include "guards/generation.hpp"

using namespace datadist;

namespace {

constexpr std::size_t margin = 128;
constexpr unsigned char untouched = 0xA5;

void check(const char* name, Mover move, std::size_t bytes, std::size_t dst_at, std::size_t src_at) {
    std::vector<char> src(bytes + src_at + margin), dst(bytes + dst_at + 2 * margin, static_cast<char>(untouched));
    for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 131 + i / 256);
    std::vector<char> expected = dst;
    std::memcpy(expected.data() + margin + dst_at, src.data() + src_at, bytes);
    move(dst.data() + margin + dst_at, src.data() + src_at, bytes);
    store_fence();
    if (dst == expected) return;
    std::fprintf(stderr, "%s: %zu bytes from +%zu to +%zu came out wrong\n", name, bytes, src_at, dst_at);
    std::exit(1);
}

void check_all(const char* name, Mover move) {
    const std::size_t sizes[] = {0, 1, 63, 64, 511, 512, 513, 575, 640, 767, 768, 1000, 4095, 4096, 4097, 70'001};
    for (const std::size_t bytes : sizes)
        for (std::size_t dst_at = 0; dst_at <= 64; dst_at += dst_at < 2 || dst_at > 61 ? 1 : 12)
            for (const std::size_t src_at : {std::size_t{0}, std::size_t{1}, std::size_t{32}, std::size_t{63}})
                check(name, move, bytes, dst_at, src_at);
    std::printf("%s\n", name);
}

}  // namespace

int main() {
    check_all("plain", move_plain);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) check_all("avx2", stream_avx2);
    if (__builtin_cpu_supports("avx512f")) check_all("avx512", stream_avx512);
#elif defined(__aarch64__)
    check_all("stnp", stream_stnp);
#endif
}
