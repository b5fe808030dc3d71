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

#include "copy/device_copy.hpp"
#include "copy/digest.hpp"
#include "copy/surviving.hpp"
#include "python/device_python.hpp"
#include "python/plan_python.hpp"
#include "python/stop_python.hpp"

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

// As digest_side(), of memory of a device, through its windows.
inline bool digest_on_device(const DigestSide& side, std::uint64_t total, const DigestKey& key, bool each_run,
                             const Stop& stop, std::vector<Digest>& out) {
    const Spans spans(side.tensors, static_cast<std::int64_t>(side.count), side.runs, side.run_count, side.offset,
                      static_cast<std::int64_t>(total));
    std::vector<std::uint64_t> lengths(each_run ? 0 : 1);
    for (std::size_t i = 0; i < side.run_count; ++i)
        each_run ? lengths.push_back(side.runs[i].bytes) : void(lengths[0] += side.runs[i].bytes);
    DeviceBytes bytes(Device::open(side.tensors.place.device), spans, false, true);
    for (std::size_t i = 0; i < side.count * lengths.size(); ++i) {
        const std::uint64_t length = lengths[i % lengths.size()];
        StripeSum sum(key, 0);
        for (std::uint64_t left = length; left > 0;) {
            if (stop.now()) {
                bytes.settle(stop);
                return false;
            }
            const DeviceBytes::Part front = bytes.await_front(stop);
            const std::uint64_t step = std::min(front.bytes, left);
            sum.add(front.begin, step);
            bytes.advance(step);
            left -= step;
        }
        out.push_back(finished(key, sum.take(), length));
    }
    return true;
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
    const Place& place = tensors.place();
    const auto before = work_before();
    std::optional<Device::Use> use;
    if (place.on_device()) use.emplace(Device::open(place.device));
    if (use || before || total > digest_without_gil_above) stop.interrupt = &interruptible.emplace();
    const bool begins = !before || before->await(stop);
    const bool whole = begins && (use ? digest_on_device(side, total, key, each_run, stop, out)
                                      : digest_side(side, total, key, each_run, pool, stop, out));
    use.reset();
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
