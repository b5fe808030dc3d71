// Work of an engine's stream, which copies let end before they begin.
//
// Looked at by the host before a launch, not awaited by our streams: a call whose time ends first has begun nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "chunks.hpp"
#include "device.hpp"

namespace datadist {

class StreamEvent {
public:
    // Of all that the stream has been given so far, and of `before`, unless null. Throws DeviceError.
    StreamEvent(int ordinal, std::uint64_t stream, std::shared_ptr<const StreamEvent> before)
        : device_(Device::open(ordinal)), before_(std::move(before)) {
        const Device::Scope scope(device_);
        device_.check(device_.cuda().cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        if (const CUresult code = device_.cuda().cuEventRecord(event_, reinterpret_cast<CUstream>(stream))) {
            device_.cuda().cuEventDestroy_v2(event_);
            device_.check(code, "cuEventRecord");
        }
    }

    ~StreamEvent() {
        try {
            const Device::Scope scope(device_);
            device_.cuda().cuEventDestroy_v2(event_);
        } catch (const DeviceError&) {  // the driver is gone
        }
    }

    StreamEvent(const StreamEvent&) = delete;
    StreamEvent& operator=(const StreamEvent&) = delete;

    // True if that work has ended. Throws DeviceError.
    bool passed() const {
        const CUresult code = device_.cuda().cuEventQuery(event_);
        if (code == CUDA_ERROR_NOT_READY) return false;
        device_.check(code, "cuEventQuery");
        return !before_ || before_->passed();
    }

    // False if `stop` says so first.
    bool await(const Stop& stop) const {
        for (int turn = 0; !passed(); ++turn) {
            if (stop.now()) return false;
            if (turn < 64)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        return true;
    }

private:
    Device& device_;
    const std::shared_ptr<const StreamEvent> before_;
    CUevent event_ = nullptr;
};

}  // namespace datadist
