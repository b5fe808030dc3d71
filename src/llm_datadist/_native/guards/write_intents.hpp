// Write intents: a foreign process announces in a shared page which guarded memory it will write. After advancing the
// guard, the owner waits for exactly the writers that began before.
//
// A page is a header line and writer_slots lines of 64 bytes. A slot is one writer; its sequence is odd while it works,
// and differs for each write. Unlike a count, it keeps later writers from prolonging the owner's wait.
//
//   writer: sequence becomes odd  |  is the page closed?  |  generation as promised?  |  write  |  sequence even
//   owner:  advance the generation  |  look for odd sequences
//
// The first bars are full fences: the owner sees the sequence, or the writer sees the generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "error.hpp"
#include "guards/generation.hpp"

namespace datadist {

constexpr std::uint64_t writer_slots = 255;
constexpr std::uint64_t writer_page_bytes = 64 * (writer_slots + 1);

// A lying writer misreports only its own work.
struct alignas(64) WriterHeader {
    std::uint64_t closed;  // by the owner: no writer may begin
    std::uint64_t used;  // by the writer: higher slots were never used
};

struct alignas(64) WriterSlot {
    std::uint64_t sequence;
    std::uint64_t what;  // guard and kind of use; opaque here
};

static_assert(sizeof(WriterHeader) == 64 && sizeof(WriterSlot) == 64);

// Page mapped here. Owns nothing.
class IntentPage {
public:
    explicit IntentPage(std::uint64_t address) : address_(address) {
        if (address == 0 || address % alignof(WriterHeader) != 0)
            refuse("address is ", address, ": a page of writers needs a non-null address divisible by 64");
    }

    WriterHeader& header() const { return *reinterpret_cast<WriterHeader*>(address_); }

    WriterSlot& slot(std::uint64_t number) const {
        if (number < 1 || number > writer_slots)
            refuse("slot is ", number, ": must be in [1, ", writer_slots, "] of a page of writers");
        return *reinterpret_cast<WriterSlot*>(address_ + number * sizeof(WriterSlot));
    }

    std::uint64_t used() const {
        const std::uint64_t told = __atomic_load_n(&header().used, __ATOMIC_SEQ_CST);
        return told < writer_slots ? told : writer_slots;
    }

private:
    std::uint64_t address_;
};

inline void retract(const IntentPage& page, std::uint64_t number) {
    WriterSlot& slot = page.slot(number);
    store_fence();  // written bytes are visible before the sequence
    const std::uint64_t sequence = __atomic_load_n(&slot.sequence, __ATOMIC_RELAXED);
    __atomic_exchange_n(&slot.sequence, (sequence | 1) + 1, __ATOMIC_SEQ_CST);
}

// The caller owns the slot until retract(). False, and retracted, if the page is closed.
inline bool announce(const IntentPage& page, std::uint64_t number, std::uint64_t what) {
    WriterSlot& slot = page.slot(number);
    WriterHeader& header = page.header();
    std::uint64_t used = __atomic_load_n(&header.used, __ATOMIC_RELAXED);
    while (used < number &&
           !__atomic_compare_exchange_n(&header.used, &used, number, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    __atomic_store_n(&slot.what, what, __ATOMIC_RELEASE);
    const std::uint64_t sequence = __atomic_load_n(&slot.sequence, __ATOMIC_RELAXED);
    // Full fence: the owner can see this writer before it looks at anything below.
    __atomic_exchange_n(&slot.sequence, (sequence + 1) | 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&header.closed, __ATOMIC_SEQ_CST) == 0) return true;
    retract(page, number);
    return false;
}

inline void close_page(const IntentPage& page) { __atomic_exchange_n(&page.header().closed, 1, __ATOMIC_SEQ_CST); }

inline std::uint64_t sequence_of(const IntentPage& page, std::uint64_t number) {
    return __atomic_load_n(&page.slot(number).sequence, __ATOMIC_SEQ_CST);
}

struct Writing {
    std::size_t page;
    std::uint64_t slot;
    std::uint64_t sequence;
};

// Finds writers at work on `what`, or on anything if `any`. A writer not found after an advance or a closing sees that
// when it begins.
class WriterScan {
public:
    WriterScan(std::vector<std::uint64_t> what, bool any) : what_(std::move(what)), any_(any) {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }

    void look(const IntentPage& page, std::size_t index, std::vector<Writing>& found) const {
        const std::uint64_t used = page.used();
        for (std::uint64_t number = 1; number <= used; ++number) {
            const WriterSlot& slot = page.slot(number);
            const std::uint64_t sequence = __atomic_load_n(&slot.sequence, __ATOMIC_SEQ_CST);
            if (sequence % 2 == 0 || !wanted(__atomic_load_n(&slot.what, __ATOMIC_ACQUIRE))) continue;
            // If the sequence differs, `what` may belong to later work, which saw the caller's change.
            if (__atomic_load_n(&slot.sequence, __ATOMIC_SEQ_CST) == sequence)
                found.push_back({index, number, sequence});
        }
    }

private:
    bool wanted(std::uint64_t what) const {
        if (any_) return true;
        for (const std::uint64_t each : what_)
            if (each == what) return true;
        return false;
    }

    std::vector<std::uint64_t> what_;
    bool any_;
};

}  // namespace datadist
