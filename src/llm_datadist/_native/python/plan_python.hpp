// Block numbers, tensors and plans as Python objects. NumPy arrays instead would cost more than copying a block.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "copy/plan.hpp"
#include "copy/sides.hpp"
#include "python/gil.hpp"
#include "python/parse.hpp"

namespace datadist {

namespace nb = nanobind;
using namespace nb::literals;

constexpr std::size_t release_gil_above_blocks = 16 << 10;  // as long as copying about 256 KiB

using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Runs = nb::ndarray<const std::uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

// Shows NumPy a vector, read-only, uncopied; the array keeps it alive.
template <typename Array, typename T, typename... Columns>
nb::object show(const std::shared_ptr<const std::vector<T>>& vector, Columns... columns) {
    auto* kept = new std::shared_ptr<const std::vector<T>>(vector);
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<const std::vector<T>>*>(p); });
    using Item = typename Array::Scalar;
    return nb::cast(Array(reinterpret_cast<Item*>(vector->data()), {vector->size(), columns...}, owner));
}

// A caller's block numbers, parsed once.
class BlockList {
public:
    using Numbers = std::vector<std::int64_t>;
    using Shown = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>>;

    explicit BlockList(Numbers&& numbers) : numbers_(std::make_shared<const Numbers>(std::move(numbers))) {
        for (const std::int64_t number : *numbers_) largest_ = std::max(largest_, number);
    }

    explicit BlockList(const Indices& array) : BlockList(Numbers(array.data(), array.data() + array.size())) {}

    std::size_t size() const { return numbers_->size(); }
    std::int64_t largest() const { return largest_; }
    nb::object array() const { return show<Shown>(numbers_); }

    Blocks of(std::int64_t count, const char* name) const { return {numbers_->data(), size(), count, name}; }

private:
    std::shared_ptr<const Numbers> numbers_;
    std::int64_t largest_ = -1;
};

// Tensors of one side. Addresses are copied, so a check stays valid.
class TensorList {
public:
    TensorList(const Addresses& bases, std::int64_t extent, const Place& place)
        : bases_(bases.data(), bases.data() + bases.size()), extent_(extent), place_(place) {}

    const Place& place() const { return place_; }
    CopySide side(std::int64_t first, const char* name) const {
        return {bases_.data(), bases_.size(), extent_, first, name, place_};
    }

    bool same_bases(const TensorList& other) const { return bases_ == other.bases_; }

private:
    std::vector<std::uint64_t> bases_;
    std::int64_t extent_;
    Place place_;
};

struct Pairing {
    std::int64_t dst_first;
    std::int64_t src_first;
    std::int64_t count;
};

using PairingTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // Pairing in Python

inline Pairing pairing_of(const PairingTuple& tensors) {
    return {std::get<0>(tensors), std::get<1>(tensors), std::get<2>(tensors)};
}

// Runs are native, or an unchanged Python array.
class MovePlan {
public:
    using Shown = nb::ndarray<nb::numpy, const std::uint64_t, nb::shape<-1, 3>>;

    MovePlan(Pairing pairing, RunList&& planned)
        : pairing_(pairing), ordered_(planned.ordered), nbytes_(bytes_of(planned.runs, pairing.count)) {
        planned.runs.shrink_to_fit();  // caches keep plans
        planned_ = std::make_shared<const std::vector<Run>>(std::move(planned.runs));
        first_ = planned_->data();
        run_count_ = planned_->size();
    }

    MovePlan(std::int64_t dst_first, std::int64_t src_first, std::int64_t count, const Runs& runs, bool ordered,
             std::int64_t nbytes)
        : pairing_{dst_first, src_first, count},
          ordered_(ordered),
          nbytes_(nbytes),
          array_(nb::cast(runs)),
          first_(reinterpret_cast<const Run*>(runs.data())),
          run_count_(runs.shape(0)) {}

    // For a peer's request: same offsets at both sides, unchecked.
    MovePlan(std::int64_t first, std::int64_t count, std::vector<Run>&& runs, std::int64_t nbytes)
        : pairing_{first, first, count},
          ordered_(false),
          nbytes_(nbytes),
          planned_(std::make_shared<const std::vector<Run>>(std::move(runs))),
          first_(planned_->data()),
          run_count_(planned_->size()) {}

    const Pairing& pairing() const { return pairing_; }
    bool ordered() const { return ordered_; }
    std::int64_t nbytes() const { return nbytes_; }

    nb::object runs() {
        if (!array_.is_valid()) array_ = show<Shown>(planned_, std::size_t{3});
        return array_;
    }

    // Unchecked.
    std::pair<const Run*, std::size_t> run_list() const { return {first_, run_count_}; }
    Copy copy(const TensorList& dst, const TensorList& src) const {
        return {dst.side(pairing_.dst_first, "dst"),
                src.side(pairing_.src_first, "src"),
                static_cast<std::size_t>(pairing_.count),
                first_,
                run_count_,
                ordered_};
    }

private:
    // Runs of the planner fit in 63 bits; their sum over many tensors may not.
    static std::int64_t bytes_of(const std::vector<Run>& runs, std::int64_t count) {
        std::int64_t total = 0;
        bool overflow = false;
        for (const Run& run : runs)
            overflow |= __builtin_add_overflow(total, static_cast<std::int64_t>(run.bytes), &total);
        overflow |= __builtin_mul_overflow(total, count, &total);
        if (overflow) refuse("the plan has more than 2**63 - 1 bytes");
        return total;
    }

    Pairing pairing_;
    bool ordered_;
    std::int64_t nbytes_;
    nb::object array_;
    std::shared_ptr<const std::vector<Run>> planned_;
    const Run* first_;
    std::size_t run_count_;
};

// Python parses ranges, tensors and arrays other than int64 ones without negative values, and finds the None in a list.
inline nb::object parse_in_python(const char* name, nb::handle values) {
    return nb::module_::import_("llm_datadist._native").attr("parse_other_blocks")(name, values);
}

inline nb::object py_parse_blocks(const char* name, nb::handle values) {
    if (nb::isinstance<BlockList>(values)) return nb::borrow(values);  // of a C++ program
    if (!PyList_Check(values.ptr()) && !PyTuple_Check(values.ptr())) {
        Indices array;
        if (!nb::try_cast(values, array, false)) return parse_in_python(name, values);
        if (std::any_of(array.data(), array.data() + array.size(), [](std::int64_t each) { return each < 0; }))
            return parse_in_python(name, values);
        return nb::cast(BlockList(array));
    }
    try {
        return nb::cast(BlockList(parse_indices(values.ptr(), name)));
    } catch (const PythonError&) {
        nb::python_error error;
        if (error.matches(PyExc_TypeError)) parse_in_python(name, values);
        throw error;
    }
}

// None if parse_pairs() refuses.
inline std::optional<std::pair<nb::object, nb::object>> py_parse_pairs(const nb::dict& pairs, bool lists) {
    Pairs parsed;
    if (!parse_pairs(pairs.ptr(), lists, parsed)) return std::nullopt;
    return std::pair{BlockList(std::move(parsed.keys)).array(), BlockList(std::move(parsed.values)).array()};
}

// Values that all plans between two compared caches share.
class BlockPlanner {
public:
    BlockPlanner(std::int64_t block_bytes, std::int64_t dst_count, std::int64_t src_count, bool alias,
                 const PairingTuple& tensors)
        : block_bytes_(block_bytes),
          dst_count_(dst_count),
          src_count_(src_count),
          alias_(alias),
          pairing_(pairing_of(tensors)) {}

    MovePlan plan(const BlockList& dst, const BlockList& src, const char* dst_name, const char* src_name) const {
        std::optional<GilReleased> released;
        if (dst.size() > release_gil_above_blocks) released.emplace();
        RunList planned = plan_blocks(dst.of(dst_count_, dst_name), src.of(src_count_, src_name), block_bytes_, alias_);
        released.reset();
        return MovePlan(pairing_, std::move(planned));
    }

private:
    std::int64_t block_bytes_;
    std::int64_t dst_count_;
    std::int64_t src_count_;
    bool alias_;
    Pairing pairing_;
};

inline MovePlan py_plan_blocks(const BlockList& dst, const BlockList& src, std::int64_t block_bytes,
                               std::int64_t dst_count, std::int64_t src_count, bool alias, const PairingTuple& tensors,
                               const char* dst_name, const char* src_name) {
    return BlockPlanner(block_bytes, dst_count, src_count, alias, tensors).plan(dst, src, dst_name, src_name);
}

inline MovePlan py_plan_pieces(const BlockList& dst, std::int64_t block_bytes, std::int64_t dst_count,
                               std::int64_t src_offset, std::int64_t src_bytes, const PairingTuple& tensors,
                               const char* dst_name) {
    std::optional<GilReleased> released;
    if (dst.size() > release_gil_above_blocks) released.emplace();
    RunList planned = plan_pieces(dst.of(dst_count, dst_name), {src_offset, src_bytes}, block_bytes);
    released.reset();
    return MovePlan(pairing_of(tensors), std::move(planned));
}

inline nb::object py_plan_row(std::int64_t dst_offset, std::int64_t src_offset, std::int64_t length) {
    return MovePlan({0, 0, 1}, plan_row(dst_offset, src_offset, length)).runs();
}

inline nb::object py_replace(MovePlan& plan, const nb::kwargs& changes) {
    const Pairing& pairing = plan.pairing();
    nb::dict fields;
    fields["dst_first"] = pairing.dst_first;
    fields["src_first"] = pairing.src_first;
    fields["count"] = pairing.count;
    fields["runs"] = plan.runs();
    fields["ordered"] = plan.ordered();
    fields["nbytes"] = plan.nbytes();
    fields.update(changes);
    return nb::type<MovePlan>()(**fields);
}

inline std::string repr_of_plan(const MovePlan& plan) {
    const Pairing& at = plan.pairing();
    return text("<Plan ", plan.nbytes(), " bytes: ", at.count, " tensors from ", at.src_first, " to ", at.dst_first,
                plan.ordered() ? ", ordered>" : ">");
}

// A slot: len() by a method takes three times as long. A small pull needs five.
inline Py_ssize_t length_of_blocks(PyObject* blocks) noexcept {
    return static_cast<Py_ssize_t>(nb::inst_ptr<BlockList>(blocks)->size());
}

inline void bind_plans(nb::module_& m) {
    static PyType_Slot slots[] = {{Py_sq_length, reinterpret_cast<void*>(&length_of_blocks)}, {0, nullptr}};
    nb::class_<BlockList>(m, "BlockList", nb::is_final(), nb::type_slots(slots))
        .def(nb::init<const Indices&>(), "array"_a)
        .def_prop_ro("largest", &BlockList::largest)
        .def_prop_ro("array", &BlockList::array);
    nb::implicitly_convertible<Indices, BlockList>();

    nb::enum_<DeviceMover>(m, "DeviceMover")
        .value("AUTO", DeviceMover::automatic)
        .value("KERNEL", DeviceMover::kernel)
        .value("COPY", DeviceMover::copy);
    nb::class_<Place>(m, "Place", nb::is_final())
        .def(
            "__init__",
            [](Place* self, int device, bool mapped, bool pinned, DeviceMover mover) {
                new (self) Place{device, mapped, pinned, mover};
            },
            nb::kw_only(), "device"_a = -1, "mapped"_a = false, "pinned"_a = false, "mover"_a = DeviceMover::automatic)
        .def_ro("device", &Place::device)
        .def_ro("mapped", &Place::mapped)
        .def_ro("pinned", &Place::pinned);

    nb::class_<TensorList>(m, "TensorList", nb::is_final())
        .def(nb::init<const Addresses&, std::int64_t, const Place&>(), "bases"_a, "extent"_a, "place"_a)
        .def("same_bases", &TensorList::same_bases, "other"_a);

    nb::class_<MovePlan>(m, "Plan", nb::is_final())
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, const Runs&, bool, std::int64_t>(), "dst_first"_a,
             "src_first"_a, "count"_a, "runs"_a.noconvert(), "ordered"_a, "nbytes"_a)
        .def_prop_ro("dst_first", [](const MovePlan& plan) { return plan.pairing().dst_first; })
        .def_prop_ro("src_first", [](const MovePlan& plan) { return plan.pairing().src_first; })
        .def_prop_ro("count", [](const MovePlan& plan) { return plan.pairing().count; })
        .def_prop_ro("runs", &MovePlan::runs)
        .def_prop_ro("ordered", &MovePlan::ordered)
        .def_prop_ro("nbytes", &MovePlan::nbytes)
        .def("replace", &py_replace, "changes"_a)
        .def("__repr__", &repr_of_plan);

    m.def("parse_blocks", &py_parse_blocks, "name"_a, "values"_a.none());
    m.def("parse_pairs", &py_parse_pairs, "pairs"_a, "lists"_a);
    const PairingTuple one{0, 0, 1};
    m.def("plan_blocks", &py_plan_blocks, "dst"_a, "src"_a, nb::kw_only(), "block_bytes"_a, "dst_count"_a,
          "src_count"_a, "alias"_a, "tensors"_a = one, "dst_name"_a = "dst_blocks", "src_name"_a = "src_blocks");
    nb::class_<BlockPlanner>(m, "BlockPlanner", nb::is_final())
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, bool, const PairingTuple&>(), nb::kw_only(),
             "block_bytes"_a, "dst_count"_a, "src_count"_a, "alias"_a, "tensors"_a = one)
        .def("plan", &BlockPlanner::plan, "dst"_a, "src"_a, "dst_name"_a = "dst_blocks", "src_name"_a = "src_blocks");
    m.def("plan_pieces", &py_plan_pieces, "dst"_a, nb::kw_only(), "block_bytes"_a, "dst_count"_a, "src_offset"_a,
          "src_bytes"_a, "tensors"_a = one, "dst_name"_a = "dst_blocks");
    m.def("plan_row", &py_plan_row, "dst_offset"_a, "src_offset"_a, "length"_a);
}

}  // namespace datadist
