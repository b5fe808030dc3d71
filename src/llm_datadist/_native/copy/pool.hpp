// Threads that help callers with large copies.
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

// Work for several threads. Each calls run() once, which takes pieces until none are left.
class Task {
public:
    virtual void run() noexcept = 0;
    virtual bool exhausted() const noexcept = 0;  // no piece is left to take; some may be in work

protected:
    ~Task() = default;
};

// Each forked child adds 1: earlier threads do not exist there.
inline std::atomic<unsigned> fork_epoch{0};

inline void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { fork_epoch.fetch_add(1, std::memory_order_relaxed); });
}

// Keeps a sleeping copy thread off the CPU of the caller that will wake it. Else, if the other CPUs have other work,
// both may take turns on one CPU. The kernel balances groups of threads (cgroups, sessions) by weight.
class CpuAffinity {
public:
    explicit CpuAffinity(pthread_t thread) : thread_(thread) {
        if (pthread_getaffinity_np(thread_, sizeof allowed_, &allowed_) == 0) given_ = allowed_;
    }

    // A mask not set here came from outside this library; it becomes the allowed one.
    void keep_off(int cpu) noexcept {
        cpu_set_t mask;
        if (pthread_getaffinity_np(thread_, sizeof mask, &mask) != 0) return;  // more CPUs than fit in this mask
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

// In a waiting loop: lets other threads of the core run, and loads memory less often.
inline void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Polls for 50 us, about the time to wake a thread; returns the last result.
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
    static constexpr std::size_t most_placed = 4;  // two system calls each when a caller's CPU differs

    // `threads` includes the caller's: the pool starts one less.
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
        if (forked()) static_cast<void>(state_.release());  // its locks and threads are the parent's
    }

    CopyPool(const CopyPool&) = delete;
    CopyPool& operator=(const CopyPool&) = delete;

    int threads() const { return threads_; }

    bool closed() const { return closed_.load(std::memory_order_relaxed); }

    // Runs the task on this and all free copy threads; returns once none uses it. Callers never wait for each other's
    // tasks. If the pool is closed, or in a forked child, the caller works alone.
    void share(Task& task) {
        if (forked() || threads_ == 1) return task.run();
        SharedTask shared{&task};
        if (!post(shared)) return task.run();
        task.run();
        spin_until([&] { return shared.helpers.load(std::memory_order_relaxed) == 0; });
        withdraw(shared);
    }

    // Joins the threads after their current tasks. Idempotent.
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
        state_->affinities.clear();
        state_->workers.clear();
    }

private:
    struct SharedTask {
        Task* task;
        std::atomic<int> helpers{0};   // inside task->run(); changed under the mutex
        std::condition_variable idle;

        explicit SharedTask(Task* task) : task(task) {}
    };

    // On the heap: a forked child leaves it alone.
    struct State {
        std::mutex mutex;
        std::condition_variable wake;
        std::vector<SharedTask*> tasks;
        std::atomic<unsigned> news{0};  // tasks so far; changed under the mutex
        bool stopping = false;
        int avoided = -1;                   // by placed threads; under the mutex
        std::vector<CpuAffinity> affinities;  // of the first threads; under the mutex
        std::mutex join_mutex;
        std::vector<std::thread> workers;
    };

    bool forked() const { return epoch_ != fork_epoch.load(std::memory_order_relaxed); }

    // Copy threads block signals: the interpreter's threads take them.
    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int n = 0; n < threads_ - 1; ++n) {
                state_->workers.emplace_back(&CopyPool::serve, state_.get());
                const std::string name = text("lldd-copy-", n);
                pthread_setname_np(state_->workers.back().native_handle(), name.c_str());
                if (state_->affinities.size() < most_placed)
                    state_->affinities.emplace_back(state_->workers.back().native_handle());
            }
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    bool post(SharedTask& shared) {
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            if (state_->stopping) return false;
            if (state_->tasks.empty()) place();
            state_->tasks.push_back(&shared);
            state_->news.fetch_add(1, std::memory_order_relaxed);
        }
        state_->wake.notify_all();
        return true;
    }

    // Under the mutex, while no task is shared.
    void place() noexcept {
        const int cpu = sched_getcpu();
        if (cpu == state_->avoided || cpu < 0 || cpu >= CPU_SETSIZE) return;
        for (CpuAffinity& each : state_->affinities) each.keep_off(cpu);
        state_->avoided = cpu;
    }

    void withdraw(SharedTask& shared) {
        std::unique_lock<std::mutex> lock(state_->mutex);
        auto& tasks = state_->tasks;
        tasks.erase(std::find(tasks.begin(), tasks.end(), &shared));
        shared.idle.wait(lock, [&] { return shared.helpers == 0; });
    }

    // Task with work left and the fewest helpers, or null.
    static SharedTask* pick(const State& state) {
        SharedTask* best = nullptr;
        for (SharedTask* shared : state.tasks)
            if (!shared->task->exhausted() && (best == nullptr || shared->helpers < best->helpers)) best = shared;
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
        bool awaited = true;  // polled since the last work, which more may follow
        while (!state->stopping) {
            SharedTask* shared = pick(*state);
            if (shared == nullptr) {
                if (awaited)
                    state->wake.wait(lock);
                else
                    await_news(*state, lock);
                awaited = true;
                continue;
            }
            awaited = false;
            ++shared->helpers;
            lock.unlock();
            shared->task->run();
            lock.lock();
            // Notified under the lock: the caller, whose stack has the task, continues once the lock is free.
            if (--shared->helpers == 0) shared->idle.notify_all();
        }
    }

    int threads_;
    std::atomic<bool> closed_{false};
    unsigned epoch_ = fork_epoch.load(std::memory_order_relaxed);
    std::unique_ptr<State> state_ = std::make_unique<State>();
};

}  // namespace datadist
