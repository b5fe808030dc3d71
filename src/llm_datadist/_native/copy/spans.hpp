// Owned side of a plan, and a cursor through its bytes.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/sides.hpp"

namespace datadist {

constexpr std::size_t max_iovecs = 1024;

// `bases` times `spans`, in the plan's order, without empty spans.
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
        place_ = side.place;
    }

    const Place& place() const { return place_; }

    std::uint64_t total() const { return total_; }

    std::uint64_t pieces() const { return spans_.size() * bases_.size(); }

    // Requires a span and a base.
    std::uint64_t mean_bytes() const { return total_ / pieces(); }

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
    Place place_;
};

}  // namespace datadist
