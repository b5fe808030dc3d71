// What the engine tells the thread that owns the lanes: a queue with a bell that an event loop can watch.
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
    std::string text;         // read, write: meta; lost: the reason
    std::uint64_t bytes = 0;  // write: of the payload
};

// Bounded by its producers: a lane has a window of unanswered requests.
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

    // Cleared before it is taken: an event that comes in between rings again, and is at worst rung for in vain.
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
