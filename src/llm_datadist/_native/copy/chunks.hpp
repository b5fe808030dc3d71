// Execution of a large plan in similar chunks, by several threads; a carrier moves the bytes.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/pool.hpp"
#include "copy/sides.hpp"
#include "guards/generation.hpp"

namespace datadist {

// Measured.
constexpr std::uint64_t max_chunk_bytes = 4u << 20;    // between two checks of Stop
constexpr std::uint64_t min_chunk_bytes = 256u << 10;  // least work of a thread at a time
constexpr std::uint64_t share_above_bytes = 1u << 20;  // up to this, waking a thread costs more than it saves

inline bool passed(std::int64_t deadline_ns) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec >= deadline_ns;
}

// Reason to stop besides the deadline, asked by each participating thread between two chunks.
class Interrupt {
public:
    virtual bool now() noexcept = 0;

protected:
    ~Interrupt() = default;
};

// Reasons to end work early.
struct Stop {
    std::int64_t deadline_ns;
    const std::uint8_t* cancelled = nullptr;  // set by another thread of this process, or null
    Interrupt* interrupt = nullptr;

    bool now() const {
        return (cancelled != nullptr && __atomic_load_n(cancelled, __ATOMIC_RELAXED) != 0) || passed(deadline_ns) ||
               (interrupt != nullptr && interrupt->now());
    }
};

// carriers.carrier() returns a carrier for one thread:
//
//     bool add(char* dst, char* src, std::uint64_t bytes) noexcept;   moves a piece, now or by the next flush
//     bool flush() noexcept;                                          moves the added pieces
//     std::uint64_t done() const noexcept;                            bytes moved so far
//
// False stops all threads. A single thread adds pieces in the plan's order. The plan must not be empty.
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
    struct Mark {
        std::size_t run;
        std::uint64_t offset;
    };

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
    std::size_t group_;  // tensors in one chunk
    std::vector<Mark> marks_;
    std::size_t chunks_ = 0;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::uint64_t> done_{0};
};

// Eight chunks for each thread, within bounds, so that threads end together.
inline std::uint64_t chunk_bytes_for(std::uint64_t total, const CopyPool* pool) {
    if (pool == nullptr) return max_chunk_bytes;
    const auto threads = static_cast<std::uint64_t>(pool->threads());
    return std::clamp(total / (threads * 8), min_chunk_bytes, max_chunk_bytes);
}

// Returns the bytes done: fewer than all if it stopped between two chunks or a carrier failed. Without a pool the
// caller works alone, in the plan's order.
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
