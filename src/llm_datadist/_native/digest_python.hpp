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
#include "stop_python.hpp"
#include "surviving.hpp"

namespace datadist {

namespace nb = nanobind;

using DigestBases = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DigestRuns = nb::ndarray<const std::uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<nb::numpy, std::uint64_t, nb::shape<-1, 2>>;
using SurvivingRuns = nb::ndarray<nb::numpy, std::uint64_t, nb::shape<-1, 3>>;

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

inline std::optional<Digests> py_digest(const DigestBases& bases, std::int64_t extent, std::int64_t first,
                                        std::int64_t count, const DigestRuns& runs, bool dst, bool each_run,
                                        const nb::bytes& nonce, CopyPool* pool, std::int64_t deadline_ns,
                                        const std::optional<Flag>& cancelled) {
    const DigestSide side{{bases.data(), bases.size(), extent, first, dst ? "dst" : "src"},
                    static_cast<std::size_t>(count),
                    reinterpret_cast<const Run*>(runs.data()),
                    runs.shape(0),
                    dst ? &Run::dst : &Run::src};
    const std::uint64_t total = check_side(side, count);
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

inline SurvivingRuns py_surviving_runs(const DigestRuns& runs, bool alias) {
    return give_rows<SurvivingRuns>(surviving_runs(reinterpret_cast<const Run*>(runs.data()), runs.shape(0), alias));
}

inline void bind_digest(nb::module_& m) {
    using namespace nb::literals;

    m.def("digest", &py_digest, "bases"_a.noconvert(), "extent"_a, "first"_a, "count"_a, "runs"_a.noconvert(), "dst"_a,
          "each_run"_a, "nonce"_a, "pool"_a.none(), "deadline_ns"_a, "cancelled"_a.noconvert() = nb::none());
    m.def("surviving_runs", &py_surviving_runs, "runs"_a.noconvert(), "alias"_a);
}

}  // namespace datadist
