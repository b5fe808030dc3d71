// Movers of plans with a side on a device: the kernel, plain copies, and windows of host memory.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "copy/copy.hpp"
#include "copy/device.hpp"
#include "copy/spans.hpp"
#include "copy/stream_event.hpp"

namespace datadist {

// Appends a run in pieces.
inline void cut_run(const Run& run, std::vector<Run>& pieces) {
    for (std::uint64_t at = 0; at < run.bytes; at += piece_bytes)
        pieces.push_back({run.dst + at, run.src + at, std::min(piece_bytes, run.bytes - at)});
}

// Bytes of one side on a device, in the plan's order, through the windows of a channel.
//
// Reading: while one window is used, the device fills the other. Writing: while one is filled, it empties the other.
// Its end does not wait; see Device::await().
class DeviceBytes {
public:
    struct Part {
        char* begin = nullptr;
        std::uint64_t bytes = 0;
    };

    // `in_order`: writes take effect one after the other.
    DeviceBytes(Device& device, const Spans& spans, bool writes, bool in_order, std::int64_t tag = 0)
        : device_(device),
          spans_(spans),
          writes_(writes),
          in_order_(in_order),
          left_(spans.total()),
          lease_(device, tag),
          by_kernel_(takes_kernel()),
          parts_(std::min<std::uint64_t>(by_kernel_ ? most_parts : most_copies, spans.pieces())) {
        for (const std::size_t which : {0, 1}) take(which);
    }

    ~DeviceBytes() { count_wait(); }

    DeviceBytes(const DeviceBytes&) = delete;
    DeviceBytes& operator=(const DeviceBytes&) = delete;

    // True if front() is there.
    bool ready() { return counted(lease_->ended(lease_->windows[now_])); }

    // Reading: bytes that are here; writing: room for the next ones. Empty at the end.
    Part front() const {
        const State& state = states_[now_];
        return {lease_->windows[now_].memory + state.used, state.bytes - state.used};
    }

    Part await_front(const Stop& stop) {
        lease_->wait(lease_->windows[now_], stop);
        return front();
    }

    // Goes on by so many bytes of the front.
    void advance(std::uint64_t bytes) {
        State& state = states_[now_];
        state.used += bytes;
        if (state.used < state.bytes) return;
        device_.window_total.fetch_add(state.bytes, std::memory_order_relaxed);
        if (writes_) start(now_);
        take(now_);
        now_ ^= 1;
    }

    // True if no copy runs; then all that was written is there.
    bool settled() { return counted(lease_->settled()); }

    void settle(const Stop& stop) { lease_->settle(stop); }

private:
    static constexpr std::uint64_t most_parts = window_bytes / 128;

    struct State {
        std::uint64_t used = 0;
        std::uint64_t bytes = 0;
        Spans::Cursor at = {};  // of its first byte
    };

    // Whether copies have ended, which begins or ends a wait; throws if that lasts too long.
    bool counted(bool ended) {
        if (ended) {
            count_wait();
            return true;
        }
        const std::int64_t now = monotonic_ns();
        if (since_ns_ == 0) since_ns_ = now;
        if (now - since_ns_ > longest_wait_ns) device_.give_up("it does not answer: a copy for a peer does not end");
        return false;
    }

    void count_wait() {
        if (since_ns_ != 0) device_.waited_ns.fetch_add(monotonic_ns() - since_ns_, std::memory_order_relaxed);
        since_ns_ = 0;
    }

    // Gives a window the next bytes; reading, the device starts to fill it.
    void take(std::size_t which) {
        State& state = states_[which];
        state = {0, 0, at_};
        for (std::size_t i = 0, count = describe(at_, std::min(window_bytes, left_)); i < count; ++i)
            state.bytes += parts_[i].iov_len;
        left_ -= state.bytes;
        at_ = spans_.advanced(at_, state.bytes);
        if (!writes_) start(which);
    }

    std::size_t describe(const Spans::Cursor& at, std::uint64_t bytes) {
        return bytes == 0 ? 0 : spans_.fill(at, parts_.data(), parts_.size(), bytes);
    }

    // Starts the copy between a window and its bytes.
    void start(std::size_t which) {
        const State& state = states_[which];
        const std::size_t count = describe(state.at, state.bytes);
        if (count == 0) return;
        Device::Channel::Window& window = lease_->windows[which];
        const Device::Scope scope(device_);
        auto here = reinterpret_cast<std::uint64_t>(window.memory);
        std::vector<Run> runs;
        for (std::size_t i = 0; i < count; here += parts_[i++].iov_len) {
            const auto there = reinterpret_cast<std::uint64_t>(parts_[i].iov_base);
            const Run run{writes_ ? there : here, writes_ ? here : there, parts_[i].iov_len};
            by_kernel_ ? cut_run(run, runs) : lease_->copy(run.dst, run.src, run.bytes);
        }
        const std::uint64_t from_zero = 0;
        if (by_kernel_) lease_->launch(window, &from_zero, &from_zero, 1, runs.data(), runs.size());
        lease_->mark(window);
    }

    bool takes_kernel() const {
        if (in_order_ || !lease_->pinned() || !device_.has_kernel()) return false;
        const DeviceMover mover = spans_.place().mover;
        if (mover != DeviceMover::automatic) return mover == DeviceMover::kernel;
        return spans_.pieces() >= kernel_from_runs && spans_.mean_bytes() < host_copies_from_bytes;
    }

    Device& device_;
    const Spans& spans_;
    const bool writes_;
    const bool in_order_;
    std::uint64_t left_;  // in no window yet
    Device::Lease lease_;
    const bool by_kernel_;
    std::vector<iovec> parts_;
    Spans::Cursor at_;
    std::size_t now_ = 0;
    State states_[2];
    std::int64_t since_ns_ = 0;  // since when it waits for copies; 0: it does not
};

// One call's copy.
class DeviceCopy {
public:
    DeviceCopy(Device& device, const Copy& copy, std::uint64_t per_pair, const Stop& stop)
        : device_(device), copy_(copy), per_pair_(per_pair), stop_(stop) {}

    std::uint64_t run() {
        const bool to_device = copy_.dst.place.on_device(), from_device = copy_.src.place.on_device();
        const bool both = to_device && from_device;
        const Place& host = to_device ? copy_.src.place : copy_.dst.place;
        if (!both && !host.pinned) return through_windows(to_device);
        const Device::Lease lease(device_);
        return settling(*lease, [&] {
            const bool in_turn = copy_.ordered || (both && runs_overlap_themselves(copy_));
            return !in_turn && takes_kernel(both) ? by_launches(*lease)
                                                  : by_copies(*lease, both ? device_chunk_bytes : host_chunk_bytes);
        });
    }

private:
    bool takes_kernel(bool both) const {
        if (!device_.has_kernel() || (!both && !device_.reaches_pinned())) return false;
        const DeviceMover mover = (copy_.dst.place.on_device() ? copy_.dst : copy_.src).place.mover;
        if (mover != DeviceMover::automatic) return mover == DeviceMover::kernel;
        const std::uint64_t mean = per_pair_ / copy_.run_count;
        return both ? mean < copies_from_bytes
                    : mean < host_copies_from_bytes && copy_.run_count * copy_.pairs >= kernel_from_runs;
    }

    static std::uint64_t base(const CopySide& side, std::size_t pair) {
        return reinterpret_cast<std::uint64_t>(side.address(pair, 0));
    }

    // Two launches run at a time, each from a plan of its own; each moves about a chunk, or all pairs with a full plan.
    std::uint64_t by_launches(Device::Channel& channel) {
        const std::vector<Run> pieces = cut();
        std::vector<std::uint64_t> dst(copy_.pairs), src(copy_.pairs);
        for (std::size_t pair = 0; pair < copy_.pairs; ++pair) {
            dst[pair] = base(copy_.dst, pair);
            src[pair] = base(copy_.src, pair);
        }
        const std::size_t group =
            std::clamp<std::size_t>(device_chunk_bytes / std::max<std::uint64_t>(1, per_pair_), 1, plan_bytes / 32);
        std::uint64_t started = 0;
        std::size_t turn = 0;
        for (std::size_t first = 0; first < copy_.pairs; first += group) {
            const std::size_t pairs = std::min(group, copy_.pairs - first);
            for (std::size_t begin = 0, count; begin < pieces.size(); begin += count) {
                Device::Channel::Window& window = channel.windows[turn ^= 1];
                channel.wait(window, stop_);
                if (stop_.now()) return settled(channel, started);
                count = 0;
                std::uint64_t bytes = 0;
                const std::size_t most = std::min(Device::Channel::most_runs(pairs), pieces.size() - begin);
                for (; count < most && bytes < device_chunk_bytes / pairs; ++count)
                    bytes += pieces[begin + count].bytes;
                const Device::Scope scope(device_);
                channel.launch(window, &dst[first], &src[first], pairs, &pieces[begin], count);
                channel.mark(window);
                started += bytes * pairs;
            }
        }
        return settled(channel, started);
    }

    std::vector<Run> cut() const {
        std::vector<Run> pieces;
        pieces.reserve(copy_.run_count);
        for (std::size_t i = 0; i < copy_.run_count; ++i) cut_run(copy_.runs[i], pieces);
        return pieces;
    }

    // Runs one after the other; one that overlaps itself in pieces through a window, in the direction of memmove.
    std::uint64_t by_copies(Device::Channel& channel, std::uint64_t chunk_bytes) {
        const auto through = reinterpret_cast<std::uint64_t>(channel.windows[0].memory);
        std::uint64_t started = 0, since = 0, copies = 0;
        for (std::size_t pair = 0; pair < copy_.pairs; ++pair)
            for (std::size_t i = 0; i < copy_.run_count; ++i) {
                const Run& run = copy_.runs[i];
                const std::uint64_t dst = base(copy_.dst, pair) + run.dst, src = base(copy_.src, pair) + run.src;
                if (dst == src) {
                    started += run.bytes;
                    continue;
                }
                const bool overlaps = ranges_meet(dst, run.bytes, src, run.bytes);
                const std::uint64_t most = overlaps ? window_bytes : chunk_bytes;
                for (std::uint64_t moved = 0, step; moved < run.bytes; moved += step) {
                    if (since >= chunk_bytes || ++copies % most_copies == 0) {
                        channel.settle(stop_);
                        if (stop_.now()) return started;
                        since = 0;
                    }
                    step = std::min(run.bytes - moved, most);
                    const std::uint64_t at = overlaps && dst > src ? run.bytes - moved - step : moved;
                    const Device::Scope scope(device_);
                    if (overlaps) channel.copy(through, src + at, step);
                    channel.copy(dst + at, overlaps ? through : src + at, step);
                    started += step;
                    since += step;
                }
            }
        return settled(channel, started);
    }

    std::uint64_t through_windows(bool to_device) {
        const auto pairs = static_cast<std::int64_t>(copy_.pairs);
        const auto nbytes = static_cast<std::int64_t>(per_pair_ * copy_.pairs);
        const Spans dst(copy_.dst, pairs, copy_.runs, copy_.run_count, &Run::dst, nbytes);
        const Spans src(copy_.src, pairs, copy_.runs, copy_.run_count, &Run::src, nbytes);
        const Spans& host = to_device ? src : dst;
        DeviceBytes bytes(device_, to_device ? dst : src, to_device, copy_.ordered);
        return settling(bytes, [&] { return through(bytes, host, to_device); });
    }

    std::uint64_t through(DeviceBytes& bytes, const Spans& host, bool to_device) {
        Spans::Cursor at;
        std::uint64_t done = 0;
        iovec parts[64];
        while (!stop_.now()) {
            const DeviceBytes::Part front = bytes.await_front(stop_);
            if (front.bytes == 0) break;
            const std::size_t count = host.fill(at, parts, 64, front.bytes);
            std::uint64_t moved = 0;
            for (std::size_t i = 0; i < count; moved += parts[i++].iov_len) {
                char* other = static_cast<char*>(parts[i].iov_base);
                std::memcpy(to_device ? front.begin + moved : other, to_device ? other : front.begin + moved,
                            parts[i].iov_len);
            }
            at = host.advanced(at, moved);
            bytes.advance(moved);
            done += moved;
        }
        bytes.settle(stop_);
        return done;
    }

    // Does work; after an error waits for what of it runs, which may throw that it does not end.
    template <typename Used, typename Work>
    std::uint64_t settling(Used& used, Work&& work) {
        try {
            return work();
        } catch (const DeviceError&) {
            used.settle(stop_);
            throw;
        }
    }

    std::uint64_t settled(Device::Channel& channel, std::uint64_t started) {
        channel.settle(stop_);
        return started;
    }

    Device& device_;
    const Copy& copy_;
    const std::uint64_t per_pair_;
    const Stop& stop_;
};

// Moves a checked plan of which a side lies on a device, as execute() in copy.hpp.
inline std::uint64_t execute_on_device(const Copy& copy, std::uint64_t per_pair, const Stop& stop) {
    const Place &dst = copy.dst.place, &src = copy.src.place;
    if (dst.on_device() && src.on_device() && dst.device != src.device)
        refuse("dst is on device ", dst.device, " and src on ", src.device, ": one copy has one device");
    Device& device = Device::open(dst.on_device() ? dst.device : src.device);
    if (per_pair * copy.pairs == 0) return 0;
    return DeviceCopy(device, copy, per_pair, stop).run();
}

}  // namespace datadist
