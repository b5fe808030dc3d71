// Limits of this machine for the benchmark: plain loops over blocks on own threads. They share no copying code with the
// engine, so a fault there cannot hide in its own yardstick. Encrypted streams share its cipher.
#pragma once

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "crypto/encrypted.hpp"
#include "error.hpp"
#include "little_endian.hpp"
#include "thread.hpp"
#include "ticket.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace datadist {

// Blocks of one size, in this process or, for process_vm_readv and writev, in another one.
struct LimitBlocks {
    const std::uint64_t* addresses;
    std::size_t count;
    std::size_t bytes;

    char* at(std::size_t i) const { return reinterpret_cast<char*>(static_cast<std::uintptr_t>(addresses[i])); }
};

constexpr std::int64_t max_limit_block = std::int64_t{1} << 30;
constexpr int max_limit_threads = 1024;

inline void check_limit_blocks(const LimitBlocks& blocks, std::int64_t block_bytes, std::int64_t most) {
    if (block_bytes < 1 || block_bytes > most) refuse("block_bytes is ", block_bytes, ": must be in [1, ", most, "]");
    for (std::size_t i = 0; i < blocks.count; ++i)
        if (blocks.addresses[i] == 0) refuse("address ", i, " is 0: must be that of a block");
}

inline void check_limit_pair(const LimitBlocks& dst, const LimitBlocks& src, std::int64_t block_bytes, int threads) {
    if (dst.count != src.count) refuse("dst has ", dst.count, " blocks and src ", src.count, ": must be as many");
    if (threads < 1 || threads > max_limit_threads)
        refuse("threads is ", threads, ": must be in [1, ", max_limit_threads, "]");
    check_limit_blocks(dst, block_bytes, max_limit_block);
    check_limit_blocks(src, block_bytes, max_limit_block);
}

// All threads must work at once, but the kernel may leave a new one on its maker's CPU. The new thread calls this
// itself: for an ended thread the system would change the caller's mask.
inline void keep_off(int cpu) {
    cpu_set_t allowed;
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    CPU_CLR(cpu, &allowed);
    if (CPU_COUNT(&allowed) > 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

// Calls work(first, end) on equal shares of the blocks, on the caller's and threads - 1 other threads.
template <typename Work>
void share_blocks(std::size_t count, int threads, const Work& work) {
    const auto shares = static_cast<std::size_t>(threads);
    std::vector<std::thread> others;
    others.reserve(shares);
    std::size_t given = 1;
    try {
        for (; given < shares; ++given)
            others.push_back(quiet_thread("lldd-limit", [&work, count, shares, given, caller = sched_getcpu()] {
                keep_off(caller);
                work(count * given / shares, count * (given + 1) / shares);
            }));
    } catch (const std::system_error&) {  // no more threads: the caller does the rest
    }
    work(0, count / shares);
    work(count * given / shares, count);
    for (std::thread& other : others) other.join();
}

inline void plain_blocks(const LimitBlocks& dst, const LimitBlocks& src, std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) std::memcpy(dst.at(i), src.at(i), dst.bytes);
}

#if defined(__x86_64__) || defined(__aarch64__)

// Copies up to dst's first aligned byte; returns the bytes copied.
inline std::size_t move_head(char* dst, const char* src, std::size_t bytes, std::size_t alignment) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(dst) % alignment;
    const std::size_t head = std::min(bytes, past == 0 ? 0 : alignment - past);
    std::memcpy(dst, src, head);
    return head;
}

#endif

#if defined(__x86_64__)

// 256 bytes a turn.
__attribute__((target("avx512f"))) inline void stream_block_512(char* dst, const char* src, std::size_t bytes) {
    std::size_t i = move_head(dst, src, bytes, 64);
    for (; i + 256 <= bytes; i += 256) {
        const __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 64);
        const __m512i c = _mm512_loadu_si512(src + i + 128), d = _mm512_loadu_si512(src + i + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 192), d);
    }
    std::memcpy(dst + i, src + i, bytes - i);
}

__attribute__((target("avx"))) inline __m256i load_256(const char* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

// 128 bytes a turn.
__attribute__((target("avx"))) inline void stream_block_256(char* dst, const char* src, std::size_t bytes) {
    std::size_t i = move_head(dst, src, bytes, 32);
    for (; i + 128 <= bytes; i += 128) {
        const __m256i a = load_256(src + i), b = load_256(src + i + 32);
        const __m256i c = load_256(src + i + 64), d = load_256(src + i + 96);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 64), c);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 96), d);
    }
    std::memcpy(dst + i, src + i, bytes - i);
}

#elif defined(__aarch64__)

// 64 bytes a turn. Assembler: gcc has no intrinsic.
inline void stream_block_pairs(char* dst, const char* src, std::size_t bytes) {
    std::size_t i = move_head(dst, src, bytes, 64);
    for (; i + 64 <= bytes; i += 64) {
        const auto* from = reinterpret_cast<const std::uint8_t*>(src + i);
        const uint8x16_t a = vld1q_u8(from), b = vld1q_u8(from + 16), c = vld1q_u8(from + 32), d = vld1q_u8(from + 48);
        asm volatile("stnp %q0, %q1, [%4]\n\tstnp %q2, %q3, [%4, #32]"
                     :
                     : "w"(a), "w"(b), "w"(c), "w"(d), "r"(dst + i)
                     : "memory");
    }
    std::memcpy(dst + i, src + i, bytes - i);
}

#endif

using BlockStreamer = void (*)(char*, const char*, std::size_t);

// Width in bits of the widest streaming stores, and their function; 0 and null without any.
inline std::pair<int, BlockStreamer> widest_streamer() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return {512, stream_block_512};
    if (__builtin_cpu_supports("avx")) return {256, stream_block_256};
    return {0, nullptr};
#elif defined(__aarch64__)
    return {256, stream_block_pairs};
#else
    return {0, nullptr};
#endif
}

inline void streamed_blocks(BlockStreamer move, const LimitBlocks& dst, const LimitBlocks& src, std::size_t first,
                            std::size_t end) {
    for (std::size_t i = first; i < end; ++i) move(dst.at(i), src.at(i), dst.bytes);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Copies block i of src to block i of dst. Both checked, in this process.
inline void limit_memcpy(const LimitBlocks& dst, const LimitBlocks& src, int threads, bool streaming) {
    const BlockStreamer move = widest_streamer().second;
    if (streaming && move == nullptr) refuse("streaming is true: this processor has no streaming stores");
    share_blocks(dst.count, threads, [&](std::size_t first, std::size_t end) {
        if (streaming) return streamed_blocks(move, dst, src, first, end);
        plain_blocks(dst, src, first, end);
    });
}

// Moves some consecutive blocks; returns the errno, or 0.
inline int process_blocks(pid_t pid, bool write, const LimitBlocks& near, const LimitBlocks& far, std::size_t first,
                          std::size_t end) {
    constexpr std::size_t most_ranges = 512;
    const std::size_t a_call =
        std::min(most_ranges, static_cast<std::size_t>(max_limit_block) / near.bytes);  // the kernel moves below 2 GiB
    iovec here[most_ranges], there[most_ranges];
    while (first < end) {
        const std::size_t ranges = std::min(a_call, end - first);
        for (std::size_t i = 0; i < ranges; ++i, ++first) {
            here[i] = {near.at(first), near.bytes};
            there[i] = {far.at(first), far.bytes};
        }
        const ssize_t moved = write ? process_vm_writev(pid, here, ranges, there, ranges, 0)
                                    : process_vm_readv(pid, here, ranges, there, ranges, 0);
        if (moved < 0) return errno;
        if (static_cast<std::size_t>(moved) != ranges * near.bytes) return EFAULT;
    }
    return 0;
}

// Copies block i of the other process to block i of this one, or back. Throws std::system_error.
inline void limit_process(pid_t pid, bool write, const LimitBlocks& near, const LimitBlocks& far, int threads) {
    std::atomic<int> failed{0};
    share_blocks(near.count, threads, [&](std::size_t first, std::size_t end) {
        const int code = process_blocks(pid, write, near, far, first, end);
        if (code != 0) failed.store(code, std::memory_order_relaxed);
    });
    const int code = failed.load(std::memory_order_relaxed);
    if (code != 0)
        throw std::system_error(code, std::generic_category(), write ? "process_vm_writev" : "process_vm_readv");
}

// Receiver's wait for more bytes: for some, for many, or none.
enum class StreamWait : int { some = 0, much = 1, spin = 2 };

constexpr std::size_t limit_step_bytes = std::size_t{1} << 20;
constexpr std::size_t limit_much_bytes = std::size_t{256} << 10;
constexpr std::int64_t limit_spin_ns = 300'000'000'000;

inline void set_low_water(int fd, std::size_t bytes) {
    const int wanted = static_cast<int>(bytes);
    if (::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) != 0)
        throw std::system_error(errno, std::generic_category(), "SO_RCVLOWAT");
}

// One step of a stream: at most 1 MiB, as much as the socket takes or has. Throws std::system_error.
//
// A receiver waits for many bytes in poll(). A blocking recv() that has some bytes wakes only once as many as the
// low-water mark have followed.
inline std::size_t stream_step(int fd, bool send, char* at, std::size_t bytes, StreamWait wait) {
    const std::size_t asked = std::min(bytes, limit_step_bytes);
    const bool polls = wait == StreamWait::much && !send, spins = wait == StreamWait::spin && !send;
    const std::int64_t until = spins ? monotonic_ns() + limit_spin_ns : 0;
    for (;;) {
        pollfd readable{fd, POLLIN, 0};
        if (polls && ::poll(&readable, 1, -1) < 0 && errno != EINTR)
            throw std::system_error(errno, std::generic_category(), "poll");
        const ssize_t moved =
            send ? ::send(fd, at, asked, MSG_NOSIGNAL) : ::recv(fd, at, asked, polls || spins ? MSG_DONTWAIT : 0);
        if (moved > 0) return static_cast<std::size_t>(moved);
        if (moved == 0) throw std::system_error(ECONNRESET, std::generic_category(), "recv");
        const bool again = errno == EINTR || (errno == EAGAIN && (polls || (spins && monotonic_ns() < until)));
        if (!again) throw std::system_error(errno, std::generic_category(), send ? "send" : "recv");
    }
}

// Sends blocks in order over a blocking stream socket, or receives into them.
inline void limit_stream(int fd, bool send, const LimitBlocks& blocks, StreamWait wait) {
    std::size_t left = blocks.count * blocks.bytes, low = 1;
    for (std::size_t i = 0; i < blocks.count; ++i)
        for (std::size_t done = 0; done < blocks.bytes;) {
            const std::size_t much = wait == StreamWait::much && !send ? std::min(limit_much_bytes, left) : 1;
            if (much != low) set_low_water(fd, low = much);
            const std::size_t moved = stream_step(fd, send, blocks.at(i) + done, blocks.bytes - done, wait);
            done += moved;
            left -= moved;
        }
    if (low != 1) set_low_water(fd, 1);
}

constexpr std::size_t limit_record_bytes = max_record_bytes + tag_bytes;
constexpr std::size_t limit_records = 8;

// Encrypts a record and appends its tag, or decrypts and checks it. The length, which both sides know, is authenticated.
inline void limit_record(RecordCipher& cipher, bool encrypts, char* plain, char* encrypted, std::size_t bytes) {
    std::string length;
    append(length, static_cast<std::uint32_t>(bytes));
    cipher.begin(length.data());
    cipher.update(encrypts ? encrypted : plain, encrypts ? plain : encrypted, bytes);
    encrypts ? cipher.write_tag(encrypted + bytes) : cipher.check_tag(encrypted + bytes);
}

// As limit_stream(), in records of AES-256-GCM: ciphertext of at most 64 KiB, then its tag. Eight are one step. `first`
// is the number of the first record under the key. Returns that of the next. Throws LaneError for a wrong tag.
inline std::uint64_t limit_encrypted(int fd, bool send, const LimitBlocks& blocks, StreamWait wait,
                                     const std::array<char, key_bytes>& key, std::uint64_t first) {
    RecordCipher cipher(key, send, first);
    const std::unique_ptr<char[]> buffer(new char[limit_records * limit_record_bytes]);
    const std::uint64_t address = reinterpret_cast<std::uintptr_t>(buffer.get());
    std::vector<iovec> records;
    std::size_t bytes = 0;
    const auto use_cipher = [&] {
        char* encrypted = buffer.get();
        for (const iovec& each : records) {
            limit_record(cipher, send, static_cast<char*>(each.iov_base), encrypted, each.iov_len);
            encrypted += each.iov_len + tag_bytes;
        }
    };
    const auto step = [&] {
        if (send) use_cipher();
        limit_stream(fd, send, {&address, 1, bytes}, wait);
        if (!send) use_cipher();
        records.clear();
        bytes = 0;
    };
    for (std::size_t i = 0; i < blocks.count; ++i)
        for (std::size_t done = 0; done < blocks.bytes; done += max_record_bytes, ++first) {
            records.push_back({blocks.at(i) + done, std::min(max_record_bytes, blocks.bytes - done)});
            bytes += records.back().iov_len + tag_bytes;
            if (records.size() == limit_records) step();
        }
    step();
    return first;
}

// Encrypts `count` records of 64 KiB that stay in the processor's cache.
inline void limit_cipher(std::uint64_t count) {
    RecordCipher cipher({}, true);
    std::vector<char> plain(max_record_bytes), encrypted(limit_record_bytes);
    while (count-- > 0) limit_record(cipher, true, plain.data(), encrypted.data(), plain.size());
}

}  // namespace datadist
