// Polling before sleeping: a wake-up often costs more than the wait for an answer.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

namespace datadist {

// A failed poll makes the next waits skip polling: about twice as many each time, up to 1023. So slow answers and a
// busy CPU make polling free. Never polls on one CPU. The caller serializes calls.
class BusyWait {
public:
    // Measured: an idle peer's time to answer.
    static constexpr std::int64_t most_ns = 250'000;

    // If true, tell() follows a poll.
    bool begin() noexcept {
        if (!useful_) return false;
        if (left_out_ == 0) return true;
        --left_out_;
        return false;
    }

    void tell(bool succeeded) noexcept {
        pause_ = succeeded ? pause_ / 2 : std::min(2 * pause_ + 1, longest_pause);
        left_out_ = pause_;
    }

private:
    static constexpr int longest_pause = 1023;

    static bool several_cpus() noexcept {
        cpu_set_t mine;
        return ::sched_getaffinity(0, sizeof mine, &mine) != 0 || CPU_COUNT(&mine) > 1;
    }

    bool useful_ = several_cpus();
    int pause_ = 0;
    int left_out_ = 0;
};

}  // namespace datadist
