// Comparable rest of an ordered plan: later runs may overwrite bytes that earlier ones wrote or read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include "copy/plan.hpp"

namespace datadist {

// Set of bytes, as ranges that do not touch.
class ByteSet {
public:
    // Calls tell(begin, end) for each range of [begin, end) outside the set.
    template <typename Tell>
    void gaps(std::uint64_t begin, std::uint64_t end, Tell tell) const {
        for (auto at = first_behind(begin); begin < end && at != ranges_.end() && at->first < end; ++at) {
            if (at->first > begin) tell(begin, at->first);
            begin = std::max(begin, at->second);
        }
        if (begin < end) tell(begin, end);
    }

    void add(std::uint64_t begin, std::uint64_t end) {
        if (begin >= end) return;
        auto at = first_behind(begin);
        while (at != ranges_.end() && at->first <= end) {
            begin = std::min(begin, at->first);
            end = std::max(end, at->second);
            at = ranges_.erase(at);
        }
        ranges_.emplace(begin, end);
    }

private:
    using Ranges = std::map<std::uint64_t, std::uint64_t>;  // begin -> end

    // First range that ends at `begin` or later.
    Ranges::const_iterator first_behind(std::uint64_t begin) const {
        auto at = ranges_.upper_bound(begin);
        if (at != ranges_.begin() && std::prev(at)->second >= begin) --at;
        return at;
    }

    Ranges ranges_;
};

// Returns the parts of ordered runs whose destination is unchanged since. With `alias` (same tensors on both sides)
// their source must be, too. All runs must lie in their tensors.
inline std::vector<Run> surviving_runs(const Run* runs, std::size_t count, bool alias) {
    std::vector<Run> out;
    ByteSet written;  // by later runs
    for (std::size_t i = count; i-- > 0;) {
        const Run& run = runs[i];
        written.gaps(run.dst, run.dst + run.bytes, [&](std::uint64_t begin, std::uint64_t end) {
            const std::uint64_t shift = run.src - run.dst;  // modulo 2**64
            if (!alias) {
                out.push_back({begin, begin + shift, end - begin});
                return;
            }
            written.gaps(begin + shift, end + shift,
                         [&](std::uint64_t from, std::uint64_t to) { out.push_back({from - shift, from, to - from}); });
        });
        written.add(run.dst, run.dst + run.bytes);
    }
    std::reverse(out.begin(), out.end());
    return out;
}

}  // namespace datadist
