// Calls that hold signals, their points of delivery, and deferred cleanup (signals.py).
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

#include "signals.hpp"

namespace datadist {

namespace nb = nanobind;

// Only the main thread changes it, under the GIL.
struct MainThread {
    inline static unsigned long id = 0;  // 0: unknown
    inline static bool took_signals_over = false;
    inline static int depth = 0;  // nested public calls, as by handlers
    inline static bool interrupted = false;  // no handler runs before the end: one raised, or the call is whole

    static bool here() { return PyThread_get_thread_ident() == id; }
};

// A thread's nested public calls, and its deferred cleanup. Only that thread changes them.
//
// User finalizers run at any allocation, also under a lock of the library. Their cleanup waits until the thread is in
// no other call, so that it holds no lock.
struct Calls {
    int depth = 0;  // nested calls
    PyObject* put_off = nullptr;  // list of (function, arguments), or null
};
inline thread_local Calls calls;

// Queues a call if the thread is in nested calls, else returns false.
inline bool put_off(const nb::object& function, const nb::args& args) {
    if (calls.depth < 2) return false;
    const nb::tuple work = nb::make_tuple(function, args);
    if (calls.put_off == nullptr) calls.put_off = nb::list().release().ptr();
    if (PyList_Append(calls.put_off, work.ptr()) != 0) throw nb::python_error();
    return true;
}

// Runs the queue unless calls are nested. Exceptions are unraisable. No signal handler runs: nobody could catch its
// exception.
inline void do_what_was_put_off() {
    if (calls.put_off == nullptr || calls.depth > 1) return;
    const nb::error_scope kept;
    const bool before = MainThread::interrupted;
    const int depth = std::exchange(calls.depth, 1);
    if (MainThread::here()) MainThread::interrupted = true;
    while (PyObject* list = std::exchange(calls.put_off, nullptr)) {
        for (nb::handle work : nb::steal<nb::list>(list)) {
            PyObject* function = PyTuple_GetItem(work.ptr(), 0);
            const nb::object done = nb::steal(PyObject_CallObject(function, PyTuple_GetItem(work.ptr(), 1)));
            if (!done.is_valid()) PyErr_WriteUnraisable(function);
        }
    }
    calls.depth = depth;
    if (MainThread::here()) MainThread::interrupted = before;
}

// Runs handlers of kept signals on the main thread; false if one raised. Called at waits without a lock. After an
// exception no handler runs until the call ends.
inline bool deliver_signals() {
    if (!MainThread::here() || MainThread::depth == 0) return PyErr_CheckSignals() == 0;
    if (MainThread::interrupted) return true;
    const Calls before = std::exchange(calls, {});  // handlers are not part of the waiting call
    bool raised = false;
    while (!raised && KeptSignals::pass_one()) raised = PyErr_CheckSignals() != 0;
    calls = before;
    if (raised) MainThread::interrupted = true;
    return !raised;
}

// False if deliver_signals() would find nothing. For the main thread; needs no GIL.
inline bool may_deliver_signals() { return MainThread::depth == 0 || KeptSignals::any(); }

inline nb::object& original_set_handler() {
    static nb::object* original = new nb::object();  // never freed
    return *original;
}

// Replaces `_signal.signal`, which installs every Python handler.
inline nb::object set_handler(const nb::args& args) {
    nb::object before = original_set_handler()(*args);
    KeptSignals::take_over(nb::cast<int>(nb::int_(args[0])), reinterpret_cast<const void*>(&PyErr_CheckSignals));
    return before;
}

inline pid_t own_pid = ::getpid();  // without a system call at each use

inline void in_forked_child() {
    KeptSignals::forget();
    if (MainThread::here()) return;  // the main thread forked: its calls continue here
    MainThread::id = PyThread_get_thread_ident();
    MainThread::depth = 0;
    MainThread::interrupted = false;
    KeptSignals::let_go();
}

// Takes over present and later Python handlers. Once, on the main thread.
inline void take_signals_over() {
    const nb::module_ signals = nb::module_::import_("_signal");
    original_set_handler() = signals.attr("signal");
    nb::setattr(signals, "signal", nb::module_::import_("llm_datadist._native._native").attr("set_signal_handler"));
    for (nb::handle each : signals.attr("valid_signals")())
        if (PyCallable_Check(signals.attr("getsignal")(each).ptr()))
            KeptSignals::take_over(nb::cast<int>(each), reinterpret_cast<const void*>(&PyErr_CheckSignals));
    pthread_atfork(nullptr, nullptr, &in_forked_child);
    MainThread::took_signals_over = true;
}

// Python function that holds signals on the main thread. If a handler's exception replaces the result, `undo` (unless
// None) gets the first argument and the result. `whole`: no handler runs at waits either. `refuse` (unless None): the
// first argument belongs to the process in its `_pid`; in a forked child `refuse` raises for it and the function.
struct HoldingCall {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject* function;
    PyObject* undo;
    PyObject* refuse;
    PyObject* dict;
    bool whole;
};

// Runs handlers while `undo` can still revert the result.
inline PyObject* settle(HoldingCall* call, PyObject* self, PyObject* result) {
    if (deliver_signals()) return result;
    const nb::error_scope kept;
    const nb::object undone = nb::steal(PyObject_CallFunctionObjArgs(call->undo, self, result, nullptr));
    if (!undone.is_valid()) PyErr_WriteUnraisable(call->undo);
    Py_DECREF(result);
    return nullptr;
}

inline bool is_main_thread() {
    try {
        if (MainThread::id == 0) {
            const nb::object main = nb::module_::import_("threading").attr("main_thread")();
            MainThread::id = nb::cast<unsigned long>(main.attr("ident"));
        }
        if (MainThread::here() && !MainThread::took_signals_over) take_signals_over();
        return MainThread::here();
    } catch (nb::python_error& error) {
        error.discard_as_unraisable("llm_datadist: taking signals over");
        return false;
    }
}

inline PyObject* call_in_main_thread(HoldingCall* call, PyObject* const* args, std::size_t nargs, PyObject* names) {
    const bool before = MainThread::interrupted;
    if (call->whole) MainThread::interrupted = true;
    PyObject* result = PyObject_Vectorcall(call->function, args, nargs, names);
    if (call->whole) MainThread::interrupted = before;
    if (result != nullptr && call->undo != Py_None && PyVectorcall_NARGS(nargs) > 0)
        result = settle(call, args[0], result);
    return result;
}

// Returns false, with an exception, in a process that did not make the object. It takes no lock: a thread of the parent
// may have held any at the fork.
inline bool made_here(HoldingCall* call, PyObject* self) {
    static PyObject* const name = PyUnicode_InternFromString("_pid");
    const nb::object pid = nb::steal(PyObject_GetAttr(self, name));
    if (!pid.is_valid()) return false;
    if (PyLong_AsLong(pid.ptr()) == own_pid) return true;
    if (!PyErr_Occurred()) nb::steal(PyObject_CallFunctionObjArgs(call->refuse, self, call->function, nullptr));
    return false;
}

inline PyObject* call_holding(PyObject* object, PyObject* const* args, std::size_t nargs, PyObject* names) {
    auto* call = reinterpret_cast<HoldingCall*>(object);
    if (call->refuse != Py_None && PyVectorcall_NARGS(nargs) > 0 && !made_here(call, args[0])) return nullptr;
    const bool main = is_main_thread();
    if (main && MainThread::depth++ == 0) KeptSignals::hold();
    ++calls.depth;
    PyObject* result = nullptr;
    if (!main)
        result = PyObject_Vectorcall(call->function, args, nargs, names);
    else if (PyErr_CheckSignals() == 0)  // earlier signals: later is inside the call
        result = call_in_main_thread(call, args, nargs, names);
    do_what_was_put_off();
    --calls.depth;
    if (main && --MainThread::depth == 0) {
        MainThread::interrupted = false;
        KeptSignals::let_go();  // the interpreter runs their handlers after this call
    }
    return result;
}

inline int traverse_call(PyObject* object, visitproc visit, void* arg) {
    auto* call = reinterpret_cast<HoldingCall*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(call->function);
    Py_VISIT(call->undo);
    Py_VISIT(call->refuse);
    Py_VISIT(call->dict);
    return 0;
}

inline int clear_call(PyObject* object) {
    auto* call = reinterpret_cast<HoldingCall*>(object);
    Py_CLEAR(call->function);
    Py_CLEAR(call->undo);
    Py_CLEAR(call->refuse);
    Py_CLEAR(call->dict);
    return 0;
}

inline void free_call(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_call(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

inline PyObject* make_call(PyTypeObject* type, PyObject* args, PyObject* names) {
    PyObject *function, *undo = Py_None, *refuse = Py_None;
    int whole = 0;
    static const char* keywords[] = {"function", "undo", "whole", "refuse", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, names, "O|OpO", const_cast<char**>(keywords), &function, &undo, &whole,
                                     &refuse))
        return nullptr;
    PyObject* object = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (object == nullptr) return nullptr;
    auto* call = reinterpret_cast<HoldingCall*>(object);
    call->vectorcall = &call_holding;
    call->function = Py_NewRef(function);
    call->undo = Py_NewRef(undo);
    call->refuse = Py_NewRef(refuse);
    call->whole = whole != 0;
    return object;
}

inline PyObject* repr_of_call(PyObject* object) {
    return PyObject_Repr(reinterpret_cast<HoldingCall*>(object)->function);
}

// The class of the function: `inspect`, `pydoc` and mocks take the call for a function (signals.py copies its code).
inline PyObject* class_of_call(PyObject* object, void*) {
    PyObject* function = reinterpret_cast<HoldingCall*>(object)->function;
    if (function == nullptr) return Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(object)));  // being collected
    return PyObject_GetAttrString(function, "__class__");
}

// Type of bound methods: the stable ABI has no PyMethod_New.
inline nb::object& method_type() {
    static nb::object* type = new nb::object();  // never freed
    return *type;
}

inline PyObject* bind_call(PyObject* object, PyObject* instance, PyObject*) {
    if (instance == nullptr || instance == Py_None) return Py_NewRef(object);
    return PyObject_CallFunctionObjArgs(method_type().ptr(), object, instance, nullptr);
}

inline void bind_signals(nb::module_& m) {
    using namespace nb::literals;

    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(HoldingCall, vectorcall), READONLY, nullptr},
        {"__dictoffset__", T_PYSSIZET, offsetof(HoldingCall, dict), READONLY, nullptr},
        {"refuse", T_OBJECT, offsetof(HoldingCall, refuse), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                                       {"__class__", &class_of_call, nullptr, nullptr, nullptr},
                                       {nullptr, nullptr, nullptr, nullptr, nullptr}};
    static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(&make_call)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(&free_call)},
                                  {Py_tp_traverse, reinterpret_cast<void*>(&traverse_call)},
                                  {Py_tp_clear, reinterpret_cast<void*>(&clear_call)},
                                  {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                  {Py_tp_descr_get, reinterpret_cast<void*>(&bind_call)},
                                  {Py_tp_repr, reinterpret_cast<void*>(&repr_of_call)},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, properties},
                                  {0, nullptr}};
    static PyType_Spec spec{
        "llm_datadist._native._native.HoldingCall", sizeof(HoldingCall), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
    method_type() = nb::module_::import_("types").attr("MethodType");
    pthread_atfork(nullptr, nullptr, [] { own_pid = ::getpid(); });
    m.attr("HoldingCall") = nb::steal(PyType_FromSpec(&spec));
    m.def("set_signal_handler", &set_handler);
    m.def("inside_another_call", [] { return calls.depth > 1; });
    m.def("put_off", &put_off);
    m.def("do_what_was_put_off", &do_what_was_put_off);
    m.def("deliver_signals", [] {
        if (!deliver_signals()) throw nb::python_error();
    });
}

}  // namespace datadist
