// Python bindings of devices.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>

#include "device_memory.hpp"
#include "gil.hpp"

namespace datadist {

namespace nb = nanobind;

// By llm_datadist.errors._device_error(), which picks the exception.
inline void translate_device_errors() {
    const nb::object found = nb::module_::import_("llm_datadist.errors").attr("_device_error");
    static PyObject* device_error = found.inc_ref().ptr();  // never released, as ParamError
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const DeviceError& error) {
            const nb::object made = nb::steal(PyObject_CallFunction(device_error, "si", error.what(), error.code));
            if (made.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
        }
    });
}

inline void bind_devices(nb::module_& m) {
    using namespace nb::literals;
    using Released = nb::call_guard<GilReleased>;

    translate_device_errors();
    nb::class_<Device>(m, "Device", nb::is_final())
        .def_static("open", &Device::open, Released(), "ordinal"_a, nb::rv_policy::reference)
        .def_prop_ro("ordinal", &Device::ordinal)
        .def_prop_ro("name", &Device::name)
        .def_prop_ro("uuid", [](const Device& device) { return nb::bytes(device.uuid().data(), device.uuid().size()); })
        .def_prop_ro("version", &Device::version)
        .def_prop_ro("no_kernel", &Device::no_kernel)
        .def("attribute", &Device::attribute, "which"_a)
        .def("memory", &Device::memory, Released())
        .def("device_of", &Device::device_of, Released(), "address"_a);
    nb::class_<PinnedMemory>(m, "PinnedMemory", nb::is_final())
        .def(nb::init<int, std::uint64_t, std::uint64_t>(), Released(), "ordinal"_a, "address"_a, "nbytes"_a)
        .def("release", &PinnedMemory::release, Released());
    nb::class_<DeviceMemory>(m, "DeviceMemory", nb::is_final())
        .def(nb::init<int, std::uint64_t>(), Released(), "ordinal"_a, "nbytes"_a)
        .def(nb::init<int, std::uint64_t, int, bool>(), Released(), "ordinal"_a, "nbytes"_a, "fd"_a, "writable"_a)
        .def_prop_ro("address", &DeviceMemory::address)
        .def_prop_ro("size", &DeviceMemory::size)
        .def("export_fd", &DeviceMemory::export_fd, Released())
        .def("close", &DeviceMemory::close, Released());
    m.def("set_device_patience", [](std::int64_t ms) { Device::patience_ns().store(ms * 1'000'000); }, "ms"_a);
}

}  // namespace datadist
