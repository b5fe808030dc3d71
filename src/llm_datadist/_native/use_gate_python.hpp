// The Python face of the counts.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <utility>

#include "use_gate.hpp"

namespace datadist {

namespace nb = nanobind;

// Adds one operation to a meter: from __enter__ to __exit__. Used by one thread.
class Timer {
public:
    explicit Timer(nb::object meter) : meter_(std::move(meter)), counts_(nb::cast<Meter*>(meter_)) {}

    void start() noexcept { start_ = Clock::now(); }

    void stop(bool failed) noexcept {
        seconds = std::chrono::duration<double>(Clock::now() - start_).count();
        counts_->add(nbytes, seconds, failed);
    }

    std::int64_t nbytes = 0;
    double seconds = 0;

private:
    using Clock = std::chrono::steady_clock;

    nb::object meter_;  // keeps the next line's
    Meter* counts_;
    Clock::time_point start_{};
};

inline void bind_counts(nb::module_& m) {
    using namespace nb::literals;

    nb::class_<UseGate>(m, "UseGate", nb::is_final(),
                          "Counts the users inside a gate that can be shut. Any thread; takes no lock, each call is\n"
                          "atomic. A user that is inside when it is shut leaves by leave(), which returns 0 to the last.")
        .def(nb::init<bool>(), "is_open"_a = true)
        .def("try_enter", &UseGate::try_enter, "Count one user more inside; return False, without counting, if it is shut.")
        .def("try_leave", &UseGate::try_leave,
             "Count one user less inside; return False, without counting, if it is shut: use leave().")
        .def("enter", &UseGate::enter, "Count one user more inside, even if it is shut.")
        .def("leave", &UseGate::leave, "Count one user less inside, open or shut; return how many are left.")
        .def("open", &UseGate::open, "Let users in. Idempotent.")
        .def("shut", &UseGate::shut, "Let no user in any more; return how many are inside, -1 if it was shut already.")
        .def_prop_ro("is_open", &UseGate::is_open, "True if users may enter.")
        .def_prop_ro("inside", &UseGate::inside, "Number of users inside.");

    nb::class_<Meter>(m, "Meter", nb::is_final(), "Totals of one kind of operation. Any thread; takes no lock.")
        .def(nb::init<>())
        .def("add", &Meter::add, "nbytes"_a, "seconds"_a = 0.0, "failed"_a = false, "Add one finished operation.")
        .def_prop_ro("count", &Meter::count)
        .def_prop_ro("errors", &Meter::errors)
        .def_prop_ro("nbytes", &Meter::nbytes)
        .def_prop_ro("seconds", &Meter::seconds);

    nb::class_<Timer>(m, "Timer", nb::is_final(),
                      "Adds the block it is around to a meter, with the bytes that `nbytes` was set to.")
        .def(nb::init<nb::object>(), "meter"_a)
        .def_rw("nbytes", &Timer::nbytes)
        .def_ro("seconds", &Timer::seconds, "How long the block took, once it has ended.")
        .def("__enter__",
             [](nb::handle self) {
                 nb::inst_ptr<Timer>(self)->start();
                 return nb::borrow(self);
             })
        .def(
            "__exit__", [](Timer& timer, nb::handle kind, nb::handle, nb::handle) { timer.stop(!kind.is_none()); },
            "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

}  // namespace datadist
