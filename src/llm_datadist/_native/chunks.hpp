// The walk through a large plan: in chunks of about equal bytes, by as many threads as come. How the bytes of a piece
// get from one end to the other is the business of a carrier.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ends.hpp"
#include "guard.hpp"
#include "pool.hpp"

namespace datadist {

// Measured choices.
constexpr std::uint64_t max_chunk_bytes = 4u << 20;    // between two looks whether to stop
constexpr std::uint64_t min_chunk_bytes = 256u << 10;  // what one thread takes at a time, at least
constexpr std::uint64_t share_above_bytes = 1u << 20;  // below this waking a thread costs more than it brings

inline bool passed(std::int64_t deadline_ns) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec >= deadline_ns;
}

// What may interrupt work besides its deadline. Asked by every thread that takes part, between two chunks.
class Interrupt {
public:
    virtual bool now() noexcept = 0;

protected:
    ~Interrupt() = default;
};

// When work ends before it is done: at a time, once another thread sets the flag, or by an interrupt.
struct Stop {
    std::int64_t deadline_ns;
    const std::uint8_t* cancelled = nullptr;  // written by another thread of this process; null: no flag
    Interrupt* interrupt = nullptr;

    bool now() const {
        return (cancelled != nullptr && __atomic_load_n(cancelled, __ATOMIC_RELAXED) != 0) || passed(deadline_ns) ||
               (interrupt != nullptr && interrupt->now());
    }
};

// Carriers is a value whose carrier() makes each thread its own carrier:
//
//     bool add(char* dst, char* src, std::uint64_t bytes) noexcept;   moves a piece, at once or by the next flush
//     bool flush() noexcept;           moves what was added; false, as from add: it failed, and all threads stop
//     std::uint64_t done() const noexcept;                            bytes moved so far
//
// Run by one thread alone the pieces are added in the order of the plan. Not for plans that are empty.
template <typename Carriers>
class ChunkedCopy final : public Task {
public:
    ChunkedCopy(const Copy& copy, std::uint64_t per_pair, std::uint64_t chunk_bytes, const Stop& stop,
                const Carriers& carriers)
        : copy_(copy),
          stop_(stop),
          carriers_(carriers),
          group_(static_cast<std::size_t>(std::max<std::uint64_t>(1, chunk_bytes / per_pair))) {
        cut(chunk_bytes);
        chunks_ = (copy.pairs + group_ - 1) / group_ * slices();
    }

    void run() noexcept override {
        auto carrier = carriers_.carrier();
        for (std::size_t chunk = take(); chunk < chunks_; chunk = take())
            if (stop_.now() || !move_chunk(chunk, carrier)) next_.store(chunks_, std::memory_order_relaxed);
        store_fence();
        done_.fetch_add(carrier.done(), std::memory_order_release);
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

    std::size_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    template <typename Carrier>
    bool move_chunk(std::size_t chunk, Carrier& carrier) const {
        const std::size_t slice = chunk % slices();
        const std::size_t begin = chunk / slices() * group_;
        const std::size_t end = std::min(begin + group_, copy_.pairs);
        for (std::size_t pair = begin; pair < end; ++pair)
            if (!move_slice(pair, marks_[slice], marks_[slice + 1], carrier)) return false;
        return carrier.flush();
    }

    template <typename Carrier>
    bool move_slice(std::size_t pair, const Mark& from, const Mark& to, Carrier& carrier) const {
        for (std::size_t i = from.run; i <= to.run && i < copy_.run_count; ++i) {
            const Run& run = copy_.runs[i];
            const std::uint64_t begin = i == from.run ? from.offset : 0;
            const std::uint64_t end = i == to.run ? to.offset : run.bytes;
            if (!carrier.add(copy_.dst.address(pair, run.dst + begin), copy_.src.address(pair, run.src + begin),
                             end - begin))
                return false;
        }
        return true;
    }

    const Copy& copy_;
    const Stop& stop_;
    Carriers carriers_;
    std::size_t group_;  // tensors in one chunk, where tensors are small
    std::vector<Mark> marks_;
    std::size_t chunks_ = 0;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::uint64_t> done_{0};
};

// Some chunks for each thread, so that all end together; alone, only the clock counts.
inline std::uint64_t chunk_bytes_for(std::uint64_t total, const CopyPool* pool) {
    if (pool == nullptr) return max_chunk_bytes;
    const auto threads = static_cast<std::uint64_t>(pool->threads());
    return std::clamp(total / (threads * 8), min_chunk_bytes, max_chunk_bytes);
}

// Returns the bytes done: all, unless it had to stop between two chunks or a carrier failed. Without a pool the
// caller's thread does everything, in the order of the plan.
template <typename Carriers>
std::uint64_t copy_in_chunks(const Copy& copy, std::uint64_t per_pair, CopyPool* pool, const Stop& stop,
                             const Carriers& carriers) {
    const std::uint64_t chunk_bytes = chunk_bytes_for(per_pair * copy.pairs, pool);
    ChunkedCopy<Carriers> task(copy, per_pair, chunk_bytes, stop, carriers);
    if (pool == nullptr)
        task.run();
    else
        pool->share(task);
    return task.done();
}

}  // namespace datadist
