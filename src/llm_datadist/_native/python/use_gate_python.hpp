// Python bindings of gates and their uses, meters and timers.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <utility>
#include <vector>

#include "guards/use_gate.hpp"
#include "python/errand.hpp"

namespace datadist {

namespace nb = nanobind;

// Use of what a gate guards, in a `with` block. It ends with the block, at the latest when it is freed: from Python 3.14
// on a signal handler may raise between the beginning and the block. `owner` has two methods:
// refuse(used, what) raises if the gate is shut, last_left(used) is called by the last user of a shut gate.
class Use {
public:
    Use(nb::object gate, nb::object used, nb::object owner, nb::object what)
        : gate_(std::move(gate)), used_(std::move(used)), owner_(std::move(owner)), what_(std::move(what)) {}

    ~Use() {
        const nb::error_scope kept;
        try {
            leave();
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("the end of a use");
        }
    }

    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    nb::object enter() {
        auto& gate = *nb::cast<UseGate*>(gate_);
        while (!gate.try_enter()) owner_.attr("refuse")(used_, what_);  // returns if the gate is open again
        inside_ = true;
        return used_;
    }

    void leave() {
        auto& gate = *nb::cast<UseGate*>(gate_);
        if (!std::exchange(inside_, false) || gate.try_leave() || gate.leave() != 0) return;
        const nb::object last_left = owner_.attr("last_left");
        if (!nb::steal(elsewhere(last_left.ptr(), {{used_.ptr()}}, true)).is_valid()) throw nb::python_error();
    }

    // Never leaves: what is used stays as it is.
    void stay() { inside_ = false; }

private:
    nb::object gate_, used_, owner_, what_;
    bool inside_ = false;
};

// Meter with durations by transport and failures by exception.
class OperationMeter : public Meter {
public:
    void record(nb::handle transport, std::int64_t moved, std::int64_t nanoseconds, double duration, nb::handle kind) {
        add(moved, duration, !kind.is_none());
        of(transport).add(moved, nanoseconds, duration);
        if (!kind.is_none()) {
            const nb::object name = kind.attr("__name__");
            failures[name] = failures.contains(name) ? nb::object(failures[name] + nb::int_(1)) : nb::int_(1);
        }
    }

    // List of (transport, bytes, seconds, buckets).
    nb::list transports() const {
        nb::list all;
        for (const auto& [transport, durations] : durations_) {
            nb::list buckets;
            for (const std::int64_t count : durations.buckets) buckets.append(count);
            all.append(nb::make_tuple(transport, durations.nbytes, durations.seconds, nb::tuple(buckets)));
        }
        return all;
    }

    nb::dict failures;

private:
    // Names are literals, so usually the same object.
    Durations& of(nb::handle transport) {
        for (auto& [name, durations] : durations_) {
            if (name.is(transport)) return durations;
        }
        for (auto& [name, durations] : durations_) {
            if (name.equal(transport)) return durations;
        }
        return durations_.emplace_back(nb::borrow(transport), Durations{}).second;
    }

    std::vector<std::pair<nb::object, Durations>> durations_;
};

// Measures one operation, from __enter__ to __exit__. One thread.
class Timer {
public:
    explicit Timer(nb::object meter) : meter_(std::move(meter)), counts_(nb::cast<OperationMeter*>(meter_)) {}

    void start() noexcept { start_ = Clock::now(); }

    void stop(nb::handle kind) {
        const auto took = Clock::now() - start_;
        seconds = std::chrono::duration<double>(took).count();
        const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
        counts_->record(transport, nbytes, nanoseconds, seconds, kind);
    }

    std::int64_t nbytes = 0;
    double seconds = 0;
    nb::object transport = nb::str("");

private:
    using Clock = std::chrono::steady_clock;

    nb::object meter_;  // owns the next line's
    OperationMeter* counts_;
    Clock::time_point start_{};
};

inline void bind_counts(nb::module_& m) {
    using namespace nb::literals;

    nb::class_<UseGate>(m, "UseGate", nb::is_final())
        .def(nb::init<bool>(), "is_open"_a = true)
        .def("try_enter", &UseGate::try_enter)
        .def("try_leave", &UseGate::try_leave)
        .def("enter", &UseGate::enter)
        .def("leave", &UseGate::leave)
        .def("open", &UseGate::open)
        .def("shut", &UseGate::shut)
        .def_prop_ro("is_open", &UseGate::is_open)
        .def_prop_ro("inside", &UseGate::inside);

    nb::class_<Use>(m, "Use", nb::is_final())
        .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), "gate"_a, "used"_a, "owner"_a, "what"_a.none())
        .def("__enter__", &Use::enter)
        .def("__exit__", [](Use& use, nb::args raised) { still_runs(raised) ? use.stay() : use.leave(); });

    nb::class_<Meter>(m, "Meter", nb::is_final())
        .def(nb::init<>())
        .def("add", &Meter::add, "nbytes"_a, "seconds"_a = 0.0, "failed"_a = false)
        .def_prop_ro("count", &Meter::count)
        .def_prop_ro("errors", &Meter::errors)
        .def_prop_ro("nbytes", &Meter::nbytes)
        .def_prop_ro("seconds", &Meter::seconds);

    nb::class_<OperationMeter>(m, "OperationMeter", nb::is_final())
        .def(nb::init<>())
        .def_prop_ro("count", &OperationMeter::count)
        .def_prop_ro("errors", &OperationMeter::errors)
        .def_prop_ro("nbytes", &OperationMeter::nbytes)
        .def_prop_ro("seconds", &OperationMeter::seconds)
        .def_prop_ro("failures", [](const OperationMeter& meter) { return meter.failures.attr("copy")(); })
        .def_prop_ro("transports", &OperationMeter::transports);

    m.attr("FIRST_DURATION_BIT") = Durations::first_bit;
    m.attr("LAST_DURATION_BIT") = Durations::last_bit;

    nb::class_<Timer>(m, "Timer", nb::is_final())
        .def(nb::init<nb::object>(), "meter"_a)
        .def_rw("nbytes", &Timer::nbytes)
        .def_rw("transport", &Timer::transport)
        .def_ro("seconds", &Timer::seconds)
        .def("__enter__",
             [](nb::handle self) {
                 nb::inst_ptr<Timer>(self)->start();
                 return nb::borrow(self);
             })
        .def(
            "__exit__", [](Timer& timer, nb::handle kind, nb::handle, nb::handle) { timer.stop(kind); },
            "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

}  // namespace datadist
