// One thread of the lane engine: an epoll loop over lanes, and an inbox of commands.
//
// While it sleeps, callers run their commands themselves. Only the holder of the turn touches lanes.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lanes/lane.hpp"
#include "thread.hpp"

namespace datadist {

// Descriptors of an engine's lanes; a forked child closes its copies without a lock.
class FdTable {
public:
    // 1024 links of 10 lanes each (MAX_LANES in _transport/tcp/lanes.py).
    static constexpr std::size_t capacity = 10240;

    bool add(int fd) {
        for (auto& slot : slots_) {
            int empty = -1;
            if (slot.compare_exchange_strong(empty, fd)) return true;
        }
        return false;
    }

    // Before closing, so that a child never closes a reused number.
    void remove(int fd) {
        for (auto& slot : slots_) {
            int held = fd;
            if (slot.compare_exchange_strong(held, -1)) return;
        }
    }

    void close_in_child() {
        for (auto& slot : slots_) {
            const int fd = slot.exchange(-1);
            if (fd >= 0) ::close(fd);
        }
    }

    FdTable() {
        for (auto& slot : slots_) slot.store(-1, std::memory_order_relaxed);
    }

private:
    std::atomic<int> slots_[capacity];
};

class LaneThread {
public:
    using Command = std::function<void(LaneThread&)>;

    LaneThread(EventQueue& events, FdTable& fds, std::int64_t max_drain_ns)
        : events_(events), fds_(fds), max_drain_ns_(max_drain_ns), scrap_(scrap_bytes) {
        watch(EPOLL_CTL_ADD, bell_.fd(), bell_token, EPOLLIN);
    }

    void start(const std::string& name) {
        thread_ = quiet_thread(name, [this] {
            run();
            ended_.open();
        });
    }

    // Loses every lane, runs every posted command, ends the thread. Called once.
    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        bell_.ring();
        if (thread_.joinable()) thread_.join();
    }

    // Runs the command now, or soon on the lane thread; returns false once that is stopping.
    bool post(Command command) {
        if (run_here(command)) return true;
        bool first;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (stopping_) return false;
            first = inbox_.empty();
            inbox_.push_back(std::move(command));
            pending_.store(true, std::memory_order_relaxed);
        }
        if (first) bell_.ring();
        return true;
    }

    // As post(), but waits until the command has run, or the thread has ended: then no lane is left.
    void post_and_wait(Command command) {
        auto latch = std::make_shared<Latch>();
        const bool posted = post([command = std::move(command), latch](LaneThread& thread) {
            command(thread);
            latch->open();
        });
        (posted ? *latch : ended_).wait();
    }

    // Receives for a waiting caller, until `done` or about `until_ns`; the lane's input does not wake the lane thread
    // meanwhile. Returns false, at once, if that is awake, or another caller receives. Yields between two looks: the
    // peer may be on this CPU. Another process may get it instead, and all that comes on the lane waits meanwhile.
    template <typename Done>
    bool receive_here(std::uint64_t number, std::int64_t until_ns, Done&& done) {
        if (!begin_receiving_here(number)) return false;
        try {
            for (; !done() && monotonic_ns() < until_ns; std::this_thread::yield()) {
                const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
                if (turn && !receive_once(number)) break;
            }
        } catch (...) {
            end_receiving_here(number);
            throw;
        }
        end_receiving_here(number);
        return true;
    }

    void close_in_child() {
        ::close(epoll_.get());
        ::close(bell_.fd());
        buffers_.close_in_child();
    }

    // For commands, which have the turn.

    // Encrypted if `ciphers` is set.
    void add(std::uint64_t number, Fd fd, std::unique_ptr<LaneCiphers> ciphers, std::shared_ptr<ReplyCache> replies) {
        const int raw = fd.get();
        Stream stream(std::move(fd), std::move(ciphers), buffers_);
        auto lane =
            std::make_unique<Lane>(number, std::move(stream), events_, scrap(), max_drain_ns_, std::move(replies));
        lanes_.emplace(number, Entry{std::move(lane), EPOLLIN});
        if (watch(EPOLL_CTL_ADD, raw, number, EPOLLIN)) return;
        drop(number, "the kernel does not watch its descriptor", true);
    }

    // Works on a lane, then sends; false if there is none.
    template <typename Work>
    bool with(std::uint64_t number, Work&& work) {
        const auto found = lanes_.find(number);
        if (found == lanes_.end()) return false;
        Lane& lane = *found->second.lane;
        try {
            work(lane);
            lane.send(budget_);
            settle(number, found->second);
        } catch (const std::exception& error) {  // LaneError, or no memory for a peer's bytes
            drop(number, error.what(), true);
        }
        return true;
    }

    template <typename Work>
    void with_all(Work&& work) {
        std::vector<std::uint64_t> numbers;
        for (const auto& [number, entry] : lanes_) numbers.push_back(number);
        for (const std::uint64_t number : numbers) with(number, work);
    }

    void drop(std::uint64_t number, const std::string& why, bool tell) {
        const auto found = lanes_.find(number);
        if (found == lanes_.end()) return;
        Lane& lane = *found->second.lane;
        lane.lose(text("lane ", number, ": ", why));
        if (tell) events_.push({Event::What::lost, number, 0, why});
        fds_.remove(lane.fd());
        draining_.erase(number);
        in_hand_.erase(number);
        on_device_.erase(number);
        lanes_.erase(found);  // closes the descriptor, which also leaves the epoll
        if (lanes_.empty()) buffers_.clear();
    }

private:
    static constexpr std::uint64_t bell_token = 0;  // lanes are numbered from 1
    static constexpr std::size_t scrap_bytes = 256u << 10;
    static constexpr int sweep_ms = 100;
    static constexpr int most_looks = 256;  // without a pause

    struct Entry {
        std::unique_ptr<Lane> lane;
        std::uint32_t watched;
        bool received_here = false;  // input does not wake this thread
    };

    class Latch {
    public:
        void open() {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = true;
            opened_.notify_all();
        }
        void wait() {
            std::unique_lock<std::mutex> lock(mutex_);
            opened_.wait(lock, [&] { return open_; });
        }

    private:
        std::mutex mutex_;
        std::condition_variable opened_;
        bool open_ = false;
    };

    bool begin_receiving_here(std::uint64_t number) {
        const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        return turn && set_received_here(number, true);
    }

    // The lane thread does it soon if it has the turn: a caller that waited for that could wait long.
    void end_receiving_here(std::uint64_t number) {
        try {
            post([number](LaneThread& thread) { thread.set_received_here(number, false); });
        } catch (const std::bad_alloc&) {
            const std::lock_guard<std::mutex> turn(turn_);
            set_received_here(number, false);
        }
    }

    // Under the turn; false if there is no change.
    bool set_received_here(std::uint64_t number, bool here) {
        const auto found = lanes_.find(number);
        if (found == lanes_.end() || found->second.received_here == here) return false;
        found->second.received_here = here;
        settle(number, found->second);
        if (!in_hand_.empty() || !on_device_.empty()) bell_.ring();
        return true;
    }

    // Under the turn; false if the lane is gone.
    bool receive_once(std::uint64_t number) {
        const bool drained = draining_.empty();
        budget_ = slice_bytes;
        const bool found = with(number, [](Lane& lane) {
            if (lane.wants_to_read()) lane.receive();
        });
        if ((drained && !draining_.empty()) || !in_hand_.empty() || !on_device_.empty())
            bell_.ring();  // it sleeps without timeout
        return found;
    }

    // Runs the command here if the lane thread sleeps and no earlier command waits.
    bool run_here(const Command& command) {
        const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn) return false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (stopping_ || !inbox_.empty()) return false;
        }
        const bool drained = draining_.empty();
        budget_ = caller_bytes;
        command(*this);
        if ((drained && !draining_.empty()) || !in_hand_.empty() || !on_device_.empty())
            bell_.ring();  // it sleeps without timeout
        return true;
    }

    Scrap scrap() { return {scrap_.data(), scrap_.size()}; }

    bool watch(int operation, int fd, std::uint64_t token, std::uint32_t what) {
        epoll_event event{};
        event.events = what;
        event.data.u64 = token;
        return ::epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
    }

    void run() {
        epoll_event ready[64];
        std::unique_lock<std::mutex> turn(turn_);
        while (run_commands()) {
            const int patience = !in_hand_.empty()     ? 0
                                 : !on_device_.empty() ? (++looks_ < most_looks ? 0 : 1)
                                 : draining_.empty()   ? -1
                                                       : sweep_ms;
            turn.unlock();
            const int count = ::epoll_wait(epoll_.get(), ready, 64, patience);
            turn.lock();
            budget_ = slice_bytes;
            for (int i = 0; i < count; ++i) {
                if (ready[i].data.u64 == bell_token)
                    bell_.clear();
                else
                    serve(ready[i].data.u64, ready[i].events);
                if (pending_.load(std::memory_order_relaxed) && !run_commands()) return;
            }
            if (!in_hand_.empty() && !serve_in_hand()) return;
            serve_on_device();
            drop_overdue();
        }
    }

    // False if the thread must end: all lanes are lost, the inbox stays empty.
    bool run_commands() {
        bool stopping;
        std::vector<Command> commands;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            commands.swap(inbox_);
            stopping = stopping_;
            pending_.store(false, std::memory_order_relaxed);
        }
        for (const Command& command : commands) command(*this);
        if (stopping)
            while (!lanes_.empty()) drop(lanes_.begin()->first, "the engine was closed", false);
        return !stopping;
    }

    void serve(std::uint64_t number, std::uint32_t events) {
        with(number, [events](Lane& lane) {
            const bool broken = (events & (EPOLLERR | EPOLLHUP)) != 0;
            if (broken && !lane.wants_to_read()) break_lane("the connection broke");
            if ((events & EPOLLOUT) != 0) lane.on_room();
            if (broken || (events & EPOLLIN) != 0) lane.receive();  // reports errors too
        });
    }

    // Serves lanes with buffered input, which the epoll does not report. False if the thread must end.
    bool serve_in_hand() {
        const auto copy = in_hand_;
        for (const std::uint64_t number : copy) {
            with(number, [](Lane& lane) {
                if (lane.has_input()) lane.receive();
            });
            if (pending_.load(std::memory_order_relaxed) && !run_commands()) return false;
        }
        return true;
    }

    // Goes on with lanes whose devices were not ready, which the epoll does not report.
    void serve_on_device() {
        const auto copy = on_device_;
        for (const std::uint64_t number : copy) with(number, [](Lane& lane) { lane.on_device(); });
        if (on_device_ != copy) looks_ = 0;
    }

    void settle(std::uint64_t number, Entry& entry) {
        const Lane& lane = *entry.lane;
        if (lane.waits_for_device())
            on_device_.insert(number);
        else if (!on_device_.empty())
            on_device_.erase(number);
        const bool reads = lane.wants_to_read() && !entry.received_here;
        const std::uint32_t wanted = (reads ? EPOLLIN : 0u) | (lane.wants_to_write() ? EPOLLOUT : 0u);
        if (wanted != entry.watched) {
            watch(EPOLL_CTL_MOD, lane.fd(), number, wanted);
            entry.watched = wanted;
        }
        if (lane.drains_until())
            draining_.insert(number);
        else
            draining_.erase(number);
        if (lane.has_input() && !entry.received_here)
            in_hand_.insert(number);
        else if (!in_hand_.empty())
            in_hand_.erase(number);
    }

    void drop_overdue() {
        if (draining_.empty()) return;
        const std::int64_t now = monotonic_ns();
        const auto copy = draining_;
        for (const std::uint64_t number : copy) {
            const auto until = lanes_.at(number).lane->drains_until();
            if (until && now >= *until) drop(number, "a payload that nobody wants did not end in time", true);
        }
    }

    EventQueue& events_;
    FdTable& fds_;
    std::int64_t max_drain_ns_;
    std::vector<char> scrap_;
    Fd epoll_{checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")};
    Bell bell_;
    std::thread thread_;
    Latch ended_;

    std::mutex turn_;  // protects the seven below; the lane thread releases it only to sleep
    CipherBuffers buffers_;  // outlives the lanes
    std::unordered_map<std::uint64_t, Entry> lanes_;
    std::unordered_set<std::uint64_t> draining_;
    std::unordered_set<std::uint64_t> in_hand_;  // lanes with buffered input
    std::unordered_set<std::uint64_t> on_device_;  // lanes that wait for a device
    int looks_ = 0;  // at them, since one went on
    std::uint64_t budget_ = slice_bytes;  // limit of one lane's send

    std::mutex mutex_;  // protects the two below
    std::vector<Command> inbox_;
    bool stopping_ = false;
    std::atomic<bool> pending_{false};  // hint: an empty inbox costs no lock
};

}  // namespace datadist
