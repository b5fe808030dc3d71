// A read from memory of a GPU: the reader compares the guard, launches a copy, waits for its event and compares again.
// The owner advances the guard, then launches a kernel that writes there. Of a copy whose second comparison succeeds
// every byte is an old one.
//
// Of the driver this assumes: what the host did before a launch comes before the work, and what the work did before its
// event, as cuEventQuery says. Both devices' work is a thread here; "doorbell" stands for a launch.

#include "model.hpp"

const char* const steps[] = {
    "the order of the owner: advance, then launch",
    "the launch's order behind the owner's advance",
    "the wait for the event",
    "the event's order behind the copy",
    "the comparison after the event",
};

struct DeviceReads : rl::test_suite<DeviceReads, 4> {
    rl::atomic<int> generation, kernels_bell, copies_bell, event, byte;
    rl::atomic<int> copied;

    static constexpr int promised = 1, old_byte = 1, new_byte = 2, never = 2;

    void before() {
        generation.store(promised, rl::memory_order_relaxed);
        kernels_bell.store(0, rl::memory_order_relaxed);
        copies_bell.store(0, rl::memory_order_relaxed);
        event.store(0, rl::memory_order_relaxed);
        byte.store(old_byte, rl::memory_order_relaxed);
        copied.store(0, rl::memory_order_relaxed);
    }

    // generation.hpp is modelled in guards.cpp.
    void advance_generation() {
        generation.fetch_add(1, rl::memory_order_seq_cst);
        rl::atomic_thread_fence(rl::memory_order_release);
    }

    int load_generation() {
        rl::atomic_thread_fence(rl::memory_order_acquire);
        return generation.load(rl::memory_order_acquire);
    }

    void owner() {
        // apply (_cache/local_caches.py): `self._guards.void(guard)`
        if (kept(1)) advance_generation();
        kernels_bell.store(1, kept(2, rl::mo_release), $);
        if (!kept(1)) advance_generation();
    }

    void kernel() {
        while (kernels_bell.load(rl::memory_order_acquire) == 0) rl::yield(1, $);
        if (kept(2)) rl::atomic_thread_fence(rl::memory_order_seq_cst);
        byte.store(new_byte, rl::memory_order_relaxed);
    }

    void copy() {
        int rung;
        while ((rung = copies_bell.load(rl::memory_order_acquire)) == 0) rl::yield(1, $);
        if (rung == never) return;
        copied.store(byte.load(rl::memory_order_relaxed), rl::memory_order_relaxed);
        if (kept(4)) rl::atomic_thread_fence(rl::memory_order_seq_cst);
        event.store(1, kept(4, rl::mo_release), $);
    }

    void reader() {
        // execute_plan (_native.cpp): `if (guards && !guards->unchanged()) return changed_before;`
        if (load_generation() != promised) {
            copies_bell.store(never, rl::memory_order_release);
            return;
        }
        // copy (device.hpp): `device_.cuda().cuMemcpyAsync(`
        copies_bell.store(1, rl::memory_order_release);
        // ended (device.hpp): `device_.cuda().cuEventQuery(window.event)`
        while (kept(3) && event.load(rl::memory_order_relaxed) == 0) rl::yield(1, $);
        // ended (device.hpp): `std::atomic_thread_fence(std::memory_order_acquire);`
        rl::atomic_thread_fence(rl::memory_order_acquire);
        // execute_plan (_native.cpp): `!guards->unchanged() ? changed_during : done`
        if (kept(5) && load_generation() != promised) return;
        const bool late = !kept(3) && event.load(rl::memory_order_acquire) == 0;  // the copy goes on behind the call
        RL_ASSERT(!late);
        RL_ASSERT(copied.load(rl::memory_order_relaxed) == old_byte);
    }

    void thread(unsigned number) { number == 0 ? owner() : number == 1 ? kernel() : number == 2 ? copy() : reader(); }
};

int main() { return check_model<DeviceReads>("device", steps, 3); }
