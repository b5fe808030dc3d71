// Whether a thread polls for a moment before it sleeps: waking it costs more than many an answer takes.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

namespace datadist {

// Polling that did not succeed is paused for a number of waits that doubles each time: answers that take long, or other
// threads that want the CPU, make it cost nothing. Never on one CPU. The caller keeps two threads from one of these.
class BusyWait {
public:
    // Measured: what an idle peer takes to answer.
    static constexpr std::int64_t most_ns = 250'000;

    // True when this wait begins by polling; tell() must follow.
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
