// Counters that Python code would need a lock for: users of a gate, and totals of operations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace datadist {

// Atomic under the GIL. shut() returns the users inside, -1 if already shut. They leave by leave(), which returns 0 to
// the last.
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

// Bucket i counts durations in (2^(i+9), 2^(i+10)] ns; the first all up to 2^10 ns, the last the rest.
struct Durations {
    static constexpr int first_bit = 10;
    static constexpr int last_bit = 34;
    static constexpr int size = last_bit - first_bit + 2;

    static int bucket(std::int64_t nanoseconds) noexcept {
        if (nanoseconds <= std::int64_t{1} << first_bit) return 0;
        const int bits = 64 - __builtin_clzll(static_cast<unsigned long long>(nanoseconds - 1));
        return (bits < last_bit + 1 ? bits : last_bit + 1) - first_bit;
    }

    void add(std::int64_t moved, std::int64_t nanoseconds, double duration) noexcept {
        ++buckets[bucket(nanoseconds)];
        nbytes += moved;
        seconds += duration;
    }

    std::int64_t buckets[size] = {};
    std::int64_t nbytes = 0;
    double seconds = 0;
};

// Totals of one kind of operation. Used under the GIL.
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
