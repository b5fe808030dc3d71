// Work of an engine's stream, which copies let end before they begin.
//
// Looked at by the host before a launch, not awaited by our streams: a call whose time ends first has begun nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "copy/chunks.hpp"
#include "copy/device.hpp"

namespace datadist {

class StreamEvent {
public:
    // Of all that the stream has been given so far, and of `before`, unless null. Throws DeviceError.
    StreamEvent(int ordinal, std::uint64_t stream, std::shared_ptr<const StreamEvent> before)
        : device_(Device::open(ordinal)), before_(std::move(before)) {
        const Device::Scope scope(device_);
        CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
        device_.check(device_.cuda().cuStreamIsCapturing(reinterpret_cast<CUstream>(stream), &capturing),
                      "cuStreamIsCapturing");
        if (capturing != CU_STREAM_CAPTURE_STATUS_NONE)
            throw DeviceError(capturing, text(device_.name(), ": the stream's work is being captured into a graph"));
        device_.check(device_.cuda().cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        if (const CUresult code = device_.cuda().cuEventRecord(event_, reinterpret_cast<CUstream>(stream))) {
            device_.cuda().cuEventDestroy_v2(event_);
            device_.check(code, "cuEventRecord");
        }
        ++alive();
    }

    ~StreamEvent() {
        --alive();
        try {
            const Device::Scope scope(device_);
            device_.cuda().cuEventDestroy_v2(event_);
        } catch (const DeviceError&) {  // the driver is gone
        }
    }

    StreamEvent(const StreamEvent&) = delete;
    StreamEvent& operator=(const StreamEvent&) = delete;

    // How many there are in this process.
    static std::atomic<int>& alive() {
        static std::atomic<int> count{0};
        return count;
    }

    // True if that work has ended. Throws DeviceError.
    bool passed() const {
        const Device::Relaxed relaxed(device_);
        const CUresult code = device_.cuda().cuEventQuery(event_);
        if (Device::says_nothing(code)) return false;
        device_.check(code, "cuEventQuery");
        return !before_ || before_->passed();
    }

    // False if `stop` says so first. Throws DeviceError if the device has failed, or, for calls without a deadline, if
    // the work does not end.
    bool await(const Stop& stop) const {
        const std::int64_t until = monotonic_ns() + longest_wait_ns + Device::patience_ns();
        for (int turn = 0; !passed(); pause(turn++)) {
            if (stop.now()) return false;
            device_.require_sound();
            if (monotonic_ns() > until)
                throw DeviceError(CUDA_ERROR_NOT_READY, text(device_.name(), ": the stream's work does not end"));
        }
        return true;
    }

private:
    Device& device_;
    const std::shared_ptr<const StreamEvent> before_;
    CUevent event_ = nullptr;
};

}  // namespace datadist
