// The guards of one job: generations that must still show what they showed when the job was granted.
#pragma once

#include <cstdint>
#include <vector>

#include "guard.hpp"

namespace datadist {

class Guards {
public:
    Guards() = default;

    // Throws RuleError for an address that can be no generation's.
    void add(std::uint64_t address, std::uint64_t generation) {
        generation_at(address);
        guards_.push_back({address, generation});
    }

    // Judges every byte read before: the loads come after them.
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

}  // namespace datadist
