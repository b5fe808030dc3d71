// Keys of a store: a MessagePack array of them, and their slots.
#pragma once

#include <random>

#include "digest.hpp"
#include "plan_python.hpp"

namespace datadist {

using Key = std::array<char, 65>;  // length, 1 to 64, bytes, zeros
using Marks = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline Key padded(std::string_view bytes) {
    Key key{static_cast<char>(bytes.size())};
    if (bytes.empty() || bytes.size() >= key.size()) refuse("a key of ", bytes.size(), " bytes, 1 to 64 are needed");
    bytes.copy(&key[1], bytes.size());
    return key;
}

// Calls take(key) for each key of an array of byte strings while it returns true; peers sent it. Returns their number.
template <typename Take>
std::size_t each_key(const nb::bytes& array, Take&& take) {
    const std::string_view all(array.c_str(), array.size());
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(at < all.size() ? all[at] : 0); };
    std::size_t at = byte(0) == 0xdc ? 3 : 1, size = 0;  // an array of 16 or 4 bits
    const std::size_t count = at == 3 ? byte(1) << 8 | byte(2) : byte(0) ^ 0x90;
    if (at == 1 && count > 15) refuse("keys: not an array");
    for (std::size_t i = 0; i < count; ++i, at += size) {
        size = byte(at + 1);
        if (byte(at) != 0xc4 || (at += 2) + size > all.size()) refuse("keys[", i, "]: not a byte string");
        if (!take(padded(all.substr(at, size)))) break;
    }
    return count;
}

// Slots by key, compared whole: chains of slots, by number from 1 on.
struct KeyTable {
    explicit KeyTable(std::size_t slots) : first(4), next(slots), keys(slots) {
        while (first.size() < 2 * slots) first.resize(2 * first.size());
    }

    // Number of the key's slot, or the 0 that ends its chain. Peers choose keys: secrets of this process hash them.
    std::uint32_t& number(const Key& key) {
        static std::random_device random;
        static const DigestKey secret(std::uint64_t{random()} << 32 | random(), random());
        const Wide sum = nh(&key[1], 4, secret.words.data());
        const auto low = static_cast<std::uint64_t>(sum), hash = scramble(low + key[0]) ^ scramble(sum >> 64);
        std::uint32_t* at = &first[hash & (first.size() - 1)];
        while (*at != 0 && keys[*at - 1] != key) at = &next[*at - 1];
        return *at;
    }

    void add(const Key& key, std::size_t slot) {
        if (keys.at(slot)[0] != 0 || number(key) != 0) refuse("slot ", slot, " has a key, or the key has a slot");
        number(keys[slot] = key) = static_cast<std::uint32_t>(slot + 1);
    }

    void remove(const Key& key) {
        std::uint32_t& found = number(key);
        if (found != 0) keys[found - 1] = {}, found = std::exchange(next[found - 1], 0);
    }

    std::vector<std::uint32_t> first, next;
    std::vector<Key> keys;
};

inline Key given(const nb::bytes& key) { return padded({key.c_str(), key.size()}); }

inline nb::object py_run(KeyTable& table, const nb::bytes& keys, const Marks& states, std::uint8_t state,
                         const Marks& marks) {
    if (std::min(states.size(), marks.size()) < table.keys.size()) refuse("states, marks: one for each slot is needed");
    auto slots = std::make_shared<BlockList::Numbers>();
    each_key(keys, [&](const Key& key) {
        const std::int64_t slot = std::int64_t{table.number(key)} - 1;
        if (slot < 0 || states(slot) != state) return false;
        marks(slot) = 1;
        slots->push_back(slot);
        return true;
    });
    return show<BlockList::Shown, std::int64_t>(slots);
}

inline void bind_keys(nb::module_& m) {
    m.def("count_keys", [](const nb::bytes& keys) { return each_key(keys, [](const Key&) { return true; }); });
    nb::class_<KeyTable>(m, "KeyTable", nb::is_final())
        .def(nb::init<std::size_t>())
        .def("__setitem__", [](KeyTable& all, const nb::bytes& key, std::size_t slot) { all.add(given(key), slot); })
        .def("__delitem__", [](KeyTable& table, const nb::bytes& key) { table.remove(given(key)); })
        .def("find", [](KeyTable& all, const nb::bytes& key) { return std::int64_t{all.number(given(key))} - 1; })
        .def("run", &py_run);
}

}  // namespace datadist
