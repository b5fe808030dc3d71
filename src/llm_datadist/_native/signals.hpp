// Signals with Python handlers, kept while the main thread is inside a public call.
//
// The interpreter runs handlers in the main thread between any two instructions, and they may raise. Python code cannot
// clean up then: the next instruction, also of a `finally`, may raise too. So the interpreter's C handler gets signals
// only at the call's waits, one at a time, and at its end.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace datadist {

static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "used by a signal handler");

// Static: signals belong to the process. A signal may interrupt any thread.
class KeptSignals {
public:
    using Handler = void (*)(int);

    static void hold() noexcept { held_.store(true); }

    static void let_go() noexcept {
        held_.store(false);
        while (const int signal = take()) handler_.load()(signal);
    }

    static bool any() noexcept { return kept_.load(std::memory_order_relaxed) != 0; }

    // Passes the lowest kept signal to the interpreter; false if there is none.
    static bool pass_one() noexcept {
        const int signal = take();
        if (signal != 0) handler_.load()(signal);
        return signal != 0;
    }

    // Puts this class's handler before the interpreter's. `of_interpreter` is any address in its image. Handlers of
    // other images stay.
    static void take_over(int signal, const void* of_interpreter) noexcept {
        struct sigaction action{};
        if (signal < 1 || signal > 64 || ::sigaction(signal, nullptr, &action) != 0) return;
        if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return;
        if (action.sa_handler == &keep_or_pass ||
            image_of(reinterpret_cast<const void*>(action.sa_handler)) != image_of(of_interpreter))
            return;
        handler_.store(action.sa_handler);
        action.sa_handler = &keep_or_pass;
        ::sigaction(signal, &action, nullptr);
    }

    // For a forked child: kept signals are the parent's.
    static void forget() noexcept { kept_.store(0); }

private:
    static void keep_or_pass(int signal) {
        if (!held_.load()) return handler_.load()(signal);
        const int before = errno;
        kept_.fetch_or(bit(signal));
        // The call may have ended in between without finding this signal.
        if (!held_.load())
            while (const int late = take()) handler_.load()(late);
        errno = before;
    }

    static int take() noexcept {
        std::uint64_t kept = kept_.load();
        while (kept != 0) {
            const int signal = __builtin_ctzll(kept) + 1;
            if (kept_.compare_exchange_weak(kept, kept & ~bit(signal))) return signal;
        }
        return 0;
    }

    static std::uint64_t bit(int signal) noexcept { return std::uint64_t{1} << (signal - 1); }

    static const void* image_of(const void* code) noexcept {
        Dl_info info{};
        return ::dladdr(code, &info) != 0 ? info.dli_fbase : nullptr;
    }

    inline static std::atomic<bool> held_{false};
    inline static std::atomic<std::uint64_t> kept_{0};  // bit n: signal n + 1
    inline static std::atomic<Handler> handler_{nullptr};  // the interpreter's, for all signals
};

}  // namespace datadist
