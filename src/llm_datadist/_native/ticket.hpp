// Report of a job's end by the thread that moves its bytes.
#pragma once

#include <time.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace datadist {

inline std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

enum class Ending : int { good = 0, refused = 1, lost = 2, timeout = 3, trailer = 4, device = 5 };

// `bytes` moved at this side. `code`: the peer's, `lost` if giving up cost the lane, else 0. `text`: the reason.
struct Outcome {
    Ending ending = Ending::lost;
    std::uint32_t code = 0;
    std::uint64_t bytes = 0;
    std::string text;
};

// End of one job; afterwards no engine thread touches its memory.
class Ticket {
public:
    // The first end counts.
    void finish(Outcome outcome) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!outcome_) outcome_ = std::move(outcome);
        }
        finished_.notify_all();
    }

    // Nothing if there is none by then (CLOCK_MONOTONIC).
    std::optional<Outcome> wait_until(std::int64_t deadline_ns) {
        const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(deadline_ns)};
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait_until(lock, until, [&] { return outcome_.has_value(); });
        return outcome_;
    }

    // As wait_until(0), without the two system calls that this costs.
    std::optional<Outcome> now() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return outcome_;
    }

private:
    std::mutex mutex_;
    std::condition_variable finished_;
    std::optional<Outcome> outcome_;
};

}  // namespace datadist
