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

// Input of a stream socket that the caller owns. Used under the GIL.
class SocketInput {
public:
    explicit SocketInput(int fd) : fd_(fd) {}

    nb::object receive(double seconds) {
        static char bytes[most_bytes_received];
        ssize_t got;
        const auto nothing = [&] {
            got = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
            return got < 0 && (errno == EAGAIN || errno == EINTR);
        };
        bool empty = nothing();
        if (empty && seconds > 0) {
            wait(seconds);
            empty = nothing();
        }
        if (empty) return nb::none();
        if (got >= 0) return nb::bytes(bytes, static_cast<std::size_t>(got));
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }

private:
    void wait(double seconds) {
        const bool polls = busy_wait_.begin();
        const std::int64_t most = static_cast<std::int64_t>(seconds * 1e9);
        bool come = false;
        {
            const GilReleased released;
            const std::int64_t end = monotonic_ns() + most, poll_end = end - most + std::min(most, BusyWait::most_ns);
            while (polls && !come && monotonic_ns() < poll_end) come = ready(0);
            if (!come) ready(end - monotonic_ns());
        }
        if (polls) busy_wait_.tell(come);
    }

    bool ready(std::int64_t most_ns) const {
        pollfd asked{fd_, POLLIN, 0};
        const auto left = std::max<std::int64_t>(most_ns, 0);
        const timespec most{left / 1'000'000'000, left % 1'000'000'000};
        return ::ppoll(&asked, 1, &most, nullptr) != 0;
    }

    int fd_;
    BusyWait busy_wait_;
};

// Polls a descriptor before the caller sleeps on it, for a message that often comes within microseconds.
class BriefPoll {
public:
    explicit BriefPoll(int fd) : fd_(fd) {}

    void run() {
        if (!busy_wait_.begin()) return;
        bool come = false;
        {
            const GilReleased released;
            const std::int64_t end = monotonic_ns() + most_ns;
            pollfd asked{fd_, POLLIN, 0};
            while (!come && monotonic_ns() < end) come = ::poll(&asked, 1, 0) != 0;
        }
        busy_wait_.tell(come);
    }

private:
    static constexpr std::int64_t most_ns = 60'000;  // measured: to the report of a pull of 64 KiB

    int fd_;
    BusyWait busy_wait_;
};

// EPOLLET alone reports only the end of the connection, once.
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
        .def(nb::init<int>(), "fd"_a)
        .def("receive", &SocketInput::receive, "seconds"_a = 0.0);
    nb::class_<BriefPoll>(m, "BriefPoll", nb::is_final()).def(nb::init<int>(), "fd"_a).def("run", &BriefPoll::run);
    m.def("listen_for_input", &listen_for_input, "epoll"_a, "fd"_a, "listens"_a);
}

}  // namespace datadist
