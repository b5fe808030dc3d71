// Python bindings of digests.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "digest.hpp"
#include "plan_python.hpp"
#include "stop_python.hpp"
#include "surviving.hpp"

namespace datadist {

namespace nb = nanobind;

using Digests = nb::ndarray<nb::numpy, std::uint64_t, nb::shape<-1, 2>>;

constexpr std::uint64_t digest_without_gil_above = 256 << 10;  // as for copies

// Gives NumPy a vector of structs of uint64 as rows, uncopied.
template <typename Array, typename T>
Array give_rows(std::vector<T>&& vector) {
    constexpr std::size_t columns = sizeof(T) / sizeof(std::uint64_t);
    auto* owned = new std::vector<T>(std::move(vector));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array(reinterpret_cast<std::uint64_t*>(owned->data()), {owned->size(), columns}, owner);
}

inline DigestKey key_of(const nb::bytes& nonce) {
    if (nonce.size() != 16) refuse("nonce has ", nonce.size(), " bytes: must be 16");
    return DigestKey(load_word(nonce.c_str()), load_word(nonce.c_str() + 8));
}

inline std::optional<Digests> py_digest(const MovePlan& plan, const TensorList& tensors, bool dst, bool each_run,
                                        const nb::bytes& nonce, CopyPool* pool, std::int64_t deadline_ns,
                                        const std::optional<Flag>& cancelled) {
    const Pairing& pairing = plan.pairing();
    const auto [runs, run_count] = plan.run_list();
    const DigestSide side{dst ? tensors.side(pairing.dst_first, "dst") : tensors.side(pairing.src_first, "src"),
                          static_cast<std::size_t>(pairing.count), runs, run_count, dst ? &Run::dst : &Run::src};
    const std::uint64_t total = check_side(side, pairing.count);
    const DigestKey key = key_of(nonce);
    Stop stop = stop_of(deadline_ns, cancelled);
    std::vector<Digest> out;
    std::optional<Interruptible> interruptible;
    if (total > digest_without_gil_above) stop.interrupt = &interruptible.emplace();
    const bool whole = digest_side(side, total, key, each_run, pool, stop, out);
    if (interruptible) interruptible->end();
    if (!whole) return std::nullopt;
    return give_rows<Digests>(std::move(out));
}

inline nb::object py_surviving(nb::handle_t<MovePlan> given, bool alias) {
    const auto& plan = nb::cast<const MovePlan&>(given);
    if (!plan.ordered()) return nb::borrow(given);
    const auto [runs, run_count] = plan.run_list();
    return nb::cast(MovePlan(plan.pairing(), {surviving_runs(runs, run_count, alias), false}));
}

inline void bind_digest(nb::module_& m) {
    using namespace nb::literals;

    m.def("digest", &py_digest, "plan"_a, "tensors"_a, "dst"_a, "each_run"_a, "nonce"_a, "pool"_a.none(),
          "deadline_ns"_a, "cancelled"_a.noconvert() = nb::none());
    m.def("surviving", &py_surviving, "plan"_a, nb::kw_only(), "alias"_a);
}

}  // namespace datadist
