// Keys of a store: a MessagePack array of them, and their slots.
#pragma once

#include <random>
#include <unordered_map>

#include "copy/digest.hpp"
#include "python/plan_python.hpp"

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

// Peers choose keys: secrets of this process hash them.
struct KeyHash {
    std::size_t operator()(const Key& key) const {
        static std::random_device random;
        static const DigestKey secret(std::uint64_t{random()} << 32 | random(), random());
        const Wide sum = nh(&key[1], 4, secret.words.data());
        return scramble(static_cast<std::uint64_t>(sum) + key[0]) ^ scramble(sum >> 64);
    }
};

using KeyTable = std::unordered_map<Key, std::int64_t, KeyHash>;  // slot of each

inline Key given(const nb::bytes& key) { return padded({key.c_str(), key.size()}); }

inline nb::object py_run(const KeyTable& table, const nb::bytes& keys, const Marks& states, std::uint8_t state,
                         const Marks& marks) {
    auto slots = std::make_shared<BlockList::Numbers>();
    each_key(keys, [&](const Key& key) {
        const auto found = table.find(key);
        if (found == table.end()) return false;
        const auto slot = static_cast<std::size_t>(found->second);
        if (slot >= std::min(states.size(), marks.size())) refuse("states, marks: one for each slot is needed");
        if (states(slot) != state) return false;
        marks(slot) = 1;
        slots->push_back(found->second);
        return true;
    });
    return show<BlockList::Shown, std::int64_t>(slots);
}

inline void bind_keys(nb::module_& m) {
    m.def("count_keys", [](const nb::bytes& keys) { return each_key(keys, [](const Key&) { return true; }); });
    nb::class_<KeyTable>(m, "KeyTable", nb::is_final())
        .def(nb::init<>())
        .def("__setitem__", [](KeyTable& all, const nb::bytes& key, std::int64_t slot) { all[given(key)] = slot; })
        .def("__delitem__", [](KeyTable& all, const nb::bytes& key) { all.erase(given(key)); })
        .def("find",
             [](const KeyTable& all, const nb::bytes& key) {
                 const auto found = all.find(given(key));
                 return found == all.end() ? -1 : found->second;
             })
        .def("run", &py_run);
}

}  // namespace datadist
