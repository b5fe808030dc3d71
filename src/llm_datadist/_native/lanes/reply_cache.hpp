// Cached replies to one link's lane requests: later requests with the same handle need no interpreter.
//
// Python replies once for a handle, then lane threads do. That ends when a guard changes, the tag is quiesced, or the
// table is full. Requests that do not fit the reply go to Python, which refuses them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "guards/guards.hpp"
#include "lanes/payload.hpp"
#include "lanes/wire.hpp"

namespace datadist {

// Meta of a READ or WRITE: names memory of the owner. Its numbers are unchecked.
//
//   u16 bytes of the handle, u64 first tensor, u64 tensors, u64 bytes of a tensor, u64 bytes in all, handle,
//   then for each span: u64 offset in the tensor, u64 bytes
struct LaneRequest {
    static constexpr std::size_t head_bytes = 34;
    static constexpr std::size_t span_bytes = 16;
    static constexpr std::size_t max_runs = 1u << 15;  // half the room of a meta of 1 MiB
    static constexpr std::size_t max_handle_bytes = 4096;

    // `offset`: the owner's column of the runs.
    static std::string encode(std::string_view handle, std::int64_t first, std::int64_t count, std::uint64_t extent,
                              std::int64_t nbytes, std::pair<const Run*, std::size_t> runs,
                              std::uint64_t Run::* offset) {
        std::string out;
        out.reserve(head_bytes + handle.size() + runs.second * span_bytes);
        append<std::uint16_t>(out, static_cast<std::uint16_t>(handle.size()));
        for (const std::uint64_t number : {static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(count), extent,
                                           static_cast<std::uint64_t>(nbytes)})
            append<std::uint64_t>(out, number);
        out.append(handle);
        for (const Run* run = runs.first; run != runs.first + runs.second; ++run) {
            append<std::uint64_t>(out, run->*offset);
            append<std::uint64_t>(out, run->bytes);
        }
        return out;
    }

    // Only parser of lane requests. Throws RuleError for malformed ones.
    static LaneRequest parse(std::string_view meta) {
        if (meta.size() < head_bytes) refuse("a lane request of ", meta.size(), " bytes has no head");
        const std::size_t handle_bytes = load<std::uint16_t>(meta.data());
        const std::size_t begin = head_bytes + handle_bytes;
        if (handle_bytes > max_handle_bytes || begin > meta.size() || (meta.size() - begin) % span_bytes != 0 ||
            (meta.size() - begin) / span_bytes > max_runs)
            refuse("a lane request of ", meta.size(), " bytes with a handle of ", handle_bytes, " does not add up");
        const auto number = [&](std::size_t at) { return load<std::uint64_t>(&meta[at]); };
        const std::uint64_t first = number(2), count = number(10), extent = number(18), nbytes = number(26);
        if ((first | count | extent | nbytes) > INT64_MAX)
            refuse("a lane request for tensors [", first, ", +", count, ") of ", extent, " bytes, ", nbytes, " in all");
        const auto checked = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
        return LaneRequest{meta.substr(head_bytes, handle_bytes),
                           checked(first),
                           checked(count),
                           checked(extent),
                           checked(nbytes),
                           meta.substr(begin)};
    }

    std::vector<Run> runs() const {
        std::vector<Run> out(spans.size() / span_bytes);
        const char* at = spans.data();
        for (Run& run : out) {
            run.dst = run.src = load<std::uint64_t>(at);
            run.bytes = load<std::uint64_t>(at + 8);
            at += span_bytes;
        }
        return out;
    }

    std::string_view handle;
    std::int64_t first;
    std::int64_t count;
    std::int64_t extent;
    std::int64_t nbytes;
    std::string_view spans;
};

// Ascending blocks, of `stride` bytes, that a grant lends. hold(): the source of every run lies inside.
class LentBlocks {
public:
    LentBlocks(std::vector<std::uint64_t> blocks, std::uint64_t stride) : blocks_(std::move(blocks)), stride_(stride) {}

    bool hold(std::pair<const Run*, std::size_t> runs) const {
        return std::all_of(runs.first, runs.first + runs.second, [this](const Run& run) {
            if (run_ends_outside(run.src, run.bytes, INT64_MAX)) return false;
            const std::uint64_t first = run.src / stride_;
            const std::uint64_t more = (run.src + run.bytes - (run.bytes > 0)) / stride_ - first;
            const auto at = std::lower_bound(blocks_.begin(), blocks_.end(), first);
            return more < static_cast<std::uint64_t>(blocks_.end() - at) && *at == first &&
                   *(at + static_cast<std::ptrdiff_t>(more)) == first + more;
        });
    }

private:
    std::vector<std::uint64_t> blocks_;
    std::uint64_t stride_;
};

struct CachedReply {
    std::vector<std::uint64_t> bases;
    std::int64_t extent;
    Guards guards;
    std::int64_t tag;
    Place place;
    bool granted = false;                  // only blocks of `lent`, which its grant keeps
    std::weak_ptr<const LentBlocks> lent = {};

    // Requested part, or null if there is none.
    std::shared_ptr<Payload> payload(const LaneRequest& request) const {
        if (request.extent != extent) return nullptr;
        const CopySide side{bases.data(), bases.size(), extent, request.first, "granted", place};
        const std::vector<Run> runs = request.runs();
        if (granted) {
            const auto blocks = lent.lock();
            if (!blocks || !blocks->hold({runs.data(), runs.size()})) return nullptr;
        }
        try {
            return std::make_shared<Payload>(
                Spans(side, request.count, runs.data(), runs.size(), &Run::src, request.nbytes), tag);
        } catch (const RuleError&) {
            return nullptr;
        }
    }
};

// By verb and handle. Threads: any.
class ReplyCache {
public:
    // Peers choose handles. A full table is emptied.
    static constexpr std::size_t most = 4096;

    void keep(bool write, std::string handle, CachedReply memory) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (replies_.size() >= most) replies_.clear();
        replies_.insert_or_assign({write, std::move(handle)}, std::make_shared<const CachedReply>(std::move(memory)));
    }

    // Null unless a reply's guards hold.
    std::shared_ptr<const CachedReply> find(bool write, std::string_view handle) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = replies_.find({write, std::string(handle)});
        if (found == replies_.end()) return nullptr;
        if (found->second->guards.current()) return found->second;
        replies_.erase(found);
        return nullptr;
    }

    void drop(std::int64_t tag) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto at = replies_.begin(); at != replies_.end();)
            at = at->second->tag == tag ? replies_.erase(at) : std::next(at);
    }

    std::size_t size() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return replies_.size();
    }

    // Counts the payload of a reply that has ended well.
    void count(bool write, std::uint64_t bytes) { (write ? received_ : sent_) += bytes; }
    std::pair<std::uint64_t, std::uint64_t> moved() const { return {sent_, received_}; }

private:
    std::atomic<std::uint64_t> sent_{0}, received_{0};  // also by lanes that are lost since
    mutable std::mutex mutex_;
    std::map<std::pair<bool, std::string>, std::shared_ptr<const CachedReply>> replies_;
};

}  // namespace datadist
