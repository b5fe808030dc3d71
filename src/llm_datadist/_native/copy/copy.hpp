// Execution of a checked plan in this process, in order or by several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "copy/chunks.hpp"
#include "copy/pool.hpp"
#include "copy/sides.hpp"
#include "copy/streaming_stores.hpp"
#include "guards/generation.hpp"

namespace datadist {

inline bool ranges_meet(std::uint64_t a, std::uint64_t a_bytes, std::uint64_t b, std::uint64_t b_bytes) {
    return a < b ? b - a < a_bytes : a - b < b_bytes;
}

// True if a run's source overlaps its destination: the order of its pieces then matters.
inline bool runs_overlap_themselves(const Copy& copy) {
    const auto dst_extent = static_cast<std::uint64_t>(copy.dst.extent);
    const auto src_extent = static_cast<std::uint64_t>(copy.src.extent);
    std::optional<std::uint64_t> answered;  // last distance examined; most pairs share it
    for (std::size_t pair = 0; pair < copy.pairs; ++pair) {
        const auto dst = reinterpret_cast<std::uint64_t>(copy.dst.address(pair, 0));
        const auto src = reinterpret_cast<std::uint64_t>(copy.src.address(pair, 0));
        if (dst - src == answered || !ranges_meet(dst, dst_extent, src, src_extent)) continue;
        answered = dst - src;
        for (std::size_t i = 0; i < copy.run_count; ++i) {
            const Run& run = copy.runs[i];
            if (ranges_meet(dst + run.dst, run.bytes, src + run.src, run.bytes)) return true;
        }
    }
    return false;
}

// Copy in the plan's order; overlapping runs as by memmove. Returns the bytes done before it stopped.
class OrderedCopy {
public:
    OrderedCopy(const Copy& copy, const Stop& stop) : copy_(copy), stop_(stop) {}

    std::uint64_t run() {
        for (std::size_t pair = 0; pair < copy_.pairs; ++pair)
            for (std::size_t i = 0; i < copy_.run_count; ++i) {
                const Run& run = copy_.runs[i];
                if (!move(copy_.dst.address(pair, run.dst), copy_.src.address(pair, run.src), run.bytes)) return done_;
            }
        return done_;
    }

private:
    // In this direction no piece overwrites bytes still to be read.
    bool move(char* dst, const char* src, std::uint64_t bytes) {
        const bool backward = dst > src;
        for (std::uint64_t moved = 0; moved < bytes;) {
            if (allowance_ == 0 && !renew()) return false;
            const std::uint64_t step = std::min(bytes - moved, allowance_);
            const std::uint64_t at = backward ? bytes - moved - step : moved;
            move_plain(dst + at, src + at, step);
            moved += step;
            done_ += step;
            allowance_ -= step;
        }
        return true;
    }

    bool renew() {
        if (stop_.now()) return false;
        allowance_ = max_chunk_bytes;
        return true;
    }

    const Copy& copy_;
    const Stop& stop_;
    std::uint64_t allowance_ = 0;  // bytes until the next check of Stop
    std::uint64_t done_ = 0;
};

// Prefetches each piece, and moves it when the next one arrives. Measured: a fifth faster at 4 KiB.
class LocalCarrier {
public:
    LocalCarrier(Mover move, std::size_t stream_from) : move_(move), stream_from_(stream_from) {}

    bool add(char* dst, const char* src, std::uint64_t bytes) noexcept {
        prefetch_head(src, bytes);
        move_last();
        dst_ = dst;
        src_ = src;
        bytes_ = bytes;
        return true;
    }

    bool flush() noexcept {
        move_last();
        bytes_ = 0;
        return true;
    }

    std::uint64_t done() const noexcept { return done_; }

private:
    void move_last() noexcept {
        if (bytes_ == 0) return;
        (bytes_ < stream_from_ ? move_plain : move_)(dst_, src_, bytes_);
        done_ += bytes_;
    }

    Mover move_;
    std::size_t stream_from_;
    char* dst_ = nullptr;
    const char* src_ = nullptr;
    std::uint64_t bytes_ = 0;
    std::uint64_t done_ = 0;
};

struct LocalCarriers {
    Mover move;

    LocalCarrier carrier() const noexcept { return {move, stream_cold_bytes()}; }
};

inline std::uint64_t copy_in_order(const Copy& copy, const Stop& stop) {
    const std::uint64_t done = OrderedCopy(copy, stop).run();
    store_fence();
    return done;
}

// Moves a checked plan; returns the bytes done, fewer than all only if it stopped between two chunks.
inline std::uint64_t execute(const Copy& copy, std::uint64_t per_pair, CopyPool* pool, const Stop& stop) {
    const std::uint64_t total = per_pair * copy.pairs;
    if (total == 0) return 0;
    if (copy.ordered || runs_overlap_themselves(copy)) return copy_in_order(copy, stop);
    CopyPool* helpers = total <= share_above_bytes ? nullptr : pool;
    return copy_in_chunks(copy, per_pair, helpers, stop, LocalCarriers{mover_for(total)});
}

}  // namespace datadist
