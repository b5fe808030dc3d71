// Python bindings of write intents.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "guards/write_intents.hpp"
#include "python/errand.hpp"

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

// Announcement in a slot of `page`, an array, in a `with` block; it ends as a Use. `free` is the list of free slots. `full` waits for one, or raises; `closed` raises because the owner takes no announcement.
class Intent {
public:
    Intent(nb::list free, nb::object page, std::uint64_t address, std::uint64_t what, nb::object full,
           nb::object closed)
        : free_(std::move(free)),
          page_(std::move(page)),
          address_(address),
          what_(what),
          full_(std::move(full)),
          closed_(std::move(closed)) {}

    ~Intent() { end(); }

    Intent(const Intent&) = delete;
    Intent& operator=(const Intent&) = delete;

    void begin() {
        while (free_.size() == 0) full_();
        const auto last = static_cast<Py_ssize_t>(free_.size()) - 1;
        slot_ = nb::cast<std::uint64_t>(free_[last]);
        PyList_SetSlice(free_.ptr(), last, last + 1, nullptr);
        if (announce(IntentPage(address_), slot_, what_)) return;
        free_.append(std::exchange(slot_, 0));
        closed_();
    }

    // In a forked child the announcement is the parent's.
    void end() {
        const std::uint64_t slot = std::exchange(slot_, 0);
        if (slot == 0 || pid_ != own_pid) return;
        retract(IntentPage(address_), slot);
        free_.append(slot);
        page_.reset();
    }

    // Stays announced until this process ends, and the page mapped: the owner keeps the memory.
    void stay() {
        slot_ = 0;
        page_.release();
    }

private:
    nb::list free_;
    nb::object page_;  // stays mapped until the end
    std::uint64_t address_, what_;
    std::uint64_t slot_ = 0;
    nb::object full_, closed_;
    pid_t pid_ = own_pid;
};

inline void bind_writers(nb::module_& m) {
    using namespace nb::literals;

    m.attr("WRITER_SLOTS") = writer_slots;
    m.attr("WRITER_PAGE_BYTES") = writer_page_bytes;
    nb::class_<Intent>(m, "WriteIntent", nb::is_final())
        .def(nb::init<nb::list, nb::object, std::uint64_t, std::uint64_t, nb::object, nb::object>(), "free"_a, "page"_a,
             "address"_a, "what"_a, "full"_a, "closed"_a)
        .def("__enter__", &Intent::begin)
        .def("__exit__", [](Intent& intent, nb::args raised) { still_runs(raised) ? intent.stay() : intent.end(); });
    m.def("close_writers", [](std::uint64_t page) { close_page(IntentPage(page)); }, "page"_a);
    m.def(
        "writer_sequence", [](std::uint64_t page, std::uint64_t slot) { return sequence_of(IntentPage(page), slot); },
        "page"_a, "slot"_a);
    m.def("find_writers", &py_find_writers, "pages"_a.noconvert(), "what"_a, "any"_a);
}

}  // namespace datadist
