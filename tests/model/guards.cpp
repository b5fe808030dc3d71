// Guards (architecture rule 4): a reader compares the generation before and after its copy, the owner advances it and
// uses the memory for something else. Of a copy whose second comparison succeeds every byte is an old one.
//
// The bytes are relaxed atomics: reader and owner touch them at once by design, so that plain variables would be a data
// race in every schedule.

#include "model.hpp"

const char* const steps[] = {
    "the release fence of the owner behind the advance",
    "the order of the owner: advance, then reuse",
    "the acquire fence before the generation is loaded",
    "the store fence of a thread that helps to copy",
    "the comparison after the copy",
};

struct Guards : rl::test_suite<Guards, 3> {
    rl::atomic<int> generation, done, bytes[2];
    rl::var<int> helpers_byte;

    static constexpr int promised = 1, old_byte = 1, new_byte = 2;

    void before() {
        generation.store(promised, rl::memory_order_relaxed);
        done.store(0, rl::memory_order_relaxed);
        for (auto& byte : bytes) byte.store(old_byte, rl::memory_order_relaxed);
    }

    void advance_generation() {
        // advance_generation (generation.hpp): `__atomic_add_fetch(generation_at(address), 1, __ATOMIC_SEQ_CST)`
        generation.fetch_add(1, rl::memory_order_seq_cst);
        // advance_generation (generation.hpp): `__atomic_thread_fence(__ATOMIC_RELEASE)`
        if (kept(1)) rl::atomic_thread_fence(rl::memory_order_release);
    }

    int load_generation() {
        // load_generation (generation.hpp): `__atomic_thread_fence(__ATOMIC_ACQUIRE)`
        if (kept(3)) rl::atomic_thread_fence(rl::memory_order_acquire);
        // load_generation (generation.hpp): `__atomic_load_n(generation, __ATOMIC_ACQUIRE)`
        return generation.load(rl::memory_order_acquire);
    }

    void owner() {
        // apply (_cache/local_caches.py): `self._guards.void(guard)`
        if (kept(2)) advance_generation();
        // apply (_cache/local_caches.py): `self._quarantine.free(allocation, busy)`
        for (auto& byte : bytes) byte.store(new_byte, rl::memory_order_relaxed);
        if (!kept(2)) advance_generation();
    }

    void helper() {
        // run (chunks.hpp): `!move_chunk(chunk, carrier)`
        helpers_byte($) = bytes[1].load(rl::memory_order_relaxed);
        // run (chunks.hpp): `store_fence();`
        // store_fence (generation.hpp): `__atomic_thread_fence(__ATOMIC_SEQ_CST)`
        if (kept(4)) rl::atomic_thread_fence(rl::memory_order_seq_cst);
        // run (chunks.hpp): `done_.fetch_add(carrier.done(), std::memory_order_release)`
        done.fetch_add(1, rl::memory_order_release);
    }

    void caller() {
        // execute_plan (_native.cpp): `if (guards && !guards->unchanged()) return changed_before;`
        if (load_generation() != promised) return;
        // execute_plan (_native.cpp): `static_cast<std::int64_t>(move(per_pair, stop))`
        const int callers_byte = bytes[0].load(rl::memory_order_relaxed);
        // done (chunks.hpp): `done_.load(std::memory_order_acquire)`
        if (done.load(rl::memory_order_acquire) != 1) return;  // a schedule where the helper is not done yet
        // current (guards.hpp): `if (load_generation(guard.address) != guard.generation) return false;`
        // execute_plan (_native.cpp): `!guards->unchanged() ? changed_during : done`
        if (kept(5) && load_generation() != promised) return;
        RL_ASSERT(callers_byte == old_byte);
        RL_ASSERT(helpers_byte($) == old_byte);
    }

    void thread(unsigned number) { number == 0 ? owner() : number == 1 ? helper() : caller(); }
};

int main() { return check_model<Guards>("guards", steps, 20); }
