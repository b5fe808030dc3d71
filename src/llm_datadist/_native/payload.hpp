// Bytes of one job at this side: addresses, and a cursor.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "generation.hpp"
#include "sides.hpp"
#include "streaming_stores.hpp"

namespace datadist {

constexpr std::size_t max_iovecs = 1024;

// Owned side of a plan: `bases` times `spans`, in the plan's order, without empty spans.
class Spans {
public:
    struct ByteRange {
        std::uint64_t offset;
        std::uint64_t bytes;
    };

    Spans() = default;

    // `offset`: this side's column of the runs. Throws RuleError unless all bytes lie in their tensors.
    Spans(const CopySide& side, std::int64_t pairs, const Run* runs, std::size_t run_count, std::uint64_t Run::* offset,
          std::int64_t nbytes) {
        check_tensors(side, pairs);
        const std::uint64_t per_pair = take_runs(side, runs, run_count, offset);
        const auto count = static_cast<std::uint64_t>(pairs);
        if (nbytes < 0 || __builtin_mul_overflow(per_pair, count, &total_) ||
            total_ != static_cast<std::uint64_t>(nbytes))
            refuse("plan.nbytes is ", nbytes, ": the plan is ", pairs, " tensors of ", per_pair, " bytes");
        bases_.assign(side.bases + side.first, side.bases + side.first + pairs);
    }

    std::uint64_t total() const { return total_; }

    // Requires a span and a base.
    std::uint64_t mean_bytes() const { return total_ / (spans_.size() * bases_.size()); }

    // Position of the next byte; at the end pair == number of bases.
    struct Cursor {
        std::size_t pair = 0;
        std::size_t span = 0;
        std::uint64_t offset = 0;
    };

    // Describes at most `bytes` bytes from the cursor on; returns the iovecs used, which may cover less.
    std::size_t fill(Cursor at, iovec* out, std::size_t room, std::uint64_t bytes) const {
        std::size_t used = 0;
        while (bytes > 0 && !ended(at)) {
            const std::uint64_t step = std::min(spans_[at.span].bytes - at.offset, bytes);
            char* address = reinterpret_cast<char*>(bases_[at.pair] + spans_[at.span].offset + at.offset);
            if (used > 0 && address == static_cast<char*>(out[used - 1].iov_base) + out[used - 1].iov_len)
                out[used - 1].iov_len += step;
            else if (used < room)
                out[used++] = {address, step};
            else
                break;
            bytes -= step;
            at = moved(at, step);
        }
        return used;
    }

    Cursor advanced(Cursor at, std::uint64_t bytes) const {
        while (bytes > 0 && !ended(at)) {
            const std::uint64_t step = std::min(spans_[at.span].bytes - at.offset, bytes);
            at = moved(at, step);
            bytes -= step;
        }
        return at;
    }

private:
    std::uint64_t take_runs(const CopySide& side, const Run* runs, std::size_t count, std::uint64_t Run::* offset) {
        const auto extent = static_cast<std::uint64_t>(side.extent);
        std::uint64_t total = 0;
        spans_.reserve(count);
        for (std::size_t i = 0; i < count; ++i) {
            const Run& run = runs[i];
            if (run_ends_outside(run.*offset, run.bytes, extent))
                refuse("plan.runs[", i, "] is ", run.bytes, " bytes at ", side.name, " offset ", run.*offset,
                       ": ends outside the tensor of ", side.extent, " bytes");
            if (__builtin_add_overflow(total, run.bytes, &total)) refuse("plan.runs hold more than 2**64 - 1 bytes");
            if (run.bytes > 0) spans_.push_back({run.*offset, run.bytes});
        }
        return total;
    }

    bool ended(const Cursor& at) const { return spans_.empty() || at.pair >= bases_.size(); }

    Cursor moved(Cursor at, std::uint64_t step) const {
        at.offset += step;
        if (at.offset < spans_[at.span].bytes) return at;
        if (at.span + 1 < spans_.size()) return {at.pair, at.span + 1, 0};
        return {at.pair + 1, 0, 0};
    }

    std::vector<std::uint64_t> bases_;
    std::vector<ByteRange> spans_;
    std::uint64_t total_ = 0;
};

// Measured: copying such small blocks out of a cached buffer is faster than the kernel's scattering.
constexpr std::uint64_t staged_mean_bytes = 16u << 10;
constexpr std::uint64_t staged_above_bytes = 64u << 10;

// Memory in place of a payload's: discarded or staged bytes go there, zeros come from there.
struct Scrap {
    char* begin;
    std::size_t bytes;
};

// Once detached, moves its remaining bytes without the job's memory.
class Payload {
public:
    // `mapped`: nobody can unmap the memory, so this code may write it. Otherwise the kernel does, and reports EFAULT.
    explicit Payload(Spans spans, bool mapped = false)
        : spans_(std::move(spans)),
          total_(spans_.total()),
          mapped_(mapped),
          staged_(mapped && total_ > staged_above_bytes && spans_.mean_bytes() <= staged_mean_bytes) {}

    static Payload discarding(std::uint64_t bytes) {
        Payload payload{Spans{}};
        payload.total_ = bytes;
        payload.detached_ = true;
        return payload;
    }

    std::uint64_t total() const { return total_; }
    std::uint64_t done() const { return done_; }
    std::uint64_t left() const { return total_ - done_; }
    bool detached() const { return detached_; }

    // True if nobody can unmap what fill() describes.
    bool mapped() const { return mapped_ || detached_; }

    // True if the next bytes should go through a buffer and put().
    bool staged() const { return staged_; }

    void detach() {
        detached_ = true;
        staged_ = false;
        spans_ = Spans{};
    }

    std::size_t fill(iovec* out, std::size_t room, std::uint64_t bytes, const Scrap& scrap) const {
        bytes = std::min(bytes, left());
        if (!detached_) return spans_.fill(cursor_, out, room, bytes);
        std::size_t used = 0;
        for (; bytes > 0 && used < room; ++used) {
            out[used] = {scrap.begin, static_cast<std::size_t>(std::min<std::uint64_t>(bytes, scrap.bytes))};
            bytes -= out[used].iov_len;
        }
        return used;
    }

    void advance(std::uint64_t bytes) {
        done_ += bytes;
        if (!detached_) cursor_ = spans_.advanced(cursor_, bytes);
    }

    void put(const char* from, std::uint64_t bytes) {
        const Mover move = mover_for(total_);
        for (iovec parts[64]; bytes > 0;) {
            const std::size_t used = spans_.fill(cursor_, parts, 64, bytes);
            std::uint64_t moved = 0;
            for (std::size_t i = 0; i < used; moved += parts[i++].iov_len)
                move(static_cast<char*>(parts[i].iov_base), from + moved, parts[i].iov_len);
            advance(moved);
            from += moved;
            bytes -= moved;
        }
        store_fence();
    }

    void gather(std::string& out) {
        out.reserve(out.size() + left() + trailer_room);
        iovec parts[64];
        while (left() > 0) {
            const std::size_t used = fill(parts, 64, left(), Scrap{nullptr, 0});
            for (std::size_t i = 0; i < used; ++i) {
                out.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
                advance(parts[i].iov_len);
            }
        }
    }

private:
    static constexpr std::size_t trailer_room = 8;

    Spans spans_;
    std::uint64_t total_;
    std::uint64_t done_ = 0;
    bool mapped_ = false;
    bool staged_ = false;
    Spans::Cursor cursor_;
    bool detached_ = false;
};

}  // namespace datadist
