// Python bindings. Functions check, then work; they know no caches or peers. _native.pyi declares them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "copy/copy.hpp"
#include "copy/device_copy.hpp"
#include "copy/mapped.hpp"
#include "copy/pool.hpp"
#include "copy/process.hpp"
#include "fd.hpp"
#include "guards/canary.hpp"
#include "guards/guards.hpp"
#include "guards/unmap.hpp"
#include "python/device_python.hpp"
#include "python/digest_python.hpp"
#include "python/error_python.hpp"
#include "python/gil.hpp"
#include "python/keys_python.hpp"
#include "python/plan_python.hpp"
#include "python/public_call.hpp"
#include "python/stream_python.hpp"
#include "python/use_gate_python.hpp"
#include "python/write_intents_python.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace datadist {

void bind_lanes(nb::module_& m);  // lane_engine_python.cpp
void bind_cpp(nb::module_& m);  // cpp_bridge.cpp

namespace {

// Up to this, releasing the GIL costs more than other threads gain.
constexpr std::int64_t release_gil_above_bytes = 256 << 10;

// Moves a checked plan by move(per_pair, stop); returns the bytes moved. `guards`: compared before the first byte and
// after the last; null for none.
template <typename Move>
std::int64_t execute_plan(const MovePlan& plan, const Copy& copy, std::int64_t deadline_ns,
                          const std::optional<Flag>& cancelled, const GuardSet* guards, Move&& move) {
    const std::uint64_t per_pair = check(copy, plan.pairing().count, plan.nbytes());
    if (guards && !guards->unchanged()) return changed_before;
    Stop stop = stop_of(deadline_ns, cancelled);
    std::optional<Interruptible> interruptible;
    const auto before = work_before();
    const int device = copy.dst.place.on_device() ? copy.dst.place.device : copy.src.place.device;
    std::optional<Device::Use> use;  // a device's memory stays mapped while the work before is awaited, too
    if (device >= 0) use.emplace(Device::open(device));
    if (device >= 0 || before || plan.nbytes() > release_gil_above_bytes) stop.interrupt = &interruptible.emplace();
    const bool begins = !before || before->await(stop);
    const auto done = begins ? static_cast<std::int64_t>(move(per_pair, stop)) : 0;
    use.reset();
    if (interruptible) interruptible->end();
    return guards && done == plan.nbytes() && !guards->unchanged() ? changed_during : done;
}

std::int64_t py_execute(const MovePlan& plan, const TensorList& dst, const TensorList& src, CopyPool* pool,
                        std::int64_t deadline_ns, const std::optional<Flag>& cancelled, const GuardSet* guards) {
    const Copy copy = plan.copy(dst, src);
    const bool on_device = dst.place().on_device() || src.place().on_device();
    return execute_plan(plan, copy, deadline_ns, cancelled, guards, [&](std::uint64_t per_pair, const Stop& stop) {
        return on_device ? execute_on_device(copy, per_pair, stop) : execute(copy, per_pair, pool, stop);
    });
}

class ProcessMemory {
public:
    using Canaries = std::array<std::uint64_t, Ranges::max_proofs>;

    ProcessMemory(int pid, int pidfd, std::uint64_t cookie_address, const nb::bytes& cookie, const Canaries& canaries)
        : pid_(pid), proof_{pidfd, cookie_address, {cookie.c_str(), cookie.size()}, canaries} {
        if (cookie.size() > ProcessProof::max_cookie_bytes)
            refuse("cookie has ", cookie.size(), " bytes: must have at most ", ProcessProof::max_cookie_bytes);
    }

    std::int64_t read(const MovePlan& plan, const TensorList& local, const TensorList& remote, CopyPool* pool,
                      std::int64_t deadline_ns, const std::optional<Flag>& cancelled, const GuardSet* guards) const {
        return move(plan, plan.copy(local, remote), pool, deadline_ns, cancelled, guards, false);
    }

    std::int64_t write(const MovePlan& plan, const TensorList& local, const TensorList& remote, CopyPool* pool,
                       std::int64_t deadline_ns, const std::optional<Flag>& cancelled, const GuardSet* guards) const {
        return move(plan, plan.copy(remote, local), pool, deadline_ns, cancelled, guards, true);
    }

private:
    std::int64_t move(const MovePlan& plan, const Copy& copy, CopyPool* pool, std::int64_t deadline_ns,
                      const std::optional<Flag>& cancelled, const GuardSet* guards, bool writing) const {
        if ((writing ? copy.src : copy.dst).place.on_device()) refuse("local is memory of a device: no process has it");
        const FarSide side{pid_, writing, proof_};
        return execute_plan(plan, copy, deadline_ns, cancelled, guards, [&](std::uint64_t per_pair, const Stop& stop) {
            return execute_process(copy, per_pair, side, pool, stop);
        });
    }

    pid_t pid_;
    ProcessProof proof_;
};

nb::bytes py_peek_process(int pid, std::uint64_t address, std::int64_t nbytes) {
    const std::string bytes = peek_process(pid, address, nbytes);
    return nb::bytes(bytes.data(), bytes.size());
}

std::string py_repr(const CopyPool& pool) {
    return text("<CopyPool ", pool.threads(), " threads", pool.closed() ? ", closed>" : ">");
}

// ProcessError becomes the subclass of OSError that Python picks by the errno.
void translate_process_errors() {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ProcessError& error) {
            PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code, error.what()).ptr());
        }
    });
}

}  // namespace
}  // namespace datadist

NB_MODULE(_native, m) {
    using namespace datadist;
    nb::set_leak_warnings(false);  // a pool alive at the end is no leak
    translate_rule_errors();
    translate_process_errors();
    watch_forks();
    forget_closers_in_children();

    bind_counts(m);
    bind_plans(m);
    m.def("execute", &py_execute, "plan"_a, "dst"_a, "src"_a, "pool"_a.none(), "deadline_ns"_a,
          "cancelled"_a.noconvert() = nb::none(), "guards"_a.none() = nb::none());
    m.def("copy_rule", [] {
        return nb::make_tuple(best_streaming().bits, stream_above_bytes(), stream_cold_bytes(), prefetched_bytes);
    });
    nb::class_<ProcessMemory>(m, "ProcessMemory", nb::is_final())
        .def(nb::init<int, int, std::uint64_t, nb::bytes, ProcessMemory::Canaries>(), "pid"_a, "pidfd"_a = -1,
             "cookie_address"_a = 0, "cookie"_a = nb::bytes("", 0), "canaries"_a = ProcessMemory::Canaries{})
        .def("read", &ProcessMemory::read, "plan"_a, "local"_a, "remote"_a, "pool"_a.none(), "deadline_ns"_a,
             "cancelled"_a.noconvert() = nb::none(), "guards"_a.none() = nb::none())
        .def("write", &ProcessMemory::write, "plan"_a, "local"_a, "remote"_a, "pool"_a.none(), "deadline_ns"_a,
             "cancelled"_a.noconvert() = nb::none(), "guards"_a.none() = nb::none());
    nb::class_<Canary>(m, "Canary", nb::is_final())
        .def(nb::init<>())
        .def_prop_ro("address", &Canary::address)
        .def("close", &Canary::close);
    nb::class_<GuardSet>(m, "GuardSet", nb::is_final())
        .def(nb::init<const std::vector<std::pair<std::uint64_t, std::uint64_t>>&, std::uint64_t, std::uint64_t,
                      std::uint64_t>(),
             "promised"_a, "slot_bytes"_a, "base"_a, "nbytes"_a)
        .def("unchanged", &GuardSet::unchanged);
    m.attr("CHANGED_BEFORE") = changed_before;
    m.attr("CHANGED_DURING") = changed_during;
    m.def("load_generation", &load_generation, "address"_a);
    m.def("advance_generation", &advance_generation, "address"_a);

    m.def("unmap_elsewhere", &unmap_elsewhere, "address"_a, "nbytes"_a, "piece"_a);
    m.def("close_elsewhere", &close_elsewhere, "fds"_a, nb::call_guard<GilReleased>());
    m.def("closing", [] { return closing.load(); });
    m.def("readable", &readable, "fd"_a);
    m.def("check_mapped", &check_mapped, "name"_a, "addresses"_a, "nbytes"_a, nb::call_guard<GilReleased>());
    m.def("peek_process", &py_peek_process, "pid"_a, "address"_a, "nbytes"_a);

    nb::class_<CopyPool>(m, "CopyPool", nb::is_final())
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("threads", &CopyPool::threads)
        .def_prop_ro("closed", &CopyPool::closed)
        .def("close", &CopyPool::close, nb::call_guard<GilReleased>())
        .def("__repr__", &py_repr);

    bind_keys(m);
    bind_lanes(m);
    bind_cpp(m);
    bind_writers(m);
    bind_digest(m);
    bind_devices(m);
    bind_calls(m);
    bind_streams(m);
}
