// The Python face of the announcements.
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
    for (std::size_t index = 0; index < pages.shape(0); ++index) scan.look(WriterPage(pages(index)), index, found);
    nb::list out;
    for (const Writing& each : found) out.append(nb::make_tuple(each.page, each.slot, each.sequence));
    return out;
}

inline void bind_writers(nb::module_& m) {
    using namespace nb::literals;

    m.attr("WRITER_SLOTS") = writer_slots;
    m.attr("WRITER_PAGE_BYTES") = writer_page_bytes;
    m.def("announce_writer",
          [](std::uint64_t page, std::uint64_t slot, std::uint64_t what) {
              return announce(WriterPage(page), slot, what);
          },
          "page"_a, "slot"_a, "what"_a,
          "Show in a slot, which only the caller uses, that `what` is being written; False if the page is closed.\n"
          "Generations that are loaded afterwards are newer than what the owner did before it could see this.\n"
          "ParamError: no such slot, or an impossible address.");
    m.def("retract_writer", [](std::uint64_t page, std::uint64_t slot) { retract(WriterPage(page), slot); }, "page"_a,
          "slot"_a, "Show that the work is over, after everything that was written.\nParamError: as announce_writer.");
    m.def("close_writers", [](std::uint64_t page) { close_page(WriterPage(page)); }, "page"_a,
          "Refuse new announcements in the page.\nParamError: an impossible address.");
    m.def("writer_sequence", [](std::uint64_t page, std::uint64_t slot) { return sequence_of(WriterPage(page), slot); },
          "page"_a, "slot"_a, "Return the sequence a slot shows, odd while its writer works.\nParamError: as announce_writer.");
    m.def("find_writers", &py_find_writers, "pages"_a.noconvert(), "what"_a, "any"_a,
          "Return (index of the page, slot, sequence) of each writer at work on one of `what`, or on `any`.\n"
          "ParamError: an impossible address.");
}

}  // namespace datadist
