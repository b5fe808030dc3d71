// A gate that counts its users, and totals of operations: counts that Python code would need a lock for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace datadist {

// Called with the GIL, which makes each call atomic. shut() also returns how many users are still inside. These leave by
// leave(), which returns 0 to the last one.
class UseGate {
public:
    explicit UseGate(bool is_open) noexcept : open_(is_open) {}

    bool try_enter() noexcept {
        inside_ += open_;
        return open_;
    }

    bool try_leave() noexcept {
        inside_ -= open_;
        return open_;
    }

    void enter() noexcept { ++inside_; }
    std::int64_t leave() noexcept { return --inside_; }

    void open() noexcept { open_ = true; }
    std::int64_t shut() noexcept {
        const std::int64_t inside = open_ ? inside_ : -1;
        open_ = false;
        return inside;
    }

    bool is_open() const noexcept { return open_; }
    std::int64_t inside() const noexcept { return inside_; }

private:
    bool open_;
    std::int64_t inside_ = 0;
};

// What one kind of operation came to so far. Called with the interpreter lock.
class Meter {
public:
    void add(std::int64_t nbytes, double seconds, bool failed) noexcept {
        ++count_;
        errors_ += failed;
        nbytes_ += nbytes;
        seconds_ += seconds;
    }

    std::int64_t count() const noexcept { return count_; }
    std::int64_t errors() const noexcept { return errors_; }
    std::int64_t nbytes() const noexcept { return nbytes_; }
    double seconds() const noexcept { return seconds_; }

private:
    std::int64_t count_ = 0;
    std::int64_t errors_ = 0;
    std::int64_t nbytes_ = 0;
    double seconds_ = 0;
};

}  // namespace datadist
