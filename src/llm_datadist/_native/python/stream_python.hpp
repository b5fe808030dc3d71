// Python bindings of control channels. Only waiting releases the GIL: getting it back may take a switch interval. What
// lies between two waits is one step, for other threads and for signal handlers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "busy_wait.hpp"
#include "error.hpp"
#include "python/gil.hpp"
#include "ticket.hpp"

namespace datadist {

namespace nb = nanobind;

constexpr std::size_t most_bytes_received = 64 << 10;  // from one peer, while others wait

inline bool has_input(int fd, std::int64_t within_ns) {
    pollfd asked{fd, POLLIN, 0};
    const auto left = std::max<std::int64_t>(within_ns, 0);
    const timespec most{left / 1'000'000'000, left % 1'000'000'000};
    return ::ppoll(&asked, 1, &most, nullptr) != 0;
}

// Waits for input: polls for `poll_ns`, unless that was in vain of late, then sleeps until `most_ns` have passed. A
// signal ends it, too.
inline void wait_for_input(int fd, BusyWait& busy_wait, std::int64_t poll_ns, std::int64_t most_ns) {
    const bool polls = busy_wait.begin();
    if (!polls && most_ns == 0) return;
    bool come = false;
    {
        const GilReleased released;
        const std::int64_t begin = monotonic_ns();
        while (polls && !come && monotonic_ns() < begin + poll_ns) come = has_input(fd, 0);
        if (!come && most_ns > 0) has_input(fd, begin + most_ns - monotonic_ns());
    }
    if (polls) busy_wait.tell(come);
}

// EPOLLET alone reports only errors, and once both sides have shut down: not the peer's end of stream.
inline void listen_for_input(int epoll, int fd, bool listens) {
    epoll_event wanted{};
    wanted.events = listens ? EPOLLIN : EPOLLET;
    wanted.data.fd = fd;
    ::epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &wanted);
}

class Waiter;

// The callers of a link that wait for answers, by number.
class Requests {
public:
    std::int64_t number() noexcept { return next_++; }
    std::size_t waiting() const noexcept { return waiters_.size(); }
    bool closed() const noexcept { return closed_; }

    void begin(Waiter* waiter, std::int64_t number) { waiters_.emplace(number, waiter); }
    void end(std::int64_t number) { waiters_.erase(number); }

    // Wakes the caller of a number; false if there is none.
    bool deliver(std::int64_t number, std::string_view answer);

    // Wakes all callers without an answer; admits no more.
    void close();

    nb::list late;  // answers whose callers were cut off
    std::int64_t reported = 0;  // messages about the ends of transfers

private:
    std::int64_t next_ = 1;
    bool closed_ = false;
    std::unordered_map<std::int64_t, Waiter*> waiters_;
};

// A caller that waits for one answer, in a `with` block; it ends as a Use. `gate`, a lock, is open once there will be no other one.
class Waiter {
public:
    explicit Waiter(nb::object requests)
        : number(nb::cast<Requests&>(requests).number()), requests_(std::move(requests)) {
        gate.attr("acquire")();
    }

    ~Waiter() { end(true); }

    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

    void begin() {
        Requests& requests = nb::cast<Requests&>(requests_);
        begun_ = true;
        if (requests.closed())
            wake(nb::none());
        else
            requests.begin(this, number);
    }

    void end(bool cut) {
        if (!std::exchange(begun_, false)) return;
        Requests& requests = nb::cast<Requests&>(requests_);
        requests.end(number);
        if (cut && !taken && !answer.is_none()) requests.late.append(answer);
    }

    void wake(nb::object its_answer) {
        if (std::exchange(done, true)) return;
        answer = std::move(its_answer);
        gate.attr("release")();
    }

    const std::int64_t number;
    bool done = false;
    bool taken = false;  // the answer needs no handling if the block is cut off
    nb::object answer = nb::none();  // bytes
    nb::object gate = nb::module_::import_("_thread").attr("allocate_lock")();

private:
    nb::object requests_;
    bool begun_ = false;
};

inline bool Requests::deliver(std::int64_t number, std::string_view answer) {
    const auto found = waiters_.find(number);
    if (found == waiters_.end()) return false;
    Waiter* waiter = found->second;
    waiters_.erase(found);
    waiter->wake(nb::bytes(answer.data(), answer.size()));
    return true;
}

inline void Requests::close() {
    closed_ = true;
    for (const auto& [number, waiter] : std::exchange(waiters_, {})) waiter->wake(nb::none());
}

// Returns the number of an answer, a MessagePack array of its name, one of `answers`, and that number; 0 for others.
inline std::uint64_t number_of(std::string_view message, const std::vector<std::string>& answers) {
    const auto byte = [&](std::size_t at) -> unsigned {
        return at < message.size() ? static_cast<unsigned char>(message[at]) : 0;
    };
    std::size_t at = byte(0) == 0xdc ? 3 : 1;  // after the head of an array of 16 or 4 bits
    if (at == 1 && (byte(0) & 0xf0) != 0x90) return 0;
    if ((byte(at) & 0xe0) != 0xa0) return 0;  // names have less than 32 bytes
    const std::string_view name = message.substr(std::min(at + 1, message.size()), byte(at) & 0x1f);
    if (std::find(answers.begin(), answers.end(), name) == answers.end()) return 0;
    at += 1 + name.size();
    const unsigned kind = byte(at);
    if (kind < 0x80) return kind;
    if (kind < 0xcc || kind > 0xcf || at + (1u << (kind - 0xcc)) >= message.size()) return 0;
    std::uint64_t number = 0;
    for (std::size_t i = 0; i < 1u << (kind - 0xcc); ++i) number = number << 8 | byte(at + 1 + i);
    return number;
}

// Frames on a stream socket that the caller keeps open: four bytes of length, then a message. One thread at a time has
// the reader role, the right to take input.
class Stream {
public:
    Stream(int fd, int epoll, std::vector<std::string> answers, std::size_t limit, std::size_t most)
        : fd_(fd),
          epoll_(epoll),
          answers_(std::move(answers)),
          limit_(limit),
          most_(std::min(most, most_bytes_received)) {}

    // --- The end. The last reader closes the socket.

    bool open() const noexcept { return open_; }

    // Sends, watches and admits readers no more; false if that has been.
    bool shut() noexcept {
        kept_.clear();
        return std::exchange(open_, false);
    }

    bool released() const noexcept { return released_; }

    // The socket may be closed; true if nobody has the reader role.
    bool release() noexcept {
        released_ = true;
        return !held_;
    }

    // --- Output. What the kernel refuses is kept. A broken connection takes all: reading reports it.

    // Returns the number of bytes that are kept, all unless `now`; None once shut. `reports`, unless None, counts it
    // in the same step.
    std::optional<std::size_t> send(const nb::bytes& data, bool now, Requests* reports) {
        if (!open_) return std::nullopt;
        if (reports != nullptr) ++reports->reported;
        const std::size_t sent = now && kept_.empty() ? send_now(data.c_str(), data.size()) : 0;
        kept_.append(data.c_str() + sent, data.size() - sent);
        return kept_.size();
    }

    std::size_t flush() {
        kept_.erase(0, send_now(kept_.data(), kept_.size()));
        return kept_.size();
    }

    std::size_t unsent() const noexcept { return kept_.size(); }

    // --- The reader role. Who gives it up closes the socket if true is returned.

    bool take_role() noexcept { return open_ && !std::exchange(held_, true); }
    bool held() const noexcept { return held_; }

    bool leave_role() noexcept {
        held_ = false;
        watch(true);
        return released_;
    }

    // The control thread is woken for input.
    void watch(bool watched) noexcept {
        if (open_ && std::exchange(watched_, watched) != watched) listen_for_input(epoll_, fd_, watched);
    }

    // --- Input, for the holder of the role.

    void feed(const nb::bytes& data) { input_.append(data.c_str(), data.size()); }

    // Returns the bytes that came: none at the end of the stream. None without input in time or after a signal.
    nb::object receive(double seconds) {
        const auto got = receive_within(seconds);
        if (!got) return nb::none();
        if (*got >= 0) return nb::bytes(bytes_, static_cast<std::size_t>(*got));
        errno = broken_;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }

    // Delivers the answers that are first; true if no whole frame follows.
    bool deliver(Requests& requests) {
        while (const auto message = first()) {
            const std::uint64_t number = number_of(*message, answers_);
            if (number == 0 || !requests.deliver(static_cast<std::int64_t>(number), *message)) return false;
            pop(message->size());
        }
        return !too_long();
    }

    // Returns the first message, or None.
    nb::object take() {
        if (too_long()) refuse("peer announced a frame of ", length(), " bytes: at most ", limit_, " are allowed");
        const auto message = first();
        if (!message) return nb::none();
        const nb::bytes taken(message->data(), message->size());
        pop(message->size());
        return taken;
    }

    std::size_t rest() const noexcept { return input_.size() - begin_; }

    // For a caller. Reads answers for at most `seconds`, until `waiter` has its own; `decrypt`, unless None, makes bytes
    // of what is received. None if the role is not free; false if the control thread has to read what comes next.
    std::optional<bool> read_answers(Requests& requests, const Waiter& waiter, double seconds,
                                     const nb::object& decrypt) {
        if (!take_role()) return std::nullopt;
        const Reading reading(*this);
        const std::int64_t end = monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9);
        bool mine = deliver(requests);
        while (mine && !waiter.done) {
            const auto got = receive_within(static_cast<double>(end - monotonic_ns()) / 1e9);
            if (!got) break;
            try {
                if (*got > 0) {
                    const nb::bytes data(bytes_, static_cast<std::size_t>(*got));
                    feed(decrypt.is_none() ? data : nb::cast<nb::bytes>(decrypt(data)));
                }
                mine = *got > 0 && deliver(requests);
            } catch (...) {
                broken_ = ENOMEM;  // bytes are lost
                throw;
            }
        }
        return mine;
    }

private:
    static constexpr std::size_t frame_header_bytes = 4;

    // A caller's reader role.
    struct Reading {
        explicit Reading(Stream& of) : stream(of) { stream.watch(false); }
        ~Reading() { stream.leave_role(); }
        Reading(const Reading&) = delete;
        Reading& operator=(const Reading&) = delete;

        Stream& stream;
    };

    std::size_t send_now(const char* bytes, std::size_t size) noexcept {
        const ssize_t sent = ::send(fd_, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) return static_cast<std::size_t>(sent);
        return errno == EAGAIN || errno == EINTR ? 0 : size;
    }

    // Receives into bytes_. -1 if the connection is broken.
    std::optional<ssize_t> receive_within(double seconds) {
        if (broken_ != 0) return -1;
        ssize_t got;
        const auto nothing = [&] {
            got = ::recv(fd_, bytes_, most_, MSG_DONTWAIT);
            return got < 0 && (errno == EAGAIN || errno == EINTR);
        };
        bool empty = nothing();
        if (empty && seconds > 0) {
            const auto most = static_cast<std::int64_t>(seconds * 1e9);
            wait_for_input(fd_, busy_wait_, std::min(most, BusyWait::most_ns), most);
            empty = nothing();
        }
        if (empty) return std::nullopt;
        if (got < 0) broken_ = errno;
        return got;
    }

    std::size_t length() const noexcept {
        std::size_t length = 0;
        for (std::size_t i = 0; i < frame_header_bytes; ++i)
            length = length << 8 | static_cast<unsigned char>(input_[begin_ + i]);
        return length;
    }

    bool too_long() const noexcept { return rest() >= frame_header_bytes && length() > limit_; }

    std::optional<std::string_view> first() const noexcept {
        if (rest() < frame_header_bytes || too_long() || rest() - frame_header_bytes < length()) return std::nullopt;
        return std::string_view(input_).substr(begin_ + frame_header_bytes, length());
    }

    void pop(std::size_t size) {
        begin_ += frame_header_bytes + size;
        if (begin_ < input_.size() && begin_ < most_bytes_received) return;
        input_.erase(0, begin_);
        begin_ = 0;
    }

    inline static char bytes_[most_bytes_received];  // under the GIL

    int fd_, epoll_;
    std::vector<std::string> answers_;  // names of messages
    std::size_t limit_, most_;
    BusyWait busy_wait_;
    int broken_ = 0;  // errno
    bool open_ = true, released_ = false, held_ = true, watched_ = true;
    std::string kept_, input_;
    std::size_t begin_ = 0;  // of what is left of input_
};

// Polls a descriptor before the caller sleeps on it, for a message that often comes within microseconds.
class BriefPoll {
public:
    explicit BriefPoll(int fd) : fd_(fd) {}

    void run() { wait_for_input(fd_, busy_wait_, most_ns, 0); }

private:
    static constexpr std::int64_t most_ns = 60'000;  // measured: to the report of a pull of 64 KiB

    int fd_;
    BusyWait busy_wait_;
};

inline void bind_streams(nb::module_& m) {
    using namespace nb::literals;

    nb::class_<Requests>(m, "Requests", nb::is_final())
        .def(nb::init<>())
        .def("number", &Requests::number)
        .def("close", &Requests::close)
        .def_prop_ro("closed", &Requests::closed)
        .def_prop_ro("waiting", &Requests::waiting)
        .def_ro("late", &Requests::late)
        .def_ro("reported", &Requests::reported);
    nb::class_<Waiter>(m, "Waiter", nb::is_final())
        .def(nb::init<nb::object>(), "requests"_a)
        .def_ro("number", &Waiter::number)
        .def_ro("done", &Waiter::done)
        .def_ro("answer", &Waiter::answer)
        .def_rw("taken", &Waiter::taken)
        .def_ro("gate", &Waiter::gate)
        .def("__enter__",
             [](nb::handle self) {
                 nb::cast<Waiter&>(self).begin();
                 return nb::borrow(self);
             })
        .def(
            "__exit__", [](Waiter& waiter, nb::handle kind, nb::handle, nb::handle) { waiter.end(!kind.is_none()); },
            "kind"_a.none(), "error"_a.none(), "trace"_a.none());
    nb::class_<Stream>(m, "Stream", nb::is_final())
        .def(nb::init<int, int, std::vector<std::string>, std::size_t, std::size_t>(), "fd"_a, "epoll"_a, "answers"_a,
             "limit"_a, "most"_a = most_bytes_received)
        .def_prop_ro("open", &Stream::open)
        .def("shut", &Stream::shut)
        .def("release", &Stream::release)
        .def_prop_ro("released", &Stream::released)
        .def("send", &Stream::send, "data"_a, "now"_a = true, "reports"_a = nb::none())
        .def("flush", &Stream::flush)
        .def_prop_ro("unsent", &Stream::unsent)
        .def("take_role", &Stream::take_role)
        .def("leave_role", &Stream::leave_role)
        .def_prop_ro("held", &Stream::held)
        .def("watch", &Stream::watch, "watched"_a)
        .def("feed", &Stream::feed, "data"_a)
        .def("receive", &Stream::receive, "seconds"_a = 0.0)
        .def("deliver", &Stream::deliver, "requests"_a)
        .def("take", &Stream::take)
        .def_prop_ro("rest", &Stream::rest)
        .def("read_answers", &Stream::read_answers, "requests"_a, "waiter"_a, "seconds"_a, "decrypt"_a.none());
    nb::class_<BriefPoll>(m, "BriefPoll", nb::is_final()).def(nb::init<int>(), "fd"_a).def("run", &BriefPoll::run);
}

}  // namespace datadist
