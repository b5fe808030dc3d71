// Translation of RuleError to ParamError.
#pragma once

#include <nanobind/nanobind.h>

#include "error.hpp"

namespace datadist {

inline void translate_rule_errors() {
    namespace nb = nanobind;
    const nb::object found = nb::module_::import_("llm_datadist.errors").attr("ParamError");
    static PyObject* param_error = found.inc_ref().ptr();  // never released: errors may come until the interpreter ends
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const RuleError& error) {
            PyErr_SetString(param_error, error.what());
        }
    });
}

}  // namespace datadist
