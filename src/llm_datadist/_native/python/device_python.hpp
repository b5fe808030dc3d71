// Python bindings of devices.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "copy/device_memory.hpp"
#include "copy/sides.hpp"
#include "copy/stream_event.hpp"
#include "python/gil.hpp"
#include "python/stop_python.hpp"

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

// C++'s own pointer, as PyLent.
struct PyStreamEvent {
    PyStreamEvent(int ordinal, std::uint64_t stream, const PyStreamEvent* before)
        : event(std::make_shared<const StreamEvent>(ordinal, stream, before ? before->event : nullptr)) {}

    std::shared_ptr<const StreamEvent> event;
};

// Context variable of what copies wait for: a PyStreamEvent or None.
inline nb::handle after_variable() {
    static PyObject* const made =  // never released, as ParamError
        nb::module_::import_("contextvars")
            .attr("ContextVar")("llm_datadist after", nb::arg("default") = nb::none())
            .inc_ref()
            .ptr();
    return made;
}

// What copies wait for here; null for nothing.
inline std::shared_ptr<const StreamEvent> work_before() {
    if (StreamEvent::alive() == 0) return nullptr;  // saves hosts the question
    const nb::object found = after_variable().attr("get")();
    return found.is_none() ? nullptr : nb::cast<const PyStreamEvent&>(found).event;
}

// False if the time ends, or the call is cancelled, before that work has ended.
inline bool py_await_work(std::int64_t deadline_ns, const std::optional<Flag>& cancelled) {
    const auto before = work_before();
    if (!before) return true;
    Stop stop = stop_of(deadline_ns, cancelled);
    Interruptible interruptible;
    stop.interrupt = &interruptible;
    const bool ended = before->await(stop);
    interruptible.end();
    return ended;
}

// Its end, which may wait for copies, lets other threads run.
struct PyDeviceMemory : DeviceMemory {
    using DeviceMemory::DeviceMemory;
    ~PyDeviceMemory() {
        const GilReleased released;
        close();
    }
};

inline void bind_devices(nb::module_& m) {
    using namespace nb::literals;
    using Released = nb::call_guard<GilReleased>;

    translate_device_errors();
    nb::class_<Device>(m, "Device", nb::is_final())
        .def_static("open", &Device::open, Released(), "ordinal"_a, nb::rv_policy::reference)
        .def_static("count", &Device::count, Released())
        .def_prop_ro("ordinal", &Device::ordinal)
        .def_prop_ro("name", &Device::name)
        .def_prop_ro("uuid", [](const Device& device) { return nb::bytes(device.uuid().data(), device.uuid().size()); })
        .def_prop_ro("version", &Device::version)
        .def_prop_ro("no_kernel", &Device::no_kernel)
        .def("windows", [](const Device& d) { return std::pair(d.window_total.load(), d.waited_ns.load()); })
        .def("attribute", &Device::attribute, "which"_a)
        .def("memory", &Device::memory, Released())
        .def("device_of", &Device::device_of, Released(), "address"_a);
    nb::class_<PinnedMemory>(m, "PinnedMemory", nb::is_final())
        .def(nb::init<int, std::uint64_t, std::uint64_t>(), Released(), "ordinal"_a, "address"_a, "nbytes"_a)
        .def("release", &PinnedMemory::release, Released());
    nb::class_<PyDeviceMemory>(m, "DeviceMemory", nb::is_final())
        .def(nb::init<int, std::uint64_t>(), Released(), "ordinal"_a, "nbytes"_a)
        .def(nb::init<int, std::uint64_t, int, bool>(), Released(), "ordinal"_a, "nbytes"_a, "fd"_a, "writable"_a)
        .def_prop_ro("address", &PyDeviceMemory::address)
        .def_prop_ro("size", &DeviceMemory::size)
        .def("export_fd", &DeviceMemory::export_fd, Released())
        .def("close", &DeviceMemory::close, Released());
    nb::class_<PyStreamEvent>(m, "StreamEvent", nb::is_final())
        .def(nb::init<int, std::uint64_t, const PyStreamEvent*>(), Released(), "ordinal"_a, "stream"_a,
             "before"_a.none());
    m.attr("AFTER") = after_variable();
    m.def("await_work", &py_await_work, "deadline_ns"_a, "cancelled"_a.noconvert() = nb::none());
    m.def("set_device_patience", [](std::int64_t ms) { Device::patience_ns().store(ms * 1'000'000); }, "ms"_a);
}

}  // namespace datadist
