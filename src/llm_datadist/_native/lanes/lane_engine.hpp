// Engine of the data lanes: a few threads that move the bytes of many jobs over many stream sockets.
//
// Threads: any. Each lane has one lane thread; calls become its commands, which callers run while that thread sleeps.
// Our jobs end by ticket. Requests come as events, unless a cached reply serves them.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "busy_wait.hpp"
#include "copy/pool.hpp"
#include "error.hpp"
#include "lanes/lane_thread.hpp"

namespace datadist {

class LaneEngine {
public:
    static constexpr int max_threads = 64;

    static constexpr int default_drain_ms = 10'000;

    // `drain_ms`: time limit for discarding a payload, before its lane is dropped.
    explicit LaneEngine(int threads, int drain_ms = default_drain_ms) : threads_(threads) {
        if (threads < 1 || threads > max_threads)
            refuse("threads is ", threads, ": a LaneEngine has 1 to ", max_threads, " threads");
        if (drain_ms < 0) refuse("drain_ms is ", drain_ms, ": must not be negative");
        const std::int64_t max_drain_ns = std::int64_t{1'000'000} * drain_ms;
        for (int n = 0; n < threads; ++n)
            body_->threads.push_back(std::make_unique<LaneThread>(body_->events, body_->fds, max_drain_ns));
        try {
            for (int n = 0; n < threads; ++n) body_->threads[static_cast<std::size_t>(n)]->start(text("lldd-data-", n));
        } catch (...) {
            close();
            throw;
        }
    }

    ~LaneEngine() {
        close();
        if (forked()) new std::shared_ptr<Body>(std::move(body_));  // its locks and threads are the parent's
    }

    LaneEngine(const LaneEngine&) = delete;
    LaneEngine& operator=(const LaneEngine&) = delete;

    int threads() const { return threads_; }

    // Loses every lane and joins the threads; descriptors close once running calls have ended. A forked child closes
    // only its own descriptors.
    void close() {
        const bool first = !closed_.exchange(true);
        if (forked()) {
            if (first && body_) close_in_child();
            return;
        }
        const std::lock_guard<std::mutex> closing(close_mutex_);
        if (const std::shared_ptr<Body> body = this->body())
            for (auto& thread : body->threads) thread->stop();
        const std::lock_guard<std::mutex> lock(mutex_);
        body_.reset();
    }

    // Number of a later lane, for the reader of its first event.
    std::uint64_t reserve_lane() { return next_lane_.fetch_add(1, std::memory_order_relaxed); }

    std::uint64_t add_lane(int raw, const LaneKeys* keys = nullptr) {
        const std::uint64_t lane = reserve_lane();
        attach_lane(lane, raw, nullptr, keys);
        return lane;
    }

    // Takes over the socket, also if it throws or the engine is closed. Keys encrypt the lane.
    void attach_lane(std::uint64_t lane, int raw, std::shared_ptr<ReplyCache> replies = nullptr,
                     const LaneKeys* keys = nullptr) {
        Fd fd(raw);
        const auto body = usable_body();
        if (lane == 0 || lane >= next_lane_.load(std::memory_order_relaxed)) refuse("lane ", lane, " was not reserved");
        const int flags = ::fcntl(raw, F_GETFL);
        if (flags < 0 || ::fcntl(raw, F_SETFL, flags | O_NONBLOCK) < 0) refuse("fd ", raw, " is no open descriptor");
        if (!body) return;
        auto ciphers = keys != nullptr ? std::make_unique<LaneCiphers>(*keys) : nullptr;
        if (!body->fds.add(raw)) refuse("an engine has at most ", FdTable::capacity, " lanes");
        // std::function copies its command; a descriptor cannot be copied.
        std::shared_ptr<std::pair<Fd, std::unique_ptr<LaneCiphers>>> shared;  // closed after it has left the table
        bool posted = false;
        try {
            shared = std::make_shared<std::pair<Fd, std::unique_ptr<LaneCiphers>>>(std::move(fd), std::move(ciphers));
            posted = body->thread_of(lane).post([lane, shared, replies](LaneThread& thread) {
                thread.add(lane, std::move(shared->first), std::move(shared->second), replies);
            });
        } catch (...) {
            body->fds.remove(raw);
            throw;
        }
        if (!posted) body->fds.remove(raw);
    }

    // Fails everything on the lane; then no memory is touched for it. Ignores unknown lanes.
    void drop_lane(std::uint64_t lane) {
        if (const auto body = usable_body())
            body->thread_of(lane).post_and_wait(
                [lane](LaneThread& thread) { thread.drop(lane, "dropped at this end", false); });
    }

    int event_fd() const {
        const auto body = usable_body();
        if (!body) refuse("the LaneEngine is closed");
        return body->events.fd();
    }

    std::vector<Event> poll_events() {
        const auto body = usable_body();
        return body ? body->events.take() : std::vector<Event>{};
    }

    // Our jobs. Each needs one wait() that returns its end, or one give_up().

    // A job that one caller begins and ends.
    struct Started {
        std::uint64_t id;
        std::uint64_t lane;
        std::shared_ptr<Ticket> ticket;
        bool spins;  // its first wait polls
        bool on_device;
    };

    Started begin(std::uint64_t lane, Kind kind, std::string meta, Spans spans) {
        const auto body = usable_body();
        Started started = admit(lane, meta, spans);
        post(body.get(), started, kind, std::move(meta), std::move(spans));
        return started;
    }

    // Returns the job's end; nothing if it has not ended by then.
    std::optional<Outcome> wait(Started& started, std::int64_t until_ns) {
        check_usable();
        std::optional<Outcome> outcome;
        if (std::exchange(started.spins, false)) outcome = spin(started, until_ns);
        if (!outcome) outcome = started.ticket->wait_until(until_ns);
        if (!outcome) return std::nullopt;
        return after_device(started, std::move(*outcome));
    }

    // Ends the job unless it has ended, and returns its end. Its memory is no longer touched.
    Outcome give_up(const Started& started) {
        if (const auto body = usable_body())
            body->thread_of(started.lane).post_and_wait([&started](LaneThread& thread) {
                thread.with(started.lane, [&](Lane& found) { found.give_up(started.id); });
            });
        // Without a lane its ticket is finished.
        return after_device(started, started.ticket->now().value_or(Outcome{}));
    }

    // The same for callers that have several jobs, by number.

    std::uint64_t start(std::uint64_t lane, Kind kind, std::string meta, Spans spans) {
        const auto body = usable_body();
        const Started started = admit(lane, meta, spans);
        remember(started);  // before it can touch memory
        post(body.get(), started, kind, std::move(meta), std::move(spans));
        return started.id;
    }

    std::optional<Outcome> wait(std::uint64_t id, std::int64_t until_ns) {
        check_usable();
        Started started = find(id);
        auto outcome = wait(started, until_ns);
        if (outcome) forget(id);
        return outcome;
    }

    Outcome give_up(std::uint64_t id) {
        check_usable();
        Outcome outcome = give_up(find(id));
        forget(id);
        return outcome;
    }

    // Answers to the peer, dropped if the lane or the request is gone.

    void serve(std::uint64_t lane, Reply reply) { give(lane, std::move(reply), &Lane::serve); }
    void accept(std::uint64_t lane, Reply reply) { give(lane, std::move(reply), &Lane::accept); }

    void refuse_request(std::uint64_t lane, std::uint64_t id, std::uint32_t code, std::string why) {
        const auto body = usable_body();
        if (code == good) refuse("code is 0: that says success");
        if (!body) return;
        body->thread_of(lane).post([lane, id, code, why = std::move(why)](LaneThread& thread) {
            thread.with(lane, [&](Lane& found) { found.refuse(id, code, why); });
        });
    }

    // Ends all use of the tag's memory before it returns. Throws DeviceError if a device does not end its use. Guards must
    // stop later replies.
    void quiesce(std::int64_t tag) {
        if (const auto body = usable_body())  // else the threads have ended, but not what a device copies for them
            for (auto& thread : body->threads)
                thread->post_and_wait([tag](LaneThread& on) { on.with_all([tag](Lane& lane) { lane.quiesce(tag); }); });
        if (const Device* const stuck = Device::await(tag, monotonic_ns() + longest_quiesce_ns))
            throw DeviceError(DeviceError::unfinished, text(stuck->name(), ": a copy for a peer does not end"));
    }

private:
    static constexpr std::int64_t longest_quiesce_ns = 1'000'000'000;

    // Tags of memory given to the engine by reply() are positive.
    static std::int64_t tag_of(std::uint64_t job) { return -static_cast<std::int64_t>(job); }

    // The end of a job, once no copy of a device touches its memory; another one if a copy does not end.
    static Outcome after_device(const Started& started, Outcome outcome) {
        if (!started.on_device) return outcome;
        const Device* const stuck = Device::await(tag_of(started.id), monotonic_ns() + Device::patience_ns());
        if (stuck == nullptr) return outcome;
        constexpr auto why = "it does not answer: a copy that it has begun does not end";
        stuck->fail(DeviceError::unfinished, why);
        constexpr auto never = static_cast<std::uint32_t>(DeviceError::unfinished);
        return {Ending::device, never, outcome.bytes, text(stuck->name(), ": ", why)};
    }

    // Everything with a thread or a descriptor. Running calls keep it alive; a forked child never destroys it.
    struct Body {
        EventQueue events;
        FdTable fds;
        std::vector<std::unique_ptr<LaneThread>> threads;

        LaneThread& thread_of(std::uint64_t lane) { return *threads[static_cast<std::size_t>(lane % threads.size())]; }
    };

    bool forked() const { return epoch_ != fork_epoch.load(std::memory_order_relaxed); }

    // Before any lock: in a child, a thread of the parent may hold it.
    void check_usable() const {
        if (forked()) refuse("the LaneEngine belongs to the process that made it, not to its forked child");
    }

    std::shared_ptr<Body> body() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return body_;
    }

    std::shared_ptr<Body> usable_body() const {
        check_usable();
        return body();
    }

    // A lane open here stays registered in the parent's epoll, even after the parent closes it.
    void close_in_child() {
        for (auto& thread : body_->threads) thread->close_in_child();
        body_->fds.close_in_child();
        ::close(body_->events.fd());
    }

    // Serves the lane here for 250 us, or longer if another process gets the CPU, which counts as a failure: a small
    // job's answer then wakes no thread. After failures later jobs wait instead. Returns at once if the lane thread is
    // awake.
    std::optional<Outcome> spin(const Started& started, std::int64_t until_ns) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (!busy_wait_.begin()) return std::nullopt;
        }
        const auto body = usable_body();
        if (!body) return std::nullopt;
        const std::int64_t soon = std::min(until_ns, monotonic_ns() + BusyWait::most_ns);
        std::optional<Outcome> outcome;
        const auto ended = [&] { return (outcome = started.ticket->now()).has_value(); };
        if (!body->thread_of(started.lane).receive_here(started.lane, soon, ended)) return std::nullopt;
        const bool came = outcome && monotonic_ns() < soon;
        const std::lock_guard<std::mutex> lock(mutex_);
        busy_wait_.tell(came);
        return outcome;
    }

    static void fail_unknown(Ticket& ticket, std::uint64_t lane) {
        ticket.finish({Ending::lost, 0, 0, text("lane ", lane, " is not there any more")});
    }

    void give(std::uint64_t lane, Reply reply, void (Lane::*verb)(Reply)) {
        const auto body = usable_body();
        if (!body) return;
        auto shared = std::make_shared<Reply>(std::move(reply));
        body->thread_of(lane).post([lane, shared, verb](LaneThread& thread) {
            thread.with(lane, [&](Lane& found) { (found.*verb)(std::move(*shared)); });
        });
    }

    Started admit(std::uint64_t lane, const std::string& meta, const Spans& spans) {
        if (meta.size() > max_meta_bytes) refuse("meta has ", meta.size(), " bytes, at most ", max_meta_bytes);
        if (spans.total() > max_payload_bytes) refuse("a job of ", spans.total(), " bytes is too large for one lane");
        const std::uint64_t id = next_job_.fetch_add(1, std::memory_order_relaxed);
        const bool on_device = spans.place().on_device();
        return {id, lane, std::make_shared<Ticket>(), spans.total() <= spin_max_bytes, on_device};
    }

    // `body` is null once closed.
    void post(Body* body, const Started& started, Kind kind, std::string meta, Spans spans) {
        auto payload = std::make_shared<Payload>(std::move(spans), tag_of(started.id));
        auto job = std::make_shared<Job>(Job{kind, started.id, std::move(meta), std::move(payload), started.ticket});
        const std::uint64_t lane = started.lane;
        const bool posted = body != nullptr && body->thread_of(lane).post([lane, job](LaneThread& thread) {
            const bool found = thread.with(lane, [&](Lane& lane) { lane.start(std::move(*job)); });
            if (!found) fail_unknown(*job->ticket, lane);
        });
        if (!posted) fail_unknown(*started.ticket, lane);
    }

    void remember(const Started& started) {
        const std::lock_guard<std::mutex> lock(mutex_);
        tickets_.emplace(started.id, started);
    }

    // Only its first wait polls.
    Started find(std::uint64_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = tickets_.find(id);
        if (found == tickets_.end()) refuse("job ", id, " was never started, or its end was told before");
        Started started = found->second;
        found->second.spins = false;
        return started;
    }

    void forget(std::uint64_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        tickets_.erase(id);
    }

    // Measured: above this, a wake-up is a small part of the transfer.
    static constexpr std::uint64_t spin_max_bytes = 256u << 10;

    int threads_;
    unsigned epoch_ = fork_epoch.load(std::memory_order_relaxed);
    std::atomic<bool> closed_{false};
    std::atomic<std::uint64_t> next_lane_{1};
    std::atomic<std::uint64_t> next_job_{1};
    std::mutex close_mutex_;     // held by close() only
    mutable std::mutex mutex_;   // protects the rest
    BusyWait busy_wait_;
    std::shared_ptr<Body> body_ = std::make_shared<Body>();
    std::map<std::uint64_t, Started> tickets_;
};

}  // namespace datadist
