// Threads of a C++ program in Python.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>

namespace datadist {

// Holds Python's lock during its lifetime; false if the interpreter ends.
//
// A thread that Python does not know gets a thread state at its first call and keeps it until it ends: making one costs
// more than most calls.
class Attached {
public:
    Attached() : entered_(enter()) {
        if (!entered_) return;
        if (use == Use::none) {
            use = Use::kept;
            thread_local Keeper keeper;  // destroyed before the program's static objects, which may call
        }
        state_ = PyGILState_Ensure();
    }
    ~Attached() {
        if (!entered_) return;
        PyGILState_Release(state_);
        --inside;
    }

    Attached(const Attached&) = delete;
    Attached& operator=(const Attached&) = delete;

    explicit operator bool() const { return entered_; }

    // In a forked child: threads of the parent are in no call of it.
    static void forget() { inside = 0; }

    // Refuses calls, and waits for those that run. Called with Python's lock, which it gives back meanwhile.
    static void close() {
        closed = true;
        PyThreadState* state = PyEval_SaveThread();
        while (inside.load() > 0) usleep(1000);
        PyEval_RestoreThread(state);
    }

private:
    // One more Ensure than Release, so that later pairs find the state.
    struct Keeper {
        pid_t pid = getpid();
        bool made = PyGILState_GetThisThreadState() == nullptr;
        PyGILState_STATE state{};

        Keeper() {
            if (!made) return;  // a thread of Python's own
            state = PyGILState_Ensure();
            PyEval_SaveThread();
        }
        ~Keeper() {
            use = Use::over;
            if (!made || pid != getpid() || !enter()) return;
            PyGILState_Ensure();
            PyGILState_Release(PyGILState_LOCKED);
            PyGILState_Release(state);
            --inside;
        }
    };

    static bool enter() {
        ++inside;
        if (!closed) return true;
        --inside;
        return false;
    }

    enum class Use { none, kept, over };
    inline static thread_local Use use = Use::none;
    inline static std::atomic<int> inside{0};
    inline static std::atomic<bool> closed{false};

    bool entered_;
    PyGILState_STATE state_{};
};

}  // namespace datadist
