// The interpreter's lock, given away while native code works.
//
// A thread that wants the lock back while the interpreter exits is ended there by the interpreter, before Python 3.14
// with pthread_exit(), which unwinds the stack. The frames between here and the interpreter do not allow that: they end
// the process by a signal. Such a thread stays where it is until the process has ended.
#pragma once

#include <nanobind/nanobind.h>

#include <unistd.h>

namespace datadist {

inline void take_gil_back(PyThreadState* state) noexcept {
    try {
        PyEval_RestoreThread(state);
    } catch (...) {  // nothing but that: __forced_unwind, by which a thread is ended
        for (;;) ::pause();
    }
}

// Without the lock for as long as it lives.
class GilReleased {
public:
    GilReleased() = default;
    ~GilReleased() { take_gil_back(state_); }

    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

private:
    PyThreadState* state_ = PyEval_SaveThread();
};

}  // namespace datadist
