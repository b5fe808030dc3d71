// A few threads that help callers with large copies. Knows nothing about copying.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "error.hpp"

namespace datadist {

// Work that several threads can share: each of them calls run() once, which takes pieces until none are left.
class Task {
public:
    virtual void run() noexcept = 0;
    virtual bool exhausted() const noexcept = 0;  // no piece is left to take (some may still be worked on)

protected:
    ~Task() = default;
};

// Raised by one in each forked child: threads made before are not there.
inline std::atomic<unsigned> fork_epoch{0};

inline void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { fork_epoch.fetch_add(1, std::memory_order_relaxed); });
}

// Keeps a sleeping worker off the CPU of the caller that is about to wake it. Left to itself the kernel may put both on
// one CPU, where they take turns to the end of the work, if only something else runs on the other CPUs: it balances
// load, and groups of threads (cgroups, sessions) count by their weight, not by their threads.
class Placement {
public:
    explicit Placement(pthread_t thread) : thread_(thread) {
        if (pthread_getaffinity_np(thread_, sizeof allowed_, &allowed_) == 0) given_ = allowed_;
    }

    // A mask other than the one set here was chosen outside of this library, and counts from then on.
    void keep_off(int cpu) noexcept {
        cpu_set_t mask;
        if (pthread_getaffinity_np(thread_, sizeof mask, &mask) != 0) return;  // more CPUs than a mask of this size has
        if (!CPU_EQUAL(&mask, &given_)) allowed_ = mask;
        mask = allowed_;
        CPU_CLR(cpu, &mask);
        if (CPU_COUNT(&mask) == 0) mask = allowed_;
        if (pthread_setaffinity_np(thread_, sizeof mask, &mask) == 0) given_ = mask;
    }

private:
    pthread_t thread_;
    cpu_set_t allowed_{};
    cpu_set_t given_{};
};

// Lets other threads of the core run, and memory be read less often, while one waits in a loop.
inline void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Looks again and again for a short time, about as long as it takes to wake a thread; returns what it saw last.
template <typename Condition>
bool spin_until(const Condition& condition) noexcept {
    constexpr auto patience = std::chrono::microseconds(50);
    const auto until = std::chrono::steady_clock::now() + patience;
    while (!condition()) {
        if (std::chrono::steady_clock::now() >= until) return false;
        relax();
    }
    return true;
}

class CopyPool {
public:
    static constexpr int max_threads = 1024;
    static constexpr std::size_t most_placed = 4;  // two system calls for each, whenever a caller's CPU is another one

    // `threads` copy at once in one call, the caller's own among them: the pool starts one less.
    explicit CopyPool(int threads) : threads_(threads) {
        if (threads < 1 || threads > max_threads)
            refuse("threads is ", threads, ": a CopyPool has 1 to ", max_threads, " threads");
        try {
            start();
        } catch (...) {
            close();
            throw;
        }
    }

    ~CopyPool() {
        close();
        if (forked()) static_cast<void>(state_.release());  // its locks and threads are of another process
    }

    CopyPool(const CopyPool&) = delete;
    CopyPool& operator=(const CopyPool&) = delete;

    int threads() const { return threads_; }

    bool closed() const { return closed_.load(std::memory_order_relaxed); }

    // Runs the task in this thread and in every worker that comes free; returns when none touches it any more.
    // Callers never wait for each other's tasks. Closed, or in a forked child, the caller works alone.
    void share(Task& task) {
        if (forked() || threads_ == 1) return task.run();
        Offer offer{&task};
        if (!post(offer)) return task.run();
        task.run();
        spin_until([&] { return offer.helpers.load(std::memory_order_relaxed) == 0; });
        withdraw(offer);
    }

    // Joins the workers, once; each finishes the task it has in hand.
    void close() {
        closed_.store(true, std::memory_order_relaxed);
        if (forked()) return;
        std::lock_guard<std::mutex> joining(state_->join_mutex);
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            state_->stopping = true;
        }
        state_->wake.notify_all();
        for (std::thread& worker : state_->workers) worker.join();
        state_->placements.clear();
        state_->workers.clear();
    }

private:
    struct Offer {
        Task* task;
        std::atomic<int> helpers{0};   // workers inside task->run(); changed under the mutex
        std::condition_variable idle;  // helpers became 0

        explicit Offer(Task* offered) : task(offered) {}
    };

    // On the heap, so that a forked child can leave it alone.
    struct State {
        std::mutex mutex;
        std::condition_variable wake;
        std::vector<Offer*> offers;
        std::atomic<unsigned> news{0};  // counts offers; changed under the mutex
        bool stopping = false;
        int avoided = -1;                   // the CPU that the placed workers keep off; under the mutex
        std::vector<Placement> placements;  // of the first workers; under the mutex
        std::mutex join_mutex;
        std::vector<std::thread> workers;
    };

    bool forked() const { return epoch_ != fork_epoch.load(std::memory_order_relaxed); }

    // Workers take no signals: those belong to the interpreter's threads.
    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int n = 0; n < threads_ - 1; ++n) {
                state_->workers.emplace_back(&CopyPool::serve, state_.get());
                const std::string name = text("lldd-copy-", n);
                pthread_setname_np(state_->workers.back().native_handle(), name.c_str());
                if (state_->placements.size() < most_placed)
                    state_->placements.emplace_back(state_->workers.back().native_handle());
            }
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    bool post(Offer& offer) {
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            if (state_->stopping) return false;
            if (state_->offers.empty()) place();
            state_->offers.push_back(&offer);
            state_->news.fetch_add(1, std::memory_order_relaxed);
        }
        state_->wake.notify_all();
        return true;
    }

    // Under the mutex, while all workers sleep or are about to.
    void place() noexcept {
        const int cpu = sched_getcpu();
        if (cpu == state_->avoided || cpu < 0 || cpu >= CPU_SETSIZE) return;
        for (Placement& each : state_->placements) each.keep_off(cpu);
        state_->avoided = cpu;
    }

    void withdraw(Offer& offer) {
        std::unique_lock<std::mutex> lock(state_->mutex);
        auto& offers = state_->offers;
        offers.erase(std::find(offers.begin(), offers.end(), &offer));
        offer.idle.wait(lock, [&] { return offer.helpers == 0; });
    }

    // The offer with work left and the fewest helpers, or null.
    static Offer* pick(const State& state) {
        Offer* best = nullptr;
        for (Offer* offer : state.offers)
            if (!offer->task->exhausted() && (best == nullptr || offer->helpers < best->helpers)) best = offer;
        return best;
    }

    static void await_news(const State& state, std::unique_lock<std::mutex>& lock) {
        const unsigned seen = state.news.load(std::memory_order_relaxed);
        lock.unlock();
        spin_until([&] { return state.news.load(std::memory_order_relaxed) != seen; });
        lock.lock();
    }

    static void serve(State* state) {
        std::unique_lock<std::mutex> lock(state->mutex);
        bool awaited = true;  // by looking, since the last work: the next may come at once
        while (!state->stopping) {
            Offer* offer = pick(*state);
            if (offer == nullptr) {
                if (awaited)
                    state->wake.wait(lock);
                else
                    await_news(*state, lock);
                awaited = true;
                continue;
            }
            awaited = false;
            ++offer->helpers;
            lock.unlock();
            offer->task->run();
            lock.lock();
            // Notified under the lock: the offer lives on the stack of its caller, which goes on once the lock is free.
            if (--offer->helpers == 0) offer->idle.notify_all();
        }
    }

    int threads_;
    std::atomic<bool> closed_{false};
    unsigned epoch_ = fork_epoch.load(std::memory_order_relaxed);
    std::unique_ptr<State> state_ = std::make_unique<State>();
};

}  // namespace datadist
