// Python bindings of write intents.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "write_intents.hpp"

namespace datadist {

namespace nb = nanobind;

using PageAddresses = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline nb::list py_find_writers(const PageAddresses& pages, std::vector<std::uint64_t> what, bool any) {
    const WriterScan scan(std::move(what), any);
    std::vector<Writing> found;
    for (std::size_t index = 0; index < pages.shape(0); ++index) scan.look(IntentPage(pages(index)), index, found);
    nb::list out;
    for (const Writing& each : found) out.append(nb::make_tuple(each.page, each.slot, each.sequence));
    return out;
}

inline void bind_writers(nb::module_& m) {
    using namespace nb::literals;

    m.attr("WRITER_SLOTS") = writer_slots;
    m.attr("WRITER_PAGE_BYTES") = writer_page_bytes;
    m.def(
        "announce_writer",
        [](std::uint64_t page, std::uint64_t slot, std::uint64_t what) {
            return announce(IntentPage(page), slot, what);
        },
        "page"_a, "slot"_a, "what"_a);
    m.def(
        "retract_writer", [](std::uint64_t page, std::uint64_t slot) { retract(IntentPage(page), slot); }, "page"_a,
        "slot"_a);
    m.def("close_writers", [](std::uint64_t page) { close_page(IntentPage(page)); }, "page"_a);
    m.def(
        "writer_sequence", [](std::uint64_t page, std::uint64_t slot) { return sequence_of(IntentPage(page), slot); },
        "page"_a, "slot"_a);
    m.def("find_writers", &py_find_writers, "pages"_a.noconvert(), "what"_a, "any"_a);
}

}  // namespace datadist
