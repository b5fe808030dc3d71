// Errands: work of the main thread that another thread does, where no signal handler runs.
//
// The interpreter runs handlers in the main thread between any two instructions, those of a `finally` too, and they may
// raise. So what must not stop half way is an errand of a thread `lldd-call`. Meanwhile the main thread waits and runs
// handlers. Once one has raised, the errand raises CutOff, once, at its next check_signals(), unless it is whole; when it
// has ended, the main thread raises.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "busy_wait.hpp"
#include "python/gil.hpp"
#include "ticket.hpp"

namespace datadist {

namespace nb = nanobind;

inline pid_t own_pid = ::getpid();  // without a system call at each use
inline unsigned long main_thread = 0;  // 0: unknown

inline bool in_main_thread() {
    if (main_thread == 0)
        main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    return PyThread_get_thread_ident() == main_thread;
}

// A thread's nested public calls, and its deferred cleanup. Only that thread changes them.
//
// User finalizers run at any allocation, also under a lock of the library. Their cleanup waits until the thread is in
// no other call, so that it holds no lock.
struct Calls {
    int depth = 0;  // nested calls
    PyObject* put_off = nullptr;  // list of (function, arguments), or null
};
inline thread_local Calls calls;

// An exception that is set aside, or on its way between threads.
class Raised {
public:
    Raised() = default;
    ~Raised() {
        for (PyObject* each : {kind_, value_, trace_}) Py_XDECREF(each);
    }

    Raised(const Raised&) = delete;
    Raised& operator=(const Raised&) = delete;

    void fetch() {
        if (kind_ == nullptr)
            PyErr_Fetch(&kind_, &value_, &trace_);
        else
            PyErr_Clear();  // the first one counts
    }
    void restore() {
        PyErr_Restore(std::exchange(kind_, nullptr), std::exchange(value_, nullptr), std::exchange(trace_, nullptr));
    }
    explicit operator bool() const noexcept { return kind_ != nullptr; }

private:
    PyObject *kind_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// True for the arguments of an __exit__ after a device that does not answer: its copy may still use the memory.
inline bool still_runs(const nb::args& raised) {
    nb::object error = raised.size() > 1 ? nb::object(raised[1]) : nb::object(nb::none());
    for (int depth = 0; !error.is_none() && depth < 8; ++depth) {  // also as the reason of another error
        if (nb::getattr(error, "unfinished", nb::bool_(false)).is(nb::bool_(true))) return true;
        error = nb::getattr(error, "__context__", nb::none());
    }
    return false;
}

// Objects to call a function with: `names`, a tuple or null, is of the last ones.
struct Arguments {
    std::vector<PyObject*> values;
    PyObject* names = nullptr;

    PyObject* call(PyObject* function) const {
        const std::size_t named = names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_Size(names));
        return PyObject_Vectorcall(function, values.data(), values.size() - named, names);
    }
};

struct Errand {
    PyObject* function;  // with its arguments it is of the main thread, which waits
    const Arguments& arguments;
    bool whole;
    int depth;  // of the main thread's calls
    PyObject* put_off = nullptr;
    PyObject* result = nullptr;
    Raised error{};
    std::atomic<bool> cut{false};
};
inline thread_local Errand* doing = nullptr;
inline nb::object* cut_off = nullptr;  // type of the exception; never freed

// A thread that does errands, one after the other. Both locks pass the turn; all else is changed under the GIL. Both
// sides poll before they sleep: a wake-up costs more than most errands.
class Runner {
public:
    // Returns a runner without an errand, or null: no thread can be started.
    static Runner* find() {
        if (idle_.empty()) {
            auto* runner = new Runner();  // as its thread, it lives as long as the process
            const nb::object thread =
                nb::steal(PyObject_CallMethod(nb::module_::import_("_thread").ptr(), "start_new_thread", "O(N)",
                                              serve_->ptr(), PyCapsule_New(runner, nullptr, nullptr)));
            if (!thread.is_valid()) {
                delete runner;
                PyErr_Clear();
                return nullptr;
            }
            return runner;
        }
        Runner* runner = idle_.back();
        idle_.pop_back();
        return runner;
    }

    // Has an errand done. An exception of a handler goes to `raised`. False in a child that a handler has forked.
    bool run(Errand& errand, Raised& raised) {
        const pid_t pid = own_pid;
        const unsigned ended = ended_.load();
        errand_ = &errand;
        release_go_();
        ++given_;
        poll(ended_, ended, for_end_);
        while (true) {
            // A signal ends the wait if this thread gets it, and the call has run the handlers then.
            const nb::object got = nb::steal(PyObject_CallObject(acquire_done_.ptr(), within_turn_.ptr()));
            const bool over = got.is_valid() && PyObject_IsTrue(got.ptr());
            // Also at the end: a handler that raised behind the call would lose the result.
            if (!got.is_valid() || PyErr_CheckSignals() != 0) {
                raised.fetch();
                errand.cut.store(true);
            }
            if (own_pid != pid) return false;
            if (over) break;
        }
        idle_.push_back(this);
        return true;
    }

    static void serve(const nb::capsule& runner) { static_cast<Runner*>(runner.data())->serve_for_ever(); }
    static void forget() noexcept { idle_.clear(); }  // in a forked child, which has not their threads

    inline static nb::object* serve_ = nullptr;  // for Python; never freed

private:
    static constexpr std::int64_t most_poll_ns = 100'000;
    static constexpr double turn_seconds = 0.05;  // until a signal that another thread got is looked for

    [[noreturn]] void serve_for_ever();

    // Waits a little, without the GIL, for the next number.
    static void poll(const std::atomic<unsigned>& number, unsigned before, BusyWait& busy_wait) {
        if (!busy_wait.begin()) return;
        bool come = false;
        {
            const GilReleased released;
            const std::int64_t end = monotonic_ns() + most_poll_ns;
            while (!(come = number.load() != before) && monotonic_ns() < end) {
            }
        }
        busy_wait.tell(come);
    }

    static nb::object held_lock() {
        nb::object lock = nb::module_::import_("_thread").attr("allocate_lock")();
        lock.attr("acquire")();
        return lock;
    }

    inline static std::vector<Runner*> idle_;
    nb::object go_ = held_lock(), done_ = held_lock();
    nb::object release_go_ = go_.attr("release"), acquire_done_ = done_.attr("acquire");
    nb::tuple within_turn_ = nb::make_tuple(true, turn_seconds);
    Errand* errand_ = nullptr;
    std::atomic<unsigned> given_{0}, ended_{0};  // errands
    BusyWait for_errand_, for_end_;
};

// True once the interpreter lets no other thread run.
inline bool exiting() {
    PyObject* asked = PySys_GetObject("is_finalizing");
    return asked == nullptr || asked == Py_None || nb::handle(asked)().is(nb::handle(Py_True));
}

// Calls a function in a runner's thread if this is the main thread, else here; null with an exception. Without a thread
// it is called here, too: a handler may then stop it anywhere. If a handler has raised, `lost` gets the result, if any.
inline PyObject* elsewhere(PyObject* function, const Arguments& given, bool whole, nb::object* lost = nullptr) {
    Runner* runner = in_main_thread() && !exiting() ? Runner::find() : nullptr;
    if (runner == nullptr) return given.call(function);
    // With the caller's context variables; changes are lost.
    static PyObject* const copy_context = nb::module_::import_("contextvars").attr("copy_context").inc_ref().ptr();
    const nb::object in_context = nb::handle(copy_context)().attr("run");
    Arguments all = given;
    all.values.insert(all.values.begin(), function);
    Errand errand{in_context.ptr(), all, whole, std::max(calls.depth, 1)};
    Raised raised;
    if (!runner->run(errand, raised)) {
        PyErr_SetString(PyExc_RuntimeError, "a signal handler has forked: the call goes on in the parent only");
        if (raised) raised.restore();
        return nullptr;
    }
    if (const nb::object late = nb::steal(errand.put_off); late.is_valid()) {
        if (calls.put_off == nullptr) calls.put_off = nb::list().release().ptr();
        const Py_ssize_t end = PyList_Size(calls.put_off);
        PyList_SetSlice(calls.put_off, end, end, late.ptr());
    }
    nb::object result = nb::steal(errand.result);
    if (!raised && !result.is_valid()) errand.error.restore();
    if (!raised) return result.release().ptr();
    if (lost != nullptr) *lost = std::move(result);
    raised.restore();
    return nullptr;
}

// False with an exception: a handler raised while this thread does its errand, or now in the main thread.
inline bool check_signals() {
    if (doing == nullptr) return PyErr_CheckSignals() == 0;
    if (doing->whole || !doing->cut.load()) return true;
    doing->whole = true;  // cleanup may wait
    PyErr_SetString(cut_off->ptr(), "the handler of a signal has raised in the caller's thread");
    return false;
}

}  // namespace datadist
