// Python bindings of control sockets. Only waiting releases the GIL: getting it back may take a switch interval.
#pragma once

#include <nanobind/nanobind.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include "busy_wait.hpp"
#include "gil.hpp"
#include "ticket.hpp"

namespace datadist {

namespace nb = nanobind;

constexpr std::size_t most_bytes_received = 64 << 10;  // from one peer, while others wait

// Returns the bytes the kernel takes now, or all if the connection is broken: reading reports that.
inline Py_ssize_t send_now(int fd, nb::handle data) {
    Py_buffer bytes;
    if (PyObject_GetBuffer(data.ptr(), &bytes, PyBUF_SIMPLE) != 0) throw nb::python_error();
    Py_ssize_t sent = ::send(fd, bytes.buf, static_cast<std::size_t>(bytes.len), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) sent = errno == EAGAIN || errno == EINTR ? 0 : bytes.len;
    PyBuffer_Release(&bytes);
    return sent;
}

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

// Input of a stream socket that the caller owns. Used under the GIL.
class SocketInput {
public:
    SocketInput(int fd, std::size_t most) : fd_(fd), most_(std::min(most, most_bytes_received)) {}

    nb::object receive(double seconds) {
        static char bytes[most_bytes_received];
        ssize_t got;
        const auto nothing = [&] {
            got = ::recv(fd_, bytes, most_, MSG_DONTWAIT);
            return got < 0 && (errno == EAGAIN || errno == EINTR);
        };
        bool empty = nothing();
        if (empty && seconds > 0) {
            const auto most = static_cast<std::int64_t>(seconds * 1e9);
            wait_for_input(fd_, busy_wait_, std::min(most, BusyWait::most_ns), most);
            empty = nothing();
        }
        if (empty) return nb::none();
        if (got >= 0) return nb::bytes(bytes, static_cast<std::size_t>(got));
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }

private:
    int fd_;
    std::size_t most_;
    BusyWait busy_wait_;
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

// EPOLLET alone reports only errors, and once both sides have shut down: not the peer's end of stream.
inline void listen_for_input(int epoll, int fd, bool listens) {
    epoll_event wanted{};
    wanted.events = listens ? EPOLLIN : EPOLLET;
    wanted.data.fd = fd;
    ::epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &wanted);
}

inline void bind_sockets(nb::module_& m) {
    using namespace nb::literals;

    m.def("send_now", &send_now, "fd"_a, "data"_a);
    nb::class_<SocketInput>(m, "SocketInput", nb::is_final())
        .def(nb::init<int, std::size_t>(), "fd"_a, "most"_a = most_bytes_received)
        .def("receive", &SocketInput::receive, "seconds"_a = 0.0);
    nb::class_<BriefPoll>(m, "BriefPoll", nb::is_final()).def(nb::init<int>(), "fd"_a).def("run", &BriefPoll::run);
    m.def("listen_for_input", &listen_for_input, "epoll"_a, "fd"_a, "listens"_a);
}

}  // namespace datadist
