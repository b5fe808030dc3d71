// The interpreter's lock, given away while native code works.
#pragma once

#include <nanobind/nanobind.h>

// A thread that the interpreter ends at its exit does not come back (gil.c).
extern "C" void datadist_take_gil_back(PyThreadState* state) noexcept;

namespace datadist {

// Without the lock for as long as it lives.
class GilReleased {
public:
    GilReleased() = default;
    ~GilReleased() { datadist_take_gil_back(state_); }

    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

private:
    PyThreadState* state_ = PyEval_SaveThread();
};

}  // namespace datadist
