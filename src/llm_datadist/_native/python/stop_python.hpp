// Python's reasons to stop a long call: a deadline, a cancellation's byte, exceptions of signal handlers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "copy/chunks.hpp"
#include "error.hpp"
#include "python/errand.hpp"
#include "python/gil.hpp"
#include "ticket.hpp"

namespace datadist {

namespace nb = nanobind;

using Flag = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline Stop stop_of(std::int64_t deadline_ns, const std::optional<Flag>& cancelled) {
    if (!cancelled) return {deadline_ns};
    if (cancelled->size() != 1) refuse("cancelled has ", cancelled->size(), " bytes: must be one");
    return {deadline_ns, cancelled->data()};
}

constexpr std::int64_t look_for_signals_every_ns = 20'000'000;

// Releases the GIL for a long call, which checks signals every 20 ms. Made and ended by the caller, under the GIL.
class Interruptible final : public Interrupt {
public:
    Interruptible() = default;

    ~Interruptible() { take_back(); }

    Interruptible(const Interruptible&) = delete;
    Interruptible& operator=(const Interruptible&) = delete;

    bool now() noexcept override {
        if (!looks_) return false;
        if (!::pthread_equal(::pthread_self(), caller_)) return raised_.load(std::memory_order_relaxed);
        if (!raised_.load(std::memory_order_relaxed) && monotonic_ns() >= next_look_ns_) look();
        return raised_.load(std::memory_order_relaxed);
    }

    // Takes the GIL back; throws a handler's exception. No other thread may be using the call's memory.
    void end() {
        take_back();
        if (raised_.load(std::memory_order_relaxed)) throw nb::python_error();
    }

private:
    void take_back() {
        if (PyThreadState* state = std::exchange(released_, nullptr)) datadist_take_gil_back(state);
    }

    // The exception stays set in this thread's state: no Python runs before end().
    void look() noexcept {
        if (doing == nullptr || doing->cut.load()) {
            const nb::gil_scoped_acquire acquired;
            if (!check_signals()) raised_.store(true, std::memory_order_relaxed);
        }
        next_look_ns_ = monotonic_ns() + look_for_signals_every_ns;
    }

    pthread_t caller_ = ::pthread_self();
    const bool looks_ = doing != nullptr || in_main_thread();
    std::int64_t next_look_ns_ = monotonic_ns() + look_for_signals_every_ns;  // of the caller alone
    std::atomic<bool> raised_{false};
    PyThreadState* released_ = PyEval_SaveThread();
};

}  // namespace datadist
