// Write intents (architecture rule 5): a foreign writer announces its write in a shared page, then compares the guard,
// then writes. The owner advances the guard, then reads the page, and takes the memory back when no writer is at work.
// The other way to end writers, a closed page, is the same with another word.
//
// The bytes are plain variables: a writer and the owner must never touch them at once. Relacy reports a data race.

#include "model.hpp"

const char* const steps[] = {
    "the full fence of the writer, between announcing and comparing",
    "the full fence of the owner, between advancing and reading the page",
    "the order of the writer: announce, then compare",
    "the order of the owner: advance, then read the page",
    "the fence and the order at the end of an announcement",
    "the acquire order of the owner's reads of sequences",
    "the guard's name in the slot before the fence of the writer",
    "the number of used slots before the fence of the writer",
    "the look at the closed page",
    "the acquire order of the owner's read of the guard's name",
};

struct WriteIntents : rl::test_suite<WriteIntents, 3> {
    static constexpr int slots = 2, guards = 2, promised = 1;

    // Numbers begin at 1. Each slot has bytes of its own under each guard: writers do not meet each other here.
    rl::atomic<int> generations[guards + 1], used, closed, sequences[slots + 1], whats[slots + 1];
    rl::var<int> bytes[slots + 1][guards + 1];

    void before() {
        for (auto& generation : generations) generation.store(promised, rl::memory_order_relaxed);
        for (auto* word : {&used, &closed}) word->store(0, rl::memory_order_relaxed);
        for (int slot = 0; slot <= slots; ++slot) {
            sequences[slot].store(0, rl::memory_order_relaxed);
            whats[slot].store(0, rl::memory_order_relaxed);
            for (auto& byte : bytes[slot]) byte($) = 0;
        }
    }

    void raise_used(int slot) {
        // announce (write_intents.hpp): `std::uint64_t used = __atomic_load_n(&header.used, __ATOMIC_RELAXED)`
        int known = used.load(rl::memory_order_relaxed);
        // announce (write_intents.hpp): `(&header.used, &used, number, false, __ATOMIC_SEQ_CST,`
        while (known < slot && !used.compare_exchange_strong(known, slot, rl::mo_seq_cst, $, rl::mo_relaxed, $)) {
        }
    }

    void name_guard(int slot, int guard) {
        // announce (write_intents.hpp): `__atomic_store_n(&slot.what, what, __ATOMIC_RELEASE)`
        whats[slot].store(guard, rl::memory_order_release);
    }

    void retract(int slot) {
        // retract (write_intents.hpp): `store_fence();`
        if (kept(5)) rl::atomic_thread_fence(rl::memory_order_seq_cst);
        // retract (write_intents.hpp): `__atomic_load_n(&slot.sequence, __ATOMIC_RELAXED)`
        const int sequence = sequences[slot].load(rl::memory_order_relaxed);
        // retract (write_intents.hpp): `__atomic_exchange_n(&slot.sequence, (sequence | 1) + 1, __ATOMIC_SEQ_CST)`
        sequences[slot].exchange((sequence | 1) + 1, kept(5, rl::mo_seq_cst), $);
    }

    bool announce(int slot, int guard) {
        if (kept(8)) raise_used(slot);
        if (kept(7)) name_guard(slot, guard);
        // announce (write_intents.hpp): `__atomic_load_n(&slot.sequence, __ATOMIC_RELAXED)`
        const int sequence = sequences[slot].load(rl::memory_order_relaxed);
        // announce (write_intents.hpp): `__atomic_exchange_n(&slot.sequence, (sequence + 1) | 1, __ATOMIC_SEQ_CST)`
        sequences[slot].exchange((sequence + 1) | 1, rl::memory_order_seq_cst);
        // announce (write_intents.hpp): `__atomic_thread_fence(__ATOMIC_SEQ_CST)`
        if (kept(1)) rl::atomic_thread_fence(rl::memory_order_seq_cst);
        if (!kept(8)) raise_used(slot);
        if (!kept(7)) name_guard(slot, guard);
        // announce (write_intents.hpp): `if (__atomic_load_n(&header.closed, __ATOMIC_SEQ_CST) == 0) return true;`
        if (!kept(9) || closed.load(rl::memory_order_seq_cst) == 0) return true;
        retract(slot);
        return false;
    }

    bool current(int guard) {
        rl::atomic_thread_fence(rl::memory_order_acquire);  // load_generation, as in guards.cpp
        return generations[guard].load(rl::memory_order_acquire) == promised;
    }

    void write(int slot, int guard) {
        if (!kept(3) && !current(guard)) return;
        // _announced (_transfer/initiator.py): `with intent or nullcontext():`
        if (!announce(slot, guard)) return;
        // execute_plan (_native.cpp): `if (guards && !guards->unchanged()) return changed_before;`
        if (!kept(3) || current(guard)) bytes[slot][guard]($) = 1;
        // _announced (_transfer/initiator.py): `with intent or nullcontext():`
        retract(slot);
    }

    void advance(int guard) {
        generations[guard].fetch_add(1, rl::memory_order_seq_cst);  // advance_generation, as in guards.cpp
        rl::atomic_thread_fence(rl::memory_order_release);
    }

    // What step 2 leaves out is the fence and the order that the loads themselves have.
    rl::memory_order owners_order() const { return kept(2) ? rl::mo_seq_cst : rl::mo_acquire; }

    // The sequence of a writer that has to be waited for, or 0.
    int look(int slot, int guard) {
        // look (write_intents.hpp): `__atomic_load_n(&slot.sequence, __ATOMIC_SEQ_CST)`
        const int sequence = sequences[slot].load(kept(6, owners_order()), $);
        if (sequence % 2 == 0) return 0;
        // look (write_intents.hpp): `!wanted(__atomic_load_n(&slot.what, __ATOMIC_ACQUIRE))`
        if (guard != 0 && whats[slot].load(kept(10, rl::mo_acquire), $) != guard) return 0;
        // look (write_intents.hpp): `if (__atomic_load_n(&slot.sequence, __ATOMIC_SEQ_CST) == sequence)`
        return sequences[slot].load(kept(6, owners_order()), $) == sequence ? sequence : 0;
    }

    void owner() {
        const int guard = rl::rand(2) == 1 ? 1 : 0;  // 0: the page is closed, which ends the writers of all guards
        if (guard == 0) {
            // close_page (write_intents.hpp): `__atomic_exchange_n(&page.header().closed, 1, __ATOMIC_SEQ_CST)`
            closed.exchange(1, rl::memory_order_seq_cst);
        } else if (kept(4)) {
            // apply (_cache/local_caches.py): `self._guards.void(guard)`
            advance(guard);
        }
        // apply (_cache/local_caches.py): `busy = self.writers.busy(entry.guard.slot, readers=entry.storage.non_pool)`
        // WriterScan (write_intents.hpp): `__atomic_thread_fence(__ATOMIC_SEQ_CST)`
        if (kept(2)) rl::atomic_thread_fence(rl::memory_order_seq_cst);
        // used (write_intents.hpp): `__atomic_load_n(&header().used, __ATOMIC_SEQ_CST)`
        const int last = used.load(owners_order(), $);
        int found[slots + 1] = {};
        for (int slot = 1; slot <= last; ++slot) found[slot] = look(slot, guard);
        if (guard != 0 && !kept(4)) advance(guard);
        for (int slot = 1; slot <= slots; ++slot) {
            // sequence_of (write_intents.hpp): `__atomic_load_n(&page.slot(number).sequence, __ATOMIC_SEQ_CST)`
            // _lasts (_memory/write_intents.py): `_native.writer_sequence(page.address, write.slot) == write.sequence`
            if (found[slot] != 0 && sequences[slot].load(kept(6, owners_order()), $) == found[slot]) continue;
            // apply (_cache/local_caches.py): `self._quarantine.free(allocation, busy)`
            for (int each = 1; each <= guards; ++each)
                if (guard == 0 || guard == each) bytes[slot][each]($) = 2;
        }
    }

    void thread(unsigned slot) {
        if (slot == 0) return owner();
        for (int guard = 1; guard <= guards; ++guard) write(static_cast<int>(slot), guard);
    }
};

int main() { return check_model<WriteIntents>("write_intents", steps, 3); }
