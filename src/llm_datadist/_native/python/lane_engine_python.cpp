// Python bindings of the lane engine, as large as _native.cpp and compiled beside it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lanes/lane_engine.hpp"
#include "python/gil.hpp"
#include "python/plan_python.hpp"
#include "python/stop_python.hpp"

namespace datadist {

namespace nb = nanobind;

using GuardList = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

constexpr std::int64_t look_every_ns = 50'000'000;  // longest delay of Ctrl-C or a cancellation

inline Spans spans_of(const MovePlan& plan, const TensorList& tensors, bool dst) {
    const Copy copy = plan.copy(tensors, tensors);
    return Spans(dst ? copy.dst : copy.src, plan.pairing().count, copy.runs, copy.run_count,
                 dst ? &Run::dst : &Run::src, plan.nbytes());
}

// Meta of a READ or WRITE, for the target's side: the destination when writing, else the source.
inline std::string request_meta(const nb::bytes& handle, std::uint64_t extent, const MovePlan& plan, bool write) {
    if (handle.size() > UINT16_MAX) refuse("handle has ", handle.size(), " bytes, at most ", UINT16_MAX);
    const auto first = write ? plan.pairing().dst_first : plan.pairing().src_first;
    return LaneRequest::encode({handle.c_str(), handle.size()}, first, plan.pairing().count, extent, plan.nbytes(),
                               plan.run_list(), write ? &Run::dst : &Run::src);
}

inline nb::bytes py_encode_request(const nb::bytes& handle, std::uint64_t extent, const MovePlan& plan, bool write) {
    const std::string out = request_meta(handle, extent, plan, write);
    return nb::bytes(out.data(), out.size());
}

inline nb::tuple py_decode_request(const nb::bytes& meta) {
    const LaneRequest request = LaneRequest::parse({meta.c_str(), meta.size()});
    return nb::make_tuple(nb::bytes(request.handle.data(), request.handle.size()), request.extent,
                          MovePlan(request.first, request.count, request.runs(), request.nbytes));
}

inline Kind kind_of(bool write) { return write ? Kind::write : Kind::read; }

// Its errors contain no key bytes.
inline std::optional<LaneKeys> keys_of(nb::handle keys) {
    if (keys.is_none()) return std::nullopt;
    if (!nb::isinstance<nb::tuple>(keys) || nb::len(keys) != 2)
        refuse("keys is no pair: must be None or (send_key, receive_key), each ", key_bytes, " bytes");
    std::optional<LaneKeys> out(std::in_place);
    const char* const names[] = {"send_key", "receive_key"};
    for (std::size_t i = 0; i < 2; ++i) {
        const nb::object key = keys[i];
        if (!nb::isinstance<nb::bytes>(key)) refuse("keys: ", names[i], " is not bytes");
        const nb::bytes bytes = nb::borrow<nb::bytes>(key);
        if (bytes.size() != key_bytes)
            refuse("keys: ", names[i], " has ", bytes.size(), " bytes, must have ", key_bytes);
        std::copy_n(bytes.c_str(), key_bytes, (i == 0 ? out->send : out->receive).data());
    }
    // Equal keys would give records of both directions the same key and nonce.
    if (out->send == out->receive) refuse("keys: send_key and receive_key are the same");
    return out;
}

inline void py_attach_lane(LaneEngine& engine, std::uint64_t lane, int raw, std::shared_ptr<ReplyCache> replies,
                           nb::handle keys) {
    Fd fd(raw);
    const std::optional<LaneKeys> both = keys_of(keys);
    engine.attach_lane(lane, fd.release(), std::move(replies), both ? &*both : nullptr);
}

inline std::uint64_t py_add_lane(LaneEngine& engine, int raw, nb::handle keys) {
    const std::uint64_t lane = engine.reserve_lane();
    py_attach_lane(engine, lane, raw, nullptr, keys);
    return lane;
}

inline std::uint64_t py_start(LaneEngine& engine, std::uint64_t lane, bool write, const nb::bytes& meta,
                              const MovePlan& plan, const TensorList& tensors) {
    std::string copied(meta.c_str(), meta.size());
    Spans spans = spans_of(plan, tensors, !write);
    std::optional<GilReleased> released;
    if (tensors.place().on_device()) released.emplace();
    return engine.start(lane, kind_of(write), std::move(copied), std::move(spans));
}

inline Guards guards_of(const GuardList& list) {
    Guards guards;
    for (const auto& [address, generation] : list) guards.add(address, generation);
    return guards;
}

inline void py_reply(LaneEngine& engine, std::uint64_t lane, std::uint64_t id, bool write, const MovePlan& plan,
                     const TensorList& tensors, const GuardList& guards, std::int64_t tag) {
    Reply reply{id, std::make_shared<Payload>(spans_of(plan, tensors, write), tag), guards_of(guards), tag};
    std::optional<GilReleased> released;  // a device may make the memory of its windows
    if (tensors.place().on_device()) released.emplace();
    write ? engine.accept(lane, std::move(reply)) : engine.serve(lane, std::move(reply));
}

// C++'s own pointer: one that nanobind makes takes the GIL when it goes, which a lane thread does under a mutex.
struct PyLent {
    PyLent(std::vector<std::uint64_t> blocks, std::uint64_t stride)
        : blocks(std::make_shared<const LentBlocks>(std::move(blocks), stride)) {}

    std::shared_ptr<const LentBlocks> blocks;
};

inline void py_keep(ReplyCache& replies, const nb::bytes& handle, bool write, const TensorList& tensors,
                    const GuardList& guards, std::int64_t tag, const PyLent* lent) {
    const CopySide all = tensors.side(0, "granted");
    replies.keep(write, std::string(handle.c_str(), handle.size()),
                 {{all.bases, all.bases + all.tensors},
                  all.extent,
                  guards_of(guards),
                  tag,
                  all.place,
                  lent != nullptr,
                  lent ? lent->blocks : nullptr});
}

inline nb::object text_object(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

inline nb::tuple outcome_tuple(const Outcome& outcome) {
    return nb::make_tuple(outcome.ending, outcome.code, outcome.bytes, text_object(outcome.text));
}

// `Job`: its number, or the job itself.
template <typename Job>
std::optional<Outcome> wait_without_gil(LaneEngine& engine, Job& job, std::int64_t until_ns) {
    const GilReleased released;
    return engine.wait(job, until_ns);
}

template <typename Job>
Outcome give_up_without_gil(LaneEngine& engine, Job& job) {
    const GilReleased released;
    return engine.give_up(job);
}

template <typename Job>
nb::tuple end_of(LaneEngine& engine, Job& job, const Stop& stop) {
    while (true) {
        const std::int64_t now = monotonic_ns();
        const std::int64_t until = stop.deadline_ns - now > look_every_ns ? now + look_every_ns : stop.deadline_ns;
        if (const auto outcome = wait_without_gil(engine, job, until)) return outcome_tuple(*outcome);
        if (stop.now()) return outcome_tuple(give_up_without_gil(engine, job));
        if (!check_signals()) {
            give_up_without_gil(engine, job);
            throw nb::python_error();
        }
    }
}

inline nb::tuple py_wait(LaneEngine& engine, std::uint64_t id, std::int64_t deadline_ns,
                         const std::optional<Flag>& cancelled) {
    return end_of(engine, id, stop_of(deadline_ns, cancelled));
}

// A signal handler's exception, too, ends the job first.
inline nb::tuple py_move(LaneEngine& engine, std::uint64_t lane, bool write, const nb::bytes& handle,
                         std::uint64_t extent, const MovePlan& plan, const TensorList& tensors,
                         std::int64_t deadline_ns, const std::optional<Flag>& cancelled) {
    const Stop stop = stop_of(deadline_ns, cancelled);  // refuses a wrong one before the job begins
    LaneEngine::Started job =
        engine.begin(lane, kind_of(write), request_meta(handle, extent, plan, write), spans_of(plan, tensors, !write));
    return end_of(engine, job, stop);
}

// One step under the GIL: other threads change the loads. Lanes count from 1, and a dict has its oldest first.
inline std::uint64_t least_loaded(const nb::dict& loads, bool bulk) {
    bool left_out = !bulk || loads.size() < 2;
    std::uint64_t best = 0;
    std::int64_t least = 0;
    for (const auto& [lane, load] : loads) {
        const auto bytes = nb::cast<std::int64_t>(load);
        if (std::exchange(left_out, true) && (best == 0 || bytes < least)) {
            best = nb::cast<std::uint64_t>(lane);
            least = bytes;
        }
    }
    return best;
}

// One step under the GIL: other threads change both, too. `doubts`, unless None a list of one number, is at least the lane
// afterwards.
inline void add_load(nb::dict loads, nb::handle lane, std::int64_t bytes, nb::object doubts) {
    if (loads.contains(lane)) loads[lane] = nb::int_(nb::cast<std::int64_t>(loads[lane]) + bytes);
    if (!doubts.is_none() && nb::cast<std::int64_t>(doubts[0]) < nb::cast<std::int64_t>(lane)) doubts[0] = lane;
}

// Load of one job on a lane, in a `with` block; it ends as a Use. `doubts` as above, unless the block has set `answered`.
class LaneLoad {
public:
    LaneLoad(nb::dict loads, nb::object lane, std::int64_t bytes, nb::object doubts)
        : loads_(std::move(loads)), lane_(std::move(lane)), bytes_(bytes), doubts_(std::move(doubts)) {}

    ~LaneLoad() { end(); }

    LaneLoad(const LaneLoad&) = delete;
    LaneLoad& operator=(const LaneLoad&) = delete;

    void begin() {
        add_load(loads_, lane_, bytes_, nb::none());
        begun_ = true;
    }

    void end() {
        if (std::exchange(begun_, false)) add_load(loads_, lane_, -bytes_, answered ? nb::object(nb::none()) : doubts_);
    }

    bool answered = false;

private:
    nb::dict loads_;
    nb::object lane_;
    std::int64_t bytes_;
    nb::object doubts_;
    bool begun_ = false;
};

inline nb::tuple event_tuple(const Event& event) {
    switch (event.what) {
        case Event::What::read:
            return nb::make_tuple("read", event.lane, event.id, nb::bytes(event.text.data(), event.text.size()));
        case Event::What::write:
            return nb::make_tuple("write", event.lane, event.id, nb::bytes(event.text.data(), event.text.size()),
                                  event.bytes);
        case Event::What::lost: break;
    }
    return nb::make_tuple("lost", event.lane, text_object(event.text));
}

inline nb::list py_poll_events(LaneEngine& engine) {
    nb::list out;
    for (const Event& event : engine.poll_events()) out.append(event_tuple(event));
    return out;
}

inline void py_check_plan(const MovePlan& plan, const TensorList& dst, const TensorList& src) {
    check(plan.copy(dst, src), plan.pairing().count, plan.nbytes());
}

void bind_lanes(nb::module_& m) {
    using namespace nb::literals;
    using Released = nb::call_guard<GilReleased>;

    m.attr("CHANGED") = static_cast<int>(changed);
    m.attr("ABORTED") = static_cast<int>(aborted);
    m.attr("LOST") = static_cast<int>(lost);
    m.attr("MISFIT") = static_cast<int>(misfit);
    m.attr("TORN") = static_cast<int>(torn);
    nb::enum_<Ending>(m, "Ending")
        .value("GOOD", Ending::good)
        .value("REFUSED", Ending::refused)
        .value("LOST", Ending::lost)
        .value("TIMEOUT", Ending::timeout)
        .value("TRAILER", Ending::trailer)
        .value("DEVICE", Ending::device);
    m.def("check_plan", &py_check_plan, "plan"_a, "dst"_a, "src"_a);
    m.def("encode_request", &py_encode_request, "handle"_a, "extent"_a, "plan"_a, "write"_a);
    m.def("decode_request", &py_decode_request, "meta"_a);
    m.attr("MAX_REQUEST_RUNS") = LaneRequest::max_runs;

    nb::class_<PyLent>(m, "LentBlocks", nb::is_final())
        .def(nb::init<std::vector<std::uint64_t>, std::uint64_t>(), "blocks"_a, "stride"_a)
        .def(
            "hold", [](const PyLent& self, const MovePlan& plan) { return self.blocks->hold(plan.run_list()); },
            "plan"_a);

    m.def("least_loaded", &least_loaded, "loads"_a, "bulk"_a = false);
    m.def("add_load", &add_load, "loads"_a, "lane"_a, "nbytes"_a, "doubts"_a = nb::none());
    nb::class_<LaneLoad>(m, "LaneLoad", nb::is_final())
        .def(nb::init<nb::dict, nb::object, std::int64_t, nb::object>(), "loads"_a, "lane"_a, "nbytes"_a,
             "doubts"_a.none())
        .def_rw("answered", &LaneLoad::answered)
        .def("__enter__",
             [](nb::handle self) {
                 nb::cast<LaneLoad&>(self).begin();
                 return nb::borrow(self);
             })
        .def("__exit__", [](LaneLoad& load, nb::args) { load.end(); });

    nb::class_<ReplyCache>(m, "ReplyCache", nb::is_final())
        .def(nb::init<>())
        .def("keep", &py_keep, "handle"_a, "write"_a, "tensors"_a, "guards"_a, "tag"_a, "lent"_a.none() = nb::none())
        .def_prop_ro("moved", &ReplyCache::moved)
        .def("__len__", &ReplyCache::size);

    nb::class_<LaneEngine>(m, "LaneEngine", nb::is_final())
        .def(nb::init<int, int>(), "threads"_a, "drain_ms"_a = LaneEngine::default_drain_ms)
        .def_prop_ro("threads", &LaneEngine::threads)
        .def("close", &LaneEngine::close, Released())
        .def("add_lane", &py_add_lane, "fd"_a, "keys"_a.none() = nb::none())
        .def("reserve_lane", &LaneEngine::reserve_lane)
        .def("attach_lane", &py_attach_lane, "lane"_a, "fd"_a, "replies"_a = nb::none(), "keys"_a.none() = nb::none())
        .def("drop_lane", &LaneEngine::drop_lane, Released(), "lane"_a)
        .def("event_fd", &LaneEngine::event_fd)
        .def("poll_events", &py_poll_events)
        .def("start", &py_start, "lane"_a, "write"_a, "meta"_a, "plan"_a, "tensors"_a)
        .def("move", &py_move, "lane"_a, "write"_a, "handle"_a, "extent"_a, "plan"_a, "tensors"_a, "deadline_ns"_a,
             "cancelled"_a.noconvert() = nb::none())
        .def("wait", &py_wait, "job"_a, "deadline_ns"_a, "cancelled"_a.noconvert() = nb::none())
        .def(
            "give_up",
            [](LaneEngine& engine, std::uint64_t job) { return outcome_tuple(give_up_without_gil(engine, job)); },
            "job"_a)
        .def("reply", &py_reply, "lane"_a, "id"_a, "write"_a, "plan"_a, "tensors"_a, "guards"_a, "tag"_a)
        .def("refuse", &LaneEngine::refuse_request, "lane"_a, "id"_a, "code"_a, "text"_a)
        .def("quiesce", &LaneEngine::quiesce, Released(), "tag"_a);
}

}  // namespace datadist
