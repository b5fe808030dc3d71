// The executor: checks that a plan stays inside both ends, then moves its bytes in order or shared by threads.
#pragma once

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "error.hpp"
#include "guard.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "stream.hpp"

namespace datadist {

// Measured choices.
constexpr std::uint64_t max_chunk_bytes = 4u << 20;    // between two looks at the clock
constexpr std::uint64_t min_chunk_bytes = 256u << 10;  // what one thread takes at a time, at least
constexpr std::uint64_t share_above_bytes = 1u << 20;  // below this waking a thread costs more than it brings

// The tensors of one end, as mapped in this process.
struct End {
    const std::uint64_t* bases;
    std::size_t tensors;
    std::int64_t extent;  // bytes of each tensor
    std::int64_t first;   // the first tensor of the plan
    const char* name;     // "dst" or "src", for errors

    char* address(std::size_t pair, std::uint64_t offset) const {
        return reinterpret_cast<char*>(bases[static_cast<std::size_t>(first) + pair] + offset);
    }
};

// `pairs` tensors times runs.
struct Copy {
    End dst;
    End src;
    std::size_t pairs;
    const Run* runs;
    std::size_t run_count;
    bool ordered;
};

inline void check_tensors(const End& end, std::int64_t pairs) {
    const auto tensors = static_cast<std::int64_t>(end.tensors);
    if (end.first < 0 || pairs < 0 || end.first > tensors || pairs > tensors - end.first)
        refuse("plan.", end.name, "_first is ", end.first, " and plan.count ", pairs, ": the ", end.name, " end has ",
               tensors, " tensors");
    if (end.extent < 0) refuse(end.name, ".extent is ", end.extent, ": must not be negative");
    for (std::int64_t i = end.first; i < end.first + pairs; ++i) {
        const std::uint64_t base = end.bases[i];
        if (base == 0 || base > UINT64_MAX - static_cast<std::uint64_t>(end.extent))
            refuse(end.name, ".bases[", i, "] is ", base, ": no address of ", end.extent, " bytes");
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

// Checks every run against both extents; returns the bytes of one tensor.
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

// Throws RuleError unless every byte the plan addresses exists at both ends; returns the bytes of one tensor.
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

inline bool ranges_meet(std::uint64_t a, std::uint64_t a_bytes, std::uint64_t b, std::uint64_t b_bytes) {
    return a < b ? b - a < a_bytes : a - b < b_bytes;
}

// True when the two ends of some run overlap each other: then it must be one memmove, not pieces in any order.
inline bool runs_overlap_themselves(const Copy& copy) {
    const auto dst_extent = static_cast<std::uint64_t>(copy.dst.extent);
    const auto src_extent = static_cast<std::uint64_t>(copy.src.extent);
    std::optional<std::uint64_t> answered;  // the distance of the ends last looked at; most pairs share it
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

inline bool passed(std::int64_t deadline_ns) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec >= deadline_ns;
}

// Streaming stores pay once source and destination would not both stay in the caches. The cap is measured: a cache is
// shared with others, and on a Xeon that reports 260 MiB of it streaming won from 8 MiB on.
inline bool exceeds_caches(std::uint64_t bytes) {
    static const std::uint64_t limit = [] {
        constexpr std::uint64_t cap = 16u << 20;
        const long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
        return size > 0 ? std::min(static_cast<std::uint64_t>(size) / 2, cap) : cap;
    }();
    return bytes > limit;
}

inline Mover mover_for(std::uint64_t bytes) {
    static const Mover streaming = best_streaming_mover();
    return exceeds_caches(bytes) ? streaming : move_plain;
}

// One after the other, in the order of the plan; overlapping runs like memmove. Returns the bytes done by the deadline.
class OrderedCopy {
public:
    OrderedCopy(const Copy& copy, std::int64_t deadline_ns) : copy_(copy), deadline_ns_(deadline_ns) {}

    std::uint64_t run() {
        for (std::size_t pair = 0; pair < copy_.pairs; ++pair)
            for (std::size_t i = 0; i < copy_.run_count; ++i) {
                const Run& run = copy_.runs[i];
                if (!move(copy_.dst.address(pair, run.dst), copy_.src.address(pair, run.src), run.bytes)) return done_;
            }
        return done_;
    }

private:
    // Pieces go towards the end that is read last, so that none overwrites what another still has to read.
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
        if (passed(deadline_ns_)) return false;
        allowance_ = max_chunk_bytes;
        return true;
    }

    const Copy& copy_;
    std::int64_t deadline_ns_;
    std::uint64_t allowance_ = 0;  // bytes until the next look at the clock
    std::uint64_t done_ = 0;
};

// In chunks of about equal bytes, by as many threads as come. Only for plans whose order cannot be seen.
class ChunkedCopy final : public Task {
public:
    ChunkedCopy(const Copy& copy, std::uint64_t per_pair, std::uint64_t chunk_bytes, std::int64_t deadline_ns)
        : copy_(copy),
          deadline_ns_(deadline_ns),
          move_(mover_for(per_pair * copy.pairs)),
          group_(static_cast<std::size_t>(std::max<std::uint64_t>(1, chunk_bytes / per_pair))) {
        cut(chunk_bytes);
        chunks_ = (copy.pairs + group_ - 1) / group_ * slices();
    }

    void run() noexcept override {
        std::uint64_t done = 0;
        while (true) {
            const std::size_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= chunks_) break;
            if (passed(deadline_ns_)) {
                next_.store(chunks_, std::memory_order_relaxed);
                break;
            }
            done += move_chunk(chunk);
        }
        store_fence();
        done_.fetch_add(done, std::memory_order_release);
    }

    bool exhausted() const noexcept override { return next_.load(std::memory_order_relaxed) >= chunks_; }

    std::uint64_t done() const { return done_.load(std::memory_order_acquire); }

private:
    // A place in the bytes of one tensor: inside which run, how far in.
    struct Mark {
        std::size_t run;
        std::uint64_t offset;
    };

    // Marks every chunk_bytes, the beginning and the end included.
    void cut(std::uint64_t chunk_bytes) {
        marks_.push_back({0, 0});
        std::uint64_t room = chunk_bytes;
        for (std::size_t i = 0; i < copy_.run_count; ++i) {
            std::uint64_t offset = 0;
            while (copy_.runs[i].bytes - offset > room) {
                offset += room;
                marks_.push_back({i, offset});
                room = chunk_bytes;
            }
            room -= copy_.runs[i].bytes - offset;
        }
        marks_.push_back({copy_.run_count, 0});
    }

    std::size_t slices() const { return marks_.size() - 1; }

    std::uint64_t move_chunk(std::size_t chunk) const {
        const std::size_t slice = chunk % slices();
        const std::size_t begin = chunk / slices() * group_;
        const std::size_t end = std::min(begin + group_, copy_.pairs);
        std::uint64_t done = 0;
        for (std::size_t pair = begin; pair < end; ++pair) done += move_slice(pair, marks_[slice], marks_[slice + 1]);
        return done;
    }

    std::uint64_t move_slice(std::size_t pair, const Mark& from, const Mark& to) const {
        std::uint64_t done = 0;
        for (std::size_t i = from.run; i <= to.run && i < copy_.run_count; ++i) {
            const Run& run = copy_.runs[i];
            const std::uint64_t begin = i == from.run ? from.offset : 0;
            const std::uint64_t end = i == to.run ? to.offset : run.bytes;
            move_(copy_.dst.address(pair, run.dst + begin), copy_.src.address(pair, run.src + begin), end - begin);
            done += end - begin;
        }
        return done;
    }

    const Copy& copy_;
    std::int64_t deadline_ns_;
    Mover move_;
    std::size_t group_;  // tensors in one chunk, where tensors are small
    std::vector<Mark> marks_;
    std::size_t chunks_ = 0;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::uint64_t> done_{0};
};

inline std::uint64_t copy_in_order(const Copy& copy, std::int64_t deadline_ns) {
    const std::uint64_t done = OrderedCopy(copy, deadline_ns).run();
    store_fence();
    return done;
}

inline std::uint64_t copy_in_chunks(const Copy& copy, std::uint64_t per_pair, CopyPool* pool,
                                    std::int64_t deadline_ns) {
    const auto threads = static_cast<std::uint64_t>(pool == nullptr ? 1 : pool->threads());
    const std::uint64_t share = per_pair * copy.pairs / (threads * 8);  // some for each, so that all end together
    ChunkedCopy task(copy, per_pair, std::clamp(share, min_chunk_bytes, max_chunk_bytes), deadline_ns);
    if (pool == nullptr)
        task.run();
    else
        pool->share(task);
    return task.done();
}

// Moves a checked plan; returns the bytes done, fewer than all only when the deadline passed between two chunks.
inline std::uint64_t execute(const Copy& copy, std::uint64_t per_pair, CopyPool* pool, std::int64_t deadline_ns) {
    const std::uint64_t total = per_pair * copy.pairs;
    if (total == 0) return 0;
    if (copy.ordered || total <= share_above_bytes || runs_overlap_themselves(copy))
        return copy_in_order(copy, deadline_ns);
    return copy_in_chunks(copy, per_pair, pool, deadline_ns);
}

}  // namespace datadist
