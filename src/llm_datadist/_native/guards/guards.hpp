// Guards with the generations they must still have.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "guards/generation.hpp"

namespace datadist {

class Guards {
public:
    Guards() = default;

    // Throws RuleError for an impossible address of a generation.
    void add(std::uint64_t address, std::uint64_t generation) {
        generation_at(address);
        guards_.push_back({address, generation});
    }

    // Valid for all bytes read before: its loads follow theirs.
    bool current() const {
        for (const Guard& guard : guards_)
            if (load_generation(guard.address) != guard.generation) return false;
        return true;
    }

private:
    struct Guard {
        std::uint64_t address;
        std::uint64_t generation;
    };

    std::vector<Guard> guards_;
};

// Slots of a peer's guard table, which is mapped here, with their promised generations.
class GuardSet {
public:
    // `base`, `nbytes`: the table, whose slot 0 is its header.
    GuardSet(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& promised, std::uint64_t slot_bytes,
             std::uint64_t base, std::uint64_t nbytes) {
        if (slot_bytes == 0) refuse("slot_bytes is 0: must be positive");
        const std::uint64_t slots = nbytes / slot_bytes;
        for (const auto& [slot, generation] : promised) {
            if (slot < 1 || slot >= slots)
                refuse("guard slot ", slot, " must be in [1, ", slots, ") of a table of ", nbytes, " bytes");
            guards_.add(base + slot * slot_bytes, generation);
        }
    }

    // Requires that the table is mapped. Valid for all bytes read before.
    bool unchanged() const { return guards_.current(); }

private:
    Guards guards_;
};

// Results of a move that compares guards, in place of the bytes moved.
constexpr std::int64_t changed_before = -1;  // nothing has moved
constexpr std::int64_t changed_during = -2;  // the moved bytes are not to be used

}  // namespace datadist
