// What Python says about when a long call ends before it is done: a deadline, and a byte that a cancellation sets.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "chunks.hpp"
#include "error.hpp"

namespace datadist {

namespace nb = nanobind;

using Flag = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline Stop stop_of(std::int64_t deadline_ns, const std::optional<Flag>& cancelled) {
    if (!cancelled) return {deadline_ns};
    if (cancelled->size() != 1) refuse("cancelled has ", cancelled->size(), " bytes: must be one");
    return {deadline_ns, cancelled->data()};
}

}  // namespace datadist
