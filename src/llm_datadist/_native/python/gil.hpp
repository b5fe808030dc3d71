// Release of the GIL around native code.
#pragma once

#include <nanobind/nanobind.h>

// Never returns if the interpreter ends this thread at exit (gil.c).
extern "C" void datadist_take_gil_back(PyThreadState* state) noexcept;

namespace datadist {

// Releases the GIL during its lifetime.
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
