// Drives the announcements without Python, for the sanitizers: many writers, one owner who takes the memory back.
// Built and run by tests/native/drivers.py.
//
// Each writer fills the memory with its own number while the generation is what it was told. The owner advances, waits
// for whom it finds, fills the memory with a mark, and looks whether the mark stays. The memory is plain: the thread
// sanitizer sees a race wherever the protocol does not order a writer before the owner.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "guards/write_intents.hpp"

using namespace datadist;

namespace {

constexpr int words = 64;
constexpr std::uint64_t guard = 7;
constexpr std::uint64_t other_guard = 8;

struct Shared {
    alignas(64) unsigned char page[writer_page_bytes] = {};
    alignas(64) std::uint64_t generation = 1;
    std::atomic<std::uint64_t> told{1};  // what a resolve would answer
    std::uint64_t memory[words] = {};
    std::atomic<bool> stop{false};
    std::atomic<long> written{0};
    std::atomic<long> refused{0};
};

std::uint64_t address_of(const void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

bool current(Shared& shared, std::uint64_t generation) {
    return load_generation(address_of(&shared.generation)) == generation;
}

// A slot of its own: several writers write the memory at once, which is theirs to order. Here a lock does.
void write_on(Shared& shared, std::uint64_t slot, std::atomic_flag& turn) {
    const IntentPage page(address_of(shared.page));
    while (!shared.stop.load()) {
        const std::uint64_t told = shared.told.load();
        CHECK(announce(page, slot, guard));
        if (current(shared, told)) {
            while (turn.test_and_set(std::memory_order_acquire)) {
            }
            for (std::uint64_t& word : shared.memory) word = slot;
            turn.clear(std::memory_order_release);
            ++shared.written;
        } else {
            ++shared.refused;
        }
        retract(page, slot);
    }
}

// A steady stream of writers elsewhere: nobody waits for them.
void write_elsewhere(Shared& shared, std::uint64_t slot) {
    const IntentPage page(address_of(shared.page));
    while (!shared.stop.load()) {
        CHECK(announce(page, slot, other_guard));
        std::this_thread::yield();
        retract(page, slot);
    }
}

void take_back(Shared& shared) {
    const IntentPage page(address_of(shared.page));
    advance_generation(address_of(&shared.generation));
    std::vector<Writing> found;
    WriterScan({guard}, false).look(page, 0, found);
    for (const Writing& each : found)
        while (sequence_of(page, each.slot) == each.sequence) std::this_thread::yield();
    for (int turn = 0; turn < 20; ++turn) {
        for (std::uint64_t& word : shared.memory) word = 1000;
        std::this_thread::yield();
        for (const std::uint64_t word : shared.memory) CHECK(word == 1000);
    }
    shared.told.store(load_generation(address_of(&shared.generation)));
}

void many_rounds(int rounds) {
    auto shared = std::make_unique<Shared>();
    std::atomic_flag turn = ATOMIC_FLAG_INIT;
    std::vector<std::thread> threads;
    for (std::uint64_t slot : {1, 2, 3, 200}) threads.emplace_back([&, slot] { write_on(*shared, slot, turn); });
    threads.emplace_back([&] { write_elsewhere(*shared, 4); });
    for (int round = 0; round < rounds; ++round) {
        const long before = shared->written.load();
        while (shared->written.load() == before) std::this_thread::yield();
        take_back(*shared);
    }
    shared->stop = true;
    for (std::thread& thread : threads) thread.join();
    std::printf("%d rounds, %ld writes, %ld refused\n", rounds, shared->written.load(), shared->refused.load());
}

// Both at once, again and again: never may the owner miss the writer while the writer misses the owner.
void one_of_both_sees_the_other(int rounds) {
    auto shared = std::make_unique<Shared>();
    const IntentPage page(address_of(shared->page));
    std::atomic<int> round{0};
    std::atomic<int> ready{0};
    std::atomic<bool> began{false};
    std::thread writer([&] {
        for (int mine = 1; mine <= rounds; ++mine) {
            ++ready;
            while (round.load() != mine) {
            }
            CHECK(announce(page, 1, guard));
            began = current(*shared, static_cast<std::uint64_t>(mine));
            ++ready;
            while (ready.load() != 0) {
            }
            retract(page, 1);
        }
    });
    for (int now = 1; now <= rounds; ++now) {
        while (ready.load() != 1) {
        }
        round = now;
        // The other core needs a while to see that: every offset of the two gets its turn.
        for (volatile int pause = 0; pause < now % 128; pause = pause + 1) {
        }
        advance_generation(address_of(&shared->generation));
        std::vector<Writing> found;
        WriterScan({guard}, false).look(page, 0, found);
        while (ready.load() != 2) {
        }
        CHECK(!found.empty() || !began.load());
        ready = 0;
    }
    writer.join();
}

}  // namespace

int main(int argc, char** argv) {
    end_if_it_hangs();
    one_of_both_sees_the_other(argc > 2 ? std::atoi(argv[2]) : 20000);
    many_rounds(argc > 1 ? std::atoi(argv[1]) : 300);
}
