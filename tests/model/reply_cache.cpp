// Cached replies: lane threads use memory for which Python replied once. The owner advances the guard, quiesces the lanes,
// frees. Python may keep a reply at any time, also after the withdrawal of its memory.
//
// The bytes are plain variables, for which Relacy reports a data race: after the quiesce no lane thread touches them. Two
// threads run lanes in turns: the lane thread, and the control thread, which runs a command while the lane thread sleeps.

#include "model.hpp"

const char* const steps[] = {
    "the order of the owner: quiesce, then free", "the order of the owner: advance, then quiesce",
    "the comparisons before the first byte",      "the abort of jobs that have begun",
    "comparing and registering in one turn",
};

struct ReplyCache : rl::test_suite<ReplyCache, 3> {
    enum Job { none, queued, begun, ended };

    static constexpr int jobs = 2, promised = 1;  // of each of the two threads one job

    rl::mutex turn, replies;
    rl::atomic<int> generation;
    rl::var<int> cached, job[jobs], bytes;

    void before() {
        generation.store(promised, rl::memory_order_relaxed);
        cached($) = 0;
        for (auto& each : job) each($) = none;
        bytes($) = 1;
    }

    bool current() {
        // current (guards.hpp): `if (load_generation(guard.address) != guard.generation) return false;`
        rl::atomic_thread_fence(rl::memory_order_acquire);  // load_generation, as in guards.cpp
        return generation.load(rl::memory_order_acquire) == promised;
    }

    void keep() {
        // keep (reply_cache.hpp): `const std::lock_guard<std::mutex> lock(mutex_);`
        replies.lock($);
        // keep (reply_cache.hpp): `replies_.insert_or_assign({write, std::move(handle)},`
        cached($) = 1;
        replies.unlock($);
    }

    bool find() {
        // find (reply_cache.hpp): `const std::lock_guard<std::mutex> lock(mutex_);`
        replies.lock($);
        // find (reply_cache.hpp): `if (found->second->guards.current()) return found->second;`
        const bool found = cached($) != 0 && (!kept(3) || current());
        replies.unlock($);
        return found;
    }

    // A turn sends a piece of the job: the first, which begins it, or the last.
    void pump(rl::var<int>& mine) {
        if (mine($) == queued) {
            // begin (sender.hpp): `!frame.guards.current()) return refuse_instead(frame, changed);`
            const bool refused = kept(3) && kept(5) && !current();
            mine($) = refused ? ended : begun;
            if (!refused) read_bytes();
        } else if (mine($) == begun) {
            read_bytes();
            mine($) = ended;
        }
    }

    void read_bytes() {
        const int byte = bytes($);
        static_cast<void>(byte);
    }

    void take_turn(rl::var<int>& mine, bool asked) {
        // run (lane_thread.hpp): `turn.lock();`
        turn.lock($);
        // with (lane_thread.hpp): `work(lane);`
        // serve (lane.hpp): `sender_.push(std::move(frame));`
        if (asked) mine($) = queued;
        // with (lane_thread.hpp): `lane.send(budget_);`
        pump(mine);
        turn.unlock($);
    }

    void lane_thread() {
        // on_meta (lane.hpp): `if (auto reply = cached_reply(write, meta))`
        turn.lock($);
        const bool found = find();
        // on_meta (lane.hpp): `return write ? accept(std::move(*reply)) : serve(std::move(*reply));`
        if (kept(5) && found) job[0]($) = queued;
        if (kept(5)) pump(job[0]);
        turn.unlock($);
        if (!kept(5)) take_turn(job[0], found);
        take_turn(job[0], false);
    }

    void control() {
        // _answer (_transport/tcp/lanes.py): `group.replies.keep(`
        keep();
        // _answer (_transport/tcp/lanes.py): `self.engine.reply(event.lane, event.id, plan, tensors, guards, tag, write=write)`
        // run_here (lane_thread.hpp): `const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);`
        if (kept(5)) take_turn(job[1], true);
        take_turn(job[1], false);
    }

    void quiesce() {
        // quiesce (lane_engine.hpp): `on.with_all([tag](Lane& lane) { lane.quiesce(tag); });`
        turn.lock($);
        // quiesce (lane.hpp): `if (replies_) replies_->drop(tag);`
        replies.lock($);
        cached($) = 0;
        replies.unlock($);
        // quiesce (lane.hpp): `sender_.quiesce(tag);`
        for (auto& each : job)
            if (each($) == queued || (each($) == begun && kept(4))) each($) = ended;
        turn.unlock($);
    }

    void advance() {
        generation.fetch_add(1, rl::memory_order_seq_cst);  // advance_generation, as in guards.cpp
        rl::atomic_thread_fence(rl::memory_order_release);
    }

    void owner() {
        // apply (_cache/local_caches.py): `self._guards.void(guard)`
        if (kept(2)) advance();
        // apply (_cache/local_caches.py): `self.quiesce(entry.storage)`
        if (kept(1)) quiesce();
        // apply (_cache/local_caches.py): `self._quarantine.free(allocation, busy)`
        bytes($) = 2;
        if (!kept(1)) quiesce();
        if (!kept(2)) advance();
    }

    void thread(unsigned number) { number == 0 ? owner() : number == 1 ? lane_thread() : control(); }
};

int main() { return check_model<ReplyCache>("reply_cache", steps, 5); }
