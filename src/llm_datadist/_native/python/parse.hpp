// Conversion of Python lists and tuples to int64 values, fast for plain ints.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "error.hpp"

namespace datadist {

// A Python exception is set.
struct PythonError {};

// One line of at most 200 bytes.
inline std::string repr_of(PyObject* object) {
    PyObject* shown = PyObject_Repr(object);
    if (shown == nullptr) throw PythonError{};
    const char* utf8 = PyUnicode_AsUTF8AndSize(shown, nullptr);
    std::string result = std::string(utf8 != nullptr ? utf8 : "?").substr(0, 200);
    std::replace(result.begin(), result.end(), '\n', ' ');
    if (utf8 == nullptr) PyErr_Clear();
    Py_DECREF(shown);
    return result;
}

[[noreturn]] inline void refuse_type(const char* name, Py_ssize_t at, PyObject* item) {
    const std::string shown = repr_of(item);
    PyObject* type = PyType_GetName(Py_TYPE(item));
    if (type == nullptr) throw PythonError{};
    PyErr_Format(PyExc_TypeError, "%s[%zd] is %s: must be an int, not %U", name, at, shown.c_str(), type);
    Py_DECREF(type);
    throw PythonError{};
}

[[noreturn]] inline void refuse_value(const char* name, Py_ssize_t at, PyObject* item) {
    refuse(name, "[", at, "] is ", repr_of(item), ": must be in [0, 2**63)");
}

// Value of an int or a subclass; runs no Python code but for an error's text.
inline std::int64_t int_value(PyObject* item, const char* name, Py_ssize_t at) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || value < 0) refuse_value(name, at, item);
    return value;
}

// Value by __index__, which may run any Python code.
inline std::int64_t index_value(PyObject* item, const char* name, Py_ssize_t at) {
    if (!PyIndex_Check(item)) refuse_type(name, at, item);
    PyObject* number = PyNumber_Index(item);
    if (number == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {  // as of an array or a tensor of floats
        PyErr_Clear();
        refuse_type(name, at, item);
    }
    if (number == nullptr) throw PythonError{};
    std::int64_t value = 0;
    try {
        value = int_value(number, name, at);
    } catch (...) {
        Py_DECREF(number);
        throw;
    }
    Py_DECREF(number);
    return value;
}

// Borrowed. The stable ABI (CPython 3.12 and newer) has only functions, a third slower.
inline PyObject* item_at(PyObject* sequence, Py_ssize_t at) {
#if defined(Py_LIMITED_API)
    return PyList_Check(sequence) ? PyList_GetItem(sequence, at) : PyTuple_GetItem(sequence, at);
#else
    return PySequence_Fast_GET_ITEM(sequence, at);
#endif
}

// Items from `values.size()` on. The tuple keeps them alive, even if __index__ drops them.
inline void parse_rest(PyObject* tuple, const char* name, std::vector<std::int64_t>& values) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    for (auto at = static_cast<Py_ssize_t>(values.size()); at < size; ++at) {
        PyObject* item = item_at(tuple, at);
        values.push_back(PyLong_Check(item) ? int_value(item, name, at) : index_value(item, name, at));
    }
}

inline void parse_slowly(PyObject* sequence, const char* name, std::vector<std::int64_t>& values) {
    PyObject* tuple = PySequence_Tuple(sequence);
    if (tuple == nullptr) throw PythonError{};
    try {
        parse_rest(tuple, name, values);
    } catch (...) {
        Py_DECREF(tuple);
        throw;
    }
    Py_DECREF(tuple);
}

// `sequence` is a list or a tuple.
inline std::vector<std::int64_t> parse_indices(PyObject* sequence, const char* name) {
    const Py_ssize_t size = PyList_Check(sequence) ? PyList_Size(sequence) : PyTuple_Size(sequence);
    std::vector<std::int64_t> values;
    values.reserve(static_cast<std::size_t>(size));
    for (Py_ssize_t at = 0; at < size; ++at) {
        PyObject* item = item_at(sequence, at);
        if (!PyLong_Check(item)) {
            parse_slowly(sequence, name, values);
            break;
        }
        values.push_back(int_value(item, name, at));
    }
    return values;
}

struct Pairs {
    std::vector<std::int64_t> keys;
    std::vector<std::int64_t> values;
};

// False unless an int in [0, 2**63).
inline bool append_index(PyObject* item, std::vector<std::int64_t>& values) {
    if (!PyLong_Check(item)) return false;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || value < 0) return false;
    values.push_back(value);
    return true;
}

inline bool append_all(PyObject* list, std::vector<std::int64_t>& values) {
    const Py_ssize_t size = PyList_Size(list);
    for (Py_ssize_t at = 0; at < size; ++at)
        if (!append_index(item_at(list, at), values)) return false;
    return true;
}

// Parses {int: int} or, if `lists`, {int: [int, ...]}, a pair for each list item. Runs no Python code: the dict stays
// unchanged. False if it holds anything else.
inline bool parse_pairs(PyObject* dict, bool lists, Pairs& pairs) {
    const auto size = static_cast<std::size_t>(PyDict_Size(dict));
    pairs.keys.reserve(size);
    pairs.values.reserve(size);
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value);) {
        if (lists && !PyList_Check(value)) return false;
        if (!(lists ? append_all(value, pairs.values) : append_index(value, pairs.values))) return false;
        if (!append_index(key, pairs.keys)) return false;
        const std::int64_t number = pairs.keys.back();
        pairs.keys.resize(pairs.values.size(), number);
    }
    return true;
}

}  // namespace datadist
