// Integers in little-endian order, as lanes send them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace datadist {

template <typename T>
void append(std::string& out, T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

template <typename T>
T load(const char* from) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
        value |= static_cast<std::uint64_t>(static_cast<unsigned char>(from[i])) << (8 * i);
    return static_cast<T>(value);
}

}  // namespace datadist
