// Owned file descriptors, and an eventfd to wake threads.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

namespace datadist {

class Fd {
public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    ~Fd() { reset(); }

    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }

    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }

    void reset() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

private:
    int fd_ = -1;
};

// Returns a system call's result; throws std::system_error with errno if negative.
inline int checked(int result, const char* call) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), call);
    return result;
}

// True if input is ready or `fd` is closed, false for -1. A pidfd is ready once its process has ended.
inline bool readable(int fd) {
    pollfd asked{fd, POLLIN, 0};
    int ready = 0;
    do ready = ::poll(&asked, 1, 0);
    while (ready < 0 && errno == EINTR);
    return checked(ready, "poll") > 0;
}

// Readable from ring() until clear().
class Bell {
public:
    int fd() const { return fd_.get(); }

    void ring() {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);  // full: rings already
    }

    void clear() {
        std::uint64_t count;
        [[maybe_unused]] const auto got = ::read(fd_.get(), &count, sizeof count);  // empty: clear already
    }

private:
    Fd fd_{checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")};
};

}  // namespace datadist
