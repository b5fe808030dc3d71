// Public calls: their depth in each thread, deferred cleanup, the process they belong to (public_call.py).
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstddef>
#include <utility>

#include "python/errand.hpp"

namespace datadist {

// Queues a call if the thread is in nested calls, else returns false.
inline bool put_off(const nb::object& function, const nb::args& args) {
    if (calls.depth < 2) return false;
    if (calls.put_off == nullptr) calls.put_off = nb::list().release().ptr();
    if (PyList_Append(calls.put_off, nb::make_tuple(function, args).ptr()) != 0) throw nb::python_error();
    return true;
}

inline void do_all(const nb::list& queue) {
    for (nb::handle work : queue) {
        PyObject* function = PyTuple_GetItem(work.ptr(), 0);
        const nb::object done = nb::steal(PyObject_CallObject(function, PyTuple_GetItem(work.ptr(), 1)));
        if (!done.is_valid()) PyErr_WriteUnraisable(function);
    }
}

// Runs the queue unless calls are nested; exceptions are unraisable. False, with its exception, if a handler raised.
inline bool do_what_was_put_off() {
    static PyObject* const all = nb::cpp_function(&do_all).release().ptr();
    if (calls.put_off == nullptr || calls.depth > 1) return true;
    Raised before;
    before.fetch();
    const int depth = std::exchange(calls.depth, 1);
    bool good = true;
    while (PyObject* queue = good ? std::exchange(calls.put_off, nullptr) : nullptr) {
        const nb::object list = nb::steal(queue);
        good = nb::steal(elsewhere(all, {{list.ptr()}}, true)).is_valid();
    }
    calls.depth = depth;
    if (good) before.restore();
    return good;
}

inline void Runner::serve_for_ever() {
    nb::module_::import_("threading").attr("current_thread")().attr("name") = "lldd-call";
    pthread_setname_np(pthread_self(), "lldd-call");
    for (unsigned given = 0;; ++given) {
        poll(given_, given, for_errand_);
        go_.attr("acquire")();
        doing = errand_;
        calls.depth = doing->depth;
        doing->result = doing->arguments.call(doing->function);
        if (doing->result == nullptr) doing->error.fetch();
        doing->whole = true;
        if (doing->depth == 1) do_what_was_put_off();
        doing->put_off = std::exchange(calls.put_off, nullptr);
        calls.depth = 0;
        doing = nullptr;
        done_.attr("release")();
        ++ended_;
    }
}

// Python function that counts as a public call of its thread. It belongs to a class or a module, so it is never freed.
// `elsewhere`: in the main thread it is an errand, `whole` or not; a result that the caller does not get goes to the
// first argument's `_cut_off`, if there is one. `refuse` (unless None): the first argument belongs to the process in its
// `_pid`; in a forked child `refuse` raises for it and the function.
struct PublicCall {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function, *refuse, *dict;
    bool elsewhere, whole;
};

// Returns false, with an exception, in a process that did not make the object. It takes no lock: a thread of the parent
// may have held any at the fork.
inline bool made_here(PublicCall* call, PyObject* self) {
    static PyObject* const name = PyUnicode_InternFromString("_pid");
    const nb::object pid = nb::steal(PyObject_GetAttr(self, name));
    if (!pid.is_valid()) return false;
    if (PyLong_AsLong(pid.ptr()) == own_pid) return true;
    if (!PyErr_Occurred()) nb::steal(PyObject_CallFunctionObjArgs(call->refuse, self, call->function, nullptr));
    return false;
}

inline PyObject* call_elsewhere(PublicCall* call, PyObject* const* args, std::size_t nargs, PyObject* names) {
    const std::size_t named = names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_Size(names));
    nb::object lost;
    PyObject* result = elsewhere(call->function, {{args, args + nargs + named}, names}, call->whole, &lost);
    if (lost.is_valid() && nargs > 0) {
        Raised handler;
        handler.fetch();
        if (PyObject_HasAttrString(args[0], "_cut_off")) {
            const nb::object end = nb::steal(PyObject_GetAttrString(args[0], "_cut_off"));
            if (!nb::steal(elsewhere(end.ptr(), {{lost.ptr()}}, true)).is_valid()) PyErr_WriteUnraisable(end.ptr());
        }
        handler.restore();
    }
    return result;
}

inline PyObject* call_in_main_thread(PublicCall* call, PyObject* const* args, std::size_t flags, PyObject* names) {
    PyObject* result = nullptr;
    try {
        result = call->elsewhere
                     ? call_elsewhere(call, args, static_cast<std::size_t>(PyVectorcall_NARGS(flags)), names)
                     : PyObject_Vectorcall(call->function, args, flags, names);
        if (!do_what_was_put_off()) Py_CLEAR(result);
    } catch (nb::python_error& error) {
        error.restore();
        Py_CLEAR(result);
    }
    return result;
}

inline PyObject* call_public(PyObject* object, PyObject* const* args, std::size_t flags, PyObject* names) {
    auto* call = reinterpret_cast<PublicCall*>(object);
    if (call->refuse != Py_None && PyVectorcall_NARGS(flags) > 0 && !made_here(call, args[0])) return nullptr;
    ++calls.depth;
    PyObject* result;
    if (in_main_thread()) {
        result = call_in_main_thread(call, args, flags, names);
    } else {
        // No handler of C++ exceptions around it: the exit of the interpreter unwinds this stack (gil.c).
        result = PyObject_Vectorcall(call->function, args, flags, names);
        do_what_was_put_off();
    }
    --calls.depth;
    return result;
}

inline PyObject* repr_of_call(PyObject* object) {
    return PyObject_Repr(reinterpret_cast<PublicCall*>(object)->function);
}

// The stable ABI has no PyMethod_New.
inline PyObject* bind_call(PyObject* object, PyObject* instance, PyObject*) {
    static PyObject* const method = nb::module_::import_("types").attr("MethodType").inc_ref().ptr();
    if (instance == nullptr || instance == Py_None) return Py_NewRef(object);
    return PyObject_CallFunctionObjArgs(method, object, instance, nullptr);
}

inline void bind_calls(nb::module_& m) {
    using namespace nb::literals;

    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(PublicCall, vectorcall), READONLY, nullptr},
        {"__dictoffset__", T_PYSSIZET, offsetof(PublicCall, dict), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                                       {nullptr, nullptr, nullptr, nullptr, nullptr}};
    static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                  {Py_tp_descr_get, reinterpret_cast<void*>(&bind_call)},
                                  {Py_tp_repr, reinterpret_cast<void*>(&repr_of_call)},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, properties},
                                  {0, nullptr}};
    static PyType_Spec spec{"llm_datadist._native._native.PublicCall", sizeof(PublicCall), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
    static PyObject* const type = PyType_FromSpec(&spec);
    m.def(
        "public_call",
        [](const nb::object& function, bool elsewhere, bool whole, const nb::object& refuse) {
            PyObject* object = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
            if (object == nullptr) throw nb::python_error();
            auto* call = reinterpret_cast<PublicCall*>(object);
            call->vectorcall = &call_public;
            call->function = nb::borrow(function).release().ptr();
            call->refuse = nb::borrow(refuse).release().ptr();
            call->elsewhere = elsewhere;
            call->whole = whole;
            return nb::steal(object);
        },
        "function"_a, "elsewhere"_a, "whole"_a, "refuse"_a.none());
    pthread_atfork(nullptr, nullptr, [] {
        own_pid = ::getpid();
        main_thread = PyThread_get_thread_ident();
        Runner::forget();
    });
    cut_off = new nb::object(
        nb::steal(PyErr_NewException("llm_datadist._native._native.CutOff", PyExc_BaseException, nullptr)));
    Runner::serve_ = new nb::object(nb::cpp_function(&Runner::serve));
    m.attr("CutOff") = *cut_off;
    m.def("inside_another_call", [] { return calls.depth > 1; });
    m.def("in_main_thread", &in_main_thread);
    m.def("for_main_thread", [] { return doing != nullptr || in_main_thread(); });
    m.def("put_off", &put_off);
    m.def("do_what_was_put_off", [] {
        if (!do_what_was_put_off()) throw nb::python_error();
    });
    m.def("check_signals", [] {
        if (!check_signals()) throw nb::python_error();
    });
    m.def(
        "elsewhere",
        [](const nb::object& function, const nb::tuple& args, const nb::dict& named, bool whole) {
            Arguments given;
            for (nb::handle each : args) given.values.push_back(each.ptr());
            for (const auto& [_, each] : named) given.values.push_back(each.ptr());
            const nb::tuple names(named.keys());
            given.names = names.ptr();
            PyObject* result = elsewhere(function.ptr(), given, whole);
            if (result == nullptr) throw nb::python_error();
            return nb::steal(result);
        },
        "function"_a, "args"_a, "named"_a, "whole"_a);
}

}  // namespace datadist
