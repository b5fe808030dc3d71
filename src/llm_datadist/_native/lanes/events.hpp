// Queue of the engine's events, with a descriptor that an event loop can watch.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fd.hpp"

namespace datadist {

struct Event {
    enum class What { read, write, lost };

    What what;
    std::uint64_t lane;
    std::uint64_t id = 0;
    std::string text;         // read, write: meta; lost: reason
    std::uint64_t bytes = 0;  // write: payload bytes
};

// Bounded: each lane has a window of unanswered requests.
class EventQueue {
public:
    int fd() const { return bell_.fd(); }

    void push(Event event) {
        bool first;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            first = events_.empty();
            events_.push_back(std::move(event));
        }
        if (first) bell_.ring();
    }

    // Clears first: an event in between rings again, at worst in vain.
    std::vector<Event> take() {
        bell_.clear();
        std::lock_guard<std::mutex> lock(mutex_);
        return std::exchange(events_, {});
    }

private:
    Bell bell_;
    std::mutex mutex_;
    std::vector<Event> events_;
};

}  // namespace datadist
