// The Python face of the native part. Each function checks, works, and knows nothing of caches or peers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "digest_python.hpp"
#include "guard.hpp"
#include "lanes_python.hpp"
#include "limits_python.hpp"
#include "parse.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "process.hpp"
#include "writers_python.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace datadist {
namespace {

// Below this letting other Python threads run costs more than it gives them.
constexpr std::int64_t release_gil_above_bytes = 256 << 10;
constexpr std::size_t release_gil_above_blocks = 16 << 10;  // about as long as it takes to copy so many bytes

using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Runs = nb::ndarray<const std::uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Flag = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OwnedIndices = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;
using OwnedRuns = nb::ndarray<nb::numpy, const std::uint64_t, nb::shape<-1, 3>>;
using PlannedRuns = std::pair<OwnedRuns, bool>;

// Hands a vector to NumPy without copying it.
template <typename Array, typename T, typename... Columns>
Array give(std::vector<T>&& vector, Columns... columns) {
    auto* owned = new std::vector<T>(std::move(vector));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    using Item = typename Array::Scalar;
    return Array(reinterpret_cast<Item*>(owned->data()), {owned->size(), columns...}, owner);
}

OwnedRuns give_runs(std::vector<Run>&& runs) {
    runs.shrink_to_fit();  // plans are kept in caches
    return give<OwnedRuns>(std::move(runs), std::size_t{3});
}

OwnedIndices py_parse_indices(const char* name, nb::handle values) {
    const bool sequence = PyList_Check(values.ptr()) || PyTuple_Check(values.ptr());
    if (!sequence) throw nb::type_error("values must be a list or a tuple");
    try {
        return give<OwnedIndices>(parse_indices(values.ptr(), name));
    } catch (const PythonError&) {
        throw nb::python_error();
    }
}

// None where the pairs are not as plain as that.
std::optional<std::pair<OwnedIndices, OwnedIndices>> py_parse_pairs(const nb::dict& pairs, bool lists) {
    Pairs parsed;
    if (!parse_pairs(pairs.ptr(), lists, parsed)) return std::nullopt;
    return std::pair{give<OwnedIndices>(std::move(parsed.keys)), give<OwnedIndices>(std::move(parsed.values))};
}

Blocks blocks_of(const Indices& indices, std::int64_t count, const char* name) {
    return {indices.data(), indices.size(), count, name};
}

PlannedRuns give_plan(RunList&& plan) { return {give_runs(std::move(plan.runs)), plan.ordered}; }

PlannedRuns py_plan_blocks(const Indices& dst, const Indices& src, std::int64_t block_bytes, std::int64_t dst_count,
                           std::int64_t src_count, bool alias, const char* dst_name, const char* src_name) {
    const Blocks to = blocks_of(dst, dst_count, dst_name);
    const Blocks from = blocks_of(src, src_count, src_name);
    std::optional<nb::gil_scoped_release> released;
    if (dst.size() > release_gil_above_blocks) released.emplace();
    RunList plan = plan_blocks(to, from, block_bytes, alias);
    released.reset();
    return give_plan(std::move(plan));
}

PlannedRuns py_plan_pieces(const Indices& dst, std::int64_t block_bytes, std::int64_t dst_count,
                           std::int64_t src_offset, std::int64_t src_bytes, const char* dst_name) {
    const Blocks to = blocks_of(dst, dst_count, dst_name);
    std::optional<nb::gil_scoped_release> released;
    if (dst.size() > release_gil_above_blocks) released.emplace();
    RunList plan = plan_pieces(to, {src_offset, src_bytes}, block_bytes);
    released.reset();
    return give_plan(std::move(plan));
}

OwnedRuns py_plan_row(std::int64_t dst_offset, std::int64_t src_offset, std::int64_t length) {
    return give_runs(plan_row(dst_offset, src_offset, length).runs);
}

End end_of(const Addresses& bases, std::int64_t extent, std::int64_t first, const char* name) {
    return {bases.data(), bases.size(), extent, first, name};
}

const std::uint8_t* flag_of(const std::optional<Flag>& flag) {
    if (!flag) return nullptr;
    if (flag->size() != 1) refuse("cancelled has ", flag->size(), " bytes: must be one");
    return flag->data();
}

// Not checked yet.
Copy copy_of(const End& dst, const End& src, std::int64_t count, const Runs& runs, bool ordered) {
    const auto* first = reinterpret_cast<const Run*>(runs.data());
    return {dst, src, static_cast<std::size_t>(count), first, runs.shape(0), ordered};
}

// Without a pid both ends have addresses in this process.
std::uint64_t py_execute(const Addresses& dst_bases, std::int64_t dst_extent, std::int64_t dst_first,
                         const Addresses& src_bases, std::int64_t src_extent, std::int64_t src_first,
                         std::int64_t count, const Runs& runs, bool ordered, std::int64_t nbytes, CopyPool* pool,
                         std::int64_t deadline_ns, const std::optional<Flag>& cancelled, std::optional<int> pid,
                         bool write) {
    const Copy copy = copy_of(end_of(dst_bases, dst_extent, dst_first, "dst"),
                              end_of(src_bases, src_extent, src_first, "src"), count, runs, ordered);
    const Stop stop{deadline_ns, flag_of(cancelled)};
    std::optional<nb::gil_scoped_release> released;
    if (nbytes > release_gil_above_bytes) released.emplace();
    const std::uint64_t per_pair = check(copy, count, nbytes);
    return pid ? execute_process(copy, per_pair, {*pid, write}, pool, stop) : execute(copy, per_pair, pool, stop);
}

nb::bytes py_peek_process(int pid, std::uint64_t address, std::int64_t nbytes) {
    const std::string bytes = peek_process(pid, address, nbytes);
    return nb::bytes(bytes.data(), bytes.size());
}

std::string py_repr(const CopyPool& pool) {
    return text("<CopyPool ", pool.threads(), " threads", pool.closed() ? ", closed>" : ">");
}

void raise_rule_errors_as_param_errors() {
    const nb::object found = nb::module_::import_("llm_datadist.errors").attr("ParamError");
    static PyObject* param_error = found.inc_ref().ptr();  // kept for ever: errors may come until the interpreter ends
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const RuleError& error) {
            PyErr_SetString(param_error, error.what());
        }
    });
}

// Python picks the subclass of OSError by the errno.
void raise_process_errors_as_os_errors() {
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
    nb::set_leak_warnings(false);  // a pool that lives until the interpreter ends is no leak
    raise_rule_errors_as_param_errors();
    raise_process_errors_as_os_errors();
    watch_forks();

    m.def("parse_indices", &py_parse_indices, "name"_a, "values"_a);
    m.def("parse_pairs", &py_parse_pairs, "pairs"_a, "lists"_a,
          "Return the (keys, values) of a dict of int to int, or of int to list of int when `lists`, pair by pair in\n"
          "the order given; None when there is anything else in it, a negative int or one beyond int64 too.");
    m.def("plan_blocks", &py_plan_blocks, "dst"_a.noconvert(), "src"_a.noconvert(), "block_bytes"_a, "dst_count"_a,
          "src_count"_a, "alias"_a, "dst_name"_a, "src_name"_a);
    m.def("plan_pieces", &py_plan_pieces, "dst"_a.noconvert(), "block_bytes"_a, "dst_count"_a, "src_offset"_a,
          "src_bytes"_a, "dst_name"_a);
    m.def("plan_row", &py_plan_row, "dst_offset"_a, "src_offset"_a, "length"_a,
          "Return one run of `length` bytes, shape (1, 3). ParamError: a negative value.");
    m.def("execute", &py_execute, "dst_bases"_a.noconvert(), "dst_extent"_a, "dst_first"_a, "src_bases"_a.noconvert(),
          "src_extent"_a, "src_first"_a, "count"_a, "runs"_a.noconvert(), "ordered"_a, "nbytes"_a, "pool"_a.none(),
          "deadline_ns"_a, "cancelled"_a.noconvert() = nb::none(), "pid"_a = nb::none(), "write"_a = false);
    m.def("load_generation", &load_generation, "address"_a,
          "Return the uint64 at `address`, after every load made before: bytes copied until now are judged by it.\n"
          "ParamError: a null or misaligned address.");
    m.def("advance_generation", &advance_generation, "address"_a,
          "Add one to the uint64 at `address`, sequentially consistent among all processes, and return the new value.\n"
          "ParamError: a null or misaligned address.");

    m.def("peek_process", &py_peek_process, "pid"_a, "address"_a, "nbytes"_a,
          "Return `nbytes` (at most 1 MiB) bytes at `address` of process `pid`: a probe, not a transfer.\n"
          "OSError: the kernel refused; errno says why. ParamError: too many bytes.");

    nb::class_<CopyPool>(m, "CopyPool", nb::is_final(),
                         "Threads that help with large copies. `threads` (1 to 1024) copy at once in one call, the\n"
                         "caller's own among them. Several callers may use one pool at a time. A closed pool, or one\n"
                         "in a forked child, leaves the caller to copy alone.")
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("threads", &CopyPool::threads, "Threads that copy at once in one call, the caller's included.")
        .def_prop_ro("closed", &CopyPool::closed, "True once close() was called.")
        .def("close", &CopyPool::close, nb::call_guard<nb::gil_scoped_release>(), "Join the threads. Idempotent.")
        .def("__repr__", &py_repr);

    bind_lanes(m);
    bind_writers(m);
    bind_digest(m);
    bind_limits(m);
}
