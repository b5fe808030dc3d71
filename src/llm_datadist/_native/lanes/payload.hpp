// Bytes of one job at this side: addresses, and a cursor.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "copy/device_copy.hpp"
#include "copy/spans.hpp"
#include "copy/streaming_stores.hpp"
#include "guards/generation.hpp"

namespace datadist {

// Measured: copying such small blocks out of a cached buffer is faster than the kernel's scattering.
constexpr std::uint64_t staged_mean_bytes = 16u << 10;
constexpr std::uint64_t staged_above_bytes = 64u << 10;

// Memory in place of a payload's: discarded or staged bytes go there, zeros come from there.
struct Scrap {
    char* begin = nullptr;
    std::size_t bytes = 0;
};

// Once detached, moves its remaining bytes without the job's memory; so it does after a failure of the memory's device.
class Payload {
public:
    // If somebody else can unmap the memory, only the kernel reads and writes it, and reports EFAULT.
    // `tag` is of the memory: see Device::await().
    explicit Payload(Spans spans, std::int64_t tag = 0)
        : spans_(std::move(spans)),
          tag_(tag),
          total_(spans_.total()),
          mapped_(spans_.place().mapped || spans_.place().on_device()),
          on_device_(spans_.place().on_device()),
          staged_(on_device_ || (mapped_ && total_ > staged_above_bytes && spans_.mean_bytes() <= staged_mean_bytes)) {}

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
    bool on_device() const { return on_device_; }

    // Why the device has failed; empty if it has not.
    const std::string& failure() const { return failure_; }

    // True if nobody can unmap what fill() describes.
    bool mapped() const { return mapped_ || detached_; }

    // True if the next bytes come into landing() and go on by put().
    bool staged() const { return staged_; }

    // A copy of the device may still run: whoever gives the memory back awaits the tag.
    void detach() {
        device_.reset();
        detached_ = true;
        staged_ = false;
        spans_ = Spans{};
    }

    // True while the device has not moved the bytes that come next, or the last ones.
    bool waits() {
        bool ready = true;
        if (device_) with_device([&] { ready = left() > 0 ? device_->ready() : device_->settled(); });
        return !ready;
    }

    // Bytes to send: of the memory, of a window of its device, if that is ready, or zeros.
    std::size_t fill(iovec* out, std::size_t room, std::uint64_t bytes, const Scrap& scrap) {
        bytes = std::min(bytes, left());
        if (on_device_ && !detached_ && bytes > 0) {
            const DeviceBytes::Part window = front(false);
            if (window.bytes > 0) {
                out[0] = {window.begin, static_cast<std::size_t>(std::min(bytes, window.bytes))};
                return 1;
            }
            if (!detached_) return 0;
        }
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
        if (device_)
            with_device([&] { device_->advance(bytes); });
        else if (!detached_)
            cursor_ = spans_.advanced(cursor_, bytes);
    }

    // Room for staged bytes; none while the device is not ready.
    Scrap landing(const Scrap& scrap) {
        if (!on_device_) return scrap;
        const DeviceBytes::Part window = front(true);
        return {window.begin, static_cast<std::size_t>(window.bytes)};
    }

    // Takes bytes that came into landing().
    void put(const char* from, std::uint64_t bytes) {
        if (on_device_) return advance(bytes);
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

    // Nothing while the device is not ready, or after its failure.
    DeviceBytes::Part front(bool writes) {
        DeviceBytes::Part part;
        with_device([&] {
            if (!device_)
                device_ =
                    std::make_unique<DeviceBytes>(Device::open(spans_.place().device), spans_, writes, writes, tag_);
            if (device_->ready()) part = device_->front();
        });
        return part;
    }

    // A failure detaches.
    template <typename Work>
    void with_device(Work&& work) {
        try {
            work();
        } catch (const DeviceError& error) {
            if (failure_.empty()) failure_ = error.what();
            detach();
        }
    }

    Spans spans_;
    std::int64_t tag_ = 0;
    std::uint64_t total_;
    std::uint64_t done_ = 0;
    bool mapped_ = false;
    bool on_device_ = false;
    bool staged_ = false;
    Spans::Cursor cursor_;
    bool detached_ = false;
    std::unique_ptr<DeviceBytes> device_;  // from the first byte on
    std::string failure_;
};

}  // namespace datadist
