// Digests of memory: 128 bits, equal for equal bytes in equal order. Not cryptographic.
//
// A stream is cut into stripes of 1 KiB. NH, the universal hash of UMAC and VMAC, hashes each: with random keys,
// different stripes agree with probability 2^-64. Its 128 bits are mixed with the stripe's number, then added up. So
// threads take stripes in any order, and swapped stripes change the digest. Boundaries of runs inside a stream do not
// matter. All machines compute the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "copy/chunks.hpp"
#include "copy/pool.hpp"
#include "copy/sides.hpp"
#include "error.hpp"

namespace datadist {

__extension__ typedef unsigned __int128 Wide;

constexpr std::size_t stripe_bytes = 1024;
constexpr std::size_t stripe_words = stripe_bytes / sizeof(std::uint64_t);
constexpr std::uint64_t golden = 0x9E3779B97F4A7C15u;

// Finalizer of splitmix64: a bijection in which each input bit affects each output bit.
inline std::uint64_t scramble(std::uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

inline std::uint64_t load_word(const char* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

struct Digest {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
};

// Keys from a nonce: for each word of a stripe, its number, and the stream's length.
struct DigestKey {
    std::array<std::uint64_t, stripe_words> words;
    std::uint64_t place;
    std::uint64_t length;

    DigestKey(std::uint64_t first, std::uint64_t second) {
        std::uint64_t state = scramble(first + golden) ^ second;
        const auto next = [&state] { return scramble(state += golden); };
        for (std::uint64_t& word : words) word = next();
        place = next();
        length = next();
    }
};

inline Wide nh_pair(const char* at, const std::uint64_t* key) {
    return static_cast<Wide>(load_word(at) + key[0]) * (load_word(at + 8) + key[1]);
}

// Hashes `pairs` times 16 bytes. Measured: the prefetch one stripe ahead gives the speed of plain reading.
inline Wide nh(const char* at, std::size_t pairs, const std::uint64_t* key) {
    Wide even = 0, odd = 0;  // two sums: neither waits for the other's carry
    for (; pairs >= 4; pairs -= 4, at += 64, key += 8) {
        __builtin_prefetch(at + stripe_bytes);
        even += nh_pair(at, key);
        odd += nh_pair(at + 16, key + 2);
        even += nh_pair(at + 32, key + 4);
        odd += nh_pair(at + 48, key + 6);
    }
    for (; pairs > 0; --pairs, at += 16, key += 2) even += nh_pair(at, key);
    return even + odd;
}

// Part of a stream for one thread, from a stripe boundary on.
class StripeSum {
public:
    StripeSum(const DigestKey& key, std::uint64_t stripe) : key_(key), stripe_(stripe) {}

    void add(const char* from, std::uint64_t bytes) {
        if (filled_ > 0) {
            const std::uint64_t step = std::min<std::uint64_t>(bytes, stripe_bytes - filled_);
            keep(from, step);
            from += step;
            bytes -= step;
            if (filled_ < stripe_bytes) return;
            absorb(buffer_.data(), stripe_bytes);
            filled_ = 0;
        }
        for (; bytes >= stripe_bytes; from += stripe_bytes, bytes -= stripe_bytes) absorb(from, stripe_bytes);
        keep(from, bytes);
    }

    // Zero padding is safe: the digest includes the stream's length.
    Digest take() {
        if (filled_ > 0) {
            const std::size_t padded = (filled_ + 15) / 16 * 16;
            std::memset(buffer_.data() + filled_, 0, padded - filled_);
            absorb(buffer_.data(), padded);
            filled_ = 0;
        }
        return sum_;
    }

private:
    void keep(const char* from, std::uint64_t bytes) {
        std::memcpy(buffer_.data() + filled_, from, bytes);
        filled_ += bytes;
    }

    // For a fixed stripe number a bijection of NH's 128 bits: only the sum loses information.
    void absorb(const char* from, std::size_t bytes) {
        const Wide value = nh(from, bytes / 16, key_.words.data());
        const std::uint64_t place = scramble(key_.place + stripe_++ * golden);
        const std::uint64_t low = scramble(static_cast<std::uint64_t>(value) + place);
        const std::uint64_t high = scramble(static_cast<std::uint64_t>(value >> 64) ^ low);
        sum_.low += low + high * golden;
        sum_.high += high;
    }

    const DigestKey& key_;
    std::uint64_t stripe_;
    Digest sum_;
    std::size_t filled_ = 0;
    std::array<char, stripe_bytes> buffer_;
};

inline Digest finished(const DigestKey& key, const Digest& sum, std::uint64_t bytes) {
    const std::uint64_t low = scramble(sum.low ^ scramble(key.length + bytes));
    return {low, scramble(sum.high + low)};
}

// Side of a plan: `count` tensors times one column of the runs.
struct DigestSide {
    CopySide tensors;
    std::size_t count;
    const Run* runs;
    std::size_t run_count;
    std::uint64_t Run::* offset;

    const char* address(std::size_t tensor, std::size_t run, std::uint64_t at) const {
        return tensors.address(tensor, runs[run].*offset + at);
    }
};

// Returns the side's bytes. Throws RuleError unless all of them lie in their tensors.
inline std::uint64_t check_side(const DigestSide& side, std::int64_t count) {
    check_tensors(side.tensors, count);
    const auto extent = static_cast<std::uint64_t>(side.tensors.extent);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < side.run_count; ++i) {
        const Run& run = side.runs[i];
        if (run_ends_outside(run.*side.offset, run.bytes, extent))
            refuse("runs[", i, "] is ", run.bytes, " bytes at offset ", run.*side.offset,
                   ": ends outside the tensor of ", side.tensors.extent, " bytes");
        if (__builtin_add_overflow(total, run.bytes, &total)) refuse("runs hold more than 2**64 - 1 bytes");
    }
    if (__builtin_mul_overflow(total, static_cast<std::uint64_t>(count), &total))
        refuse("runs times ", count, " tensors hold more than 2**64 - 1 bytes");
    return total;
}

// Digests a side's streams: one for each tensor, or one for each run of each tensor.
class DigestTask final : public Task {
public:
    DigestTask(const DigestSide& side, const DigestKey& key, bool each_run, std::uint64_t chunk_bytes, const Stop& stop)
        : side_(side), key_(key), stop_(stop) {
        cut(each_run, chunk_bytes / stripe_bytes * stripe_bytes);
        sums_ = std::make_unique<Sum[]>(side.count * lengths_.size());
        total_ = side.count * chunks_.size();
    }

    void run() noexcept override {
        for (std::size_t at = take(); at < total_; at = take()) {
            if (stop_.now()) {
                late_.store(true, std::memory_order_relaxed);
                next_.store(total_, std::memory_order_relaxed);
                return;
            }
            digest(at / chunks_.size(), chunks_[at % chunks_.size()]);
        }
    }

    bool exhausted() const noexcept override { return next_.load(std::memory_order_relaxed) >= total_; }

    // True if it stopped early. Valid once every thread has left.
    bool late() const { return late_.load(std::memory_order_relaxed); }

    std::vector<Digest> digests() const {
        std::vector<Digest> out(side_.count * lengths_.size());
        for (std::size_t i = 0; i < out.size(); ++i)
            out[i] = finished(key_, {sums_[i].low.load(), sums_[i].high.load()}, lengths_[i % lengths_.size()]);
        return out;
    }

private:
    struct Sum {
        std::atomic<std::uint64_t> low{0};
        std::atomic<std::uint64_t> high{0};
    };

    // Consecutive bytes of one stream, from a stripe boundary on; several runs may be in it.
    struct Chunk {
        std::size_t run;
        std::uint64_t offset;
        std::uint64_t bytes;
        std::size_t stream;
        std::uint64_t stripe;
    };

    void cut(bool each_run, std::uint64_t chunk_bytes) {
        if (!each_run) lengths_.push_back(0);
        std::uint64_t room = 0;
        for (std::size_t i = 0; i < side_.run_count; ++i) {
            if (each_run) {
                lengths_.push_back(0);
                room = 0;
            }
            for (std::uint64_t at = 0; at < side_.runs[i].bytes;) {
                if (room == 0) {
                    chunks_.push_back({i, at, 0, lengths_.size() - 1, lengths_.back() / stripe_bytes});
                    room = chunk_bytes;
                }
                const std::uint64_t step = std::min(room, side_.runs[i].bytes - at);
                chunks_.back().bytes += step;
                lengths_.back() += step;
                room -= step;
                at += step;
            }
        }
    }

    std::size_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    void digest(std::size_t tensor, const Chunk& chunk) {
        StripeSum sum(key_, chunk.stripe);
        std::uint64_t offset = chunk.offset;
        std::uint64_t left = chunk.bytes;
        for (std::size_t run = chunk.run; left > 0; ++run, offset = 0) {
            const std::uint64_t step = std::min(left, side_.runs[run].bytes - offset);
            sum.add(side_.address(tensor, run, offset), step);
            left -= step;
        }
        const Digest part = sum.take();
        Sum& whole = sums_[tensor * lengths_.size() + chunk.stream];
        whole.low.fetch_add(part.low, std::memory_order_relaxed);
        whole.high.fetch_add(part.high, std::memory_order_relaxed);
    }

    const DigestSide& side_;
    const DigestKey& key_;
    Stop stop_;
    std::vector<std::uint64_t> lengths_;  // of each stream of a tensor
    std::vector<Chunk> chunks_;           // of each tensor
    std::size_t total_ = 0;
    std::unique_ptr<Sum[]> sums_;
    std::atomic<std::size_t> next_{0};
    std::atomic<bool> late_{false};
};

// Digests a checked side of `total` bytes; false if it stopped early.
inline bool digest_side(const DigestSide& side, std::uint64_t total, const DigestKey& key, bool each_run,
                        CopyPool* pool, const Stop& stop, std::vector<Digest>& out) {
    CopyPool* helpers = total <= share_above_bytes ? nullptr : pool;
    DigestTask task(side, key, each_run, chunk_bytes_for(total, helpers), stop);
    if (helpers == nullptr)
        task.run();
    else
        helpers->share(task);
    if (task.late()) return false;
    out = task.digests();
    return true;
}

}  // namespace datadist
