// Frames of a lane: a header of 40 bytes, then meta and payload by kind. Integers are little-endian.
//
//   READ    meta: opaque to lanes                    asks for bytes
//   DATA    payload, then a trailer of 8 bytes       answers a READ; the trailer is a Status
//   WRITE   meta: opaque to lanes, payload           brings bytes
//   RESULT  meta: u32 code, utf-8 text               answers a WRITE, or refuses a READ
//
// No field of a header is used before check_header() accepts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.hpp"
#include "little_endian.hpp"

namespace datadist {

enum class Kind : std::uint8_t { read = 1, data = 2, write = 3, result = 4 };

// Ends at the target: trailers of DATA, and codes of RESULT below those of the layer above.
enum Status : std::uint32_t {
    good = 0,
    changed = 1,  // a guard changed: DATA's bytes are invalid, none of a WRITE are written
    aborted = 2,  // the owner took its memory back
    lost = 3,     // the lane ended; never sent
    misfit = 4,   // the accepted memory differs in size from the payload
    torn = 5,     // changed or aborted during a WRITE: part may be written
    failed = 6,   // the device of the owner's memory failed: DATA's bytes are invalid
};

constexpr std::uint32_t lane_magic = 0x31444c44;  // "DLD1"
constexpr std::size_t header_bytes = 40;
constexpr std::size_t trailer_bytes = 8;
constexpr std::uint64_t max_meta_bytes = 1u << 20;
constexpr std::uint64_t max_payload_bytes = std::uint64_t{1} << 48;
constexpr std::size_t max_text_bytes = 4000;
constexpr std::size_t code_bytes = 4;

struct Header {
    Kind kind = Kind::read;
    std::uint64_t id = 0;
    std::uint64_t meta_bytes = 0;
    std::uint64_t payload_bytes = 0;
};

inline std::string encode_header(const Header& header) {
    std::string out;
    out.reserve(header_bytes + static_cast<std::size_t>(header.meta_bytes));
    append<std::uint32_t>(out, lane_magic);
    append<std::uint8_t>(out, static_cast<std::uint8_t>(header.kind));
    append<std::uint8_t>(out, 0);   // flags
    append<std::uint16_t>(out, 0);  // reserved
    append(out, header.id);
    append(out, header.meta_bytes);
    append(out, header.payload_bytes);
    append<std::uint64_t>(out, 0);  // reserved
    return out;
}

struct KindRule {
    std::uint64_t min_meta, max_meta, max_payload;
};

inline const KindRule* rule_of(std::uint8_t kind) {
    static constexpr KindRule rules[] = {
        {0, max_meta_bytes, 0},                            // READ
        {0, 0, max_payload_bytes},                         // DATA
        {0, max_meta_bytes, max_payload_bytes},            // WRITE
        {code_bytes, code_bytes + max_text_bytes, 0},      // RESULT
    };
    return kind >= 1 && kind <= 4 ? &rules[kind - 1] : nullptr;
}

// Returns the header in 40 received bytes; throws LaneError if any field breaks a rule.
inline Header check_header(const char* in) {
    const auto magic = load<std::uint32_t>(in);
    if (magic != lane_magic) break_lane("a frame begins with ", magic, ", which is not of this protocol");
    const auto kind = load<std::uint8_t>(in + 4);
    const KindRule* rule = rule_of(kind);
    if (rule == nullptr) break_lane("a frame is of the unknown kind ", +kind);
    const auto zeros = load<std::uint8_t>(in + 5) | load<std::uint16_t>(in + 6) | load<std::uint64_t>(in + 32);
    if (zeros != 0) break_lane("a frame of kind ", +kind, " has reserved bits set");
    const Header header{static_cast<Kind>(kind), load<std::uint64_t>(in + 8), load<std::uint64_t>(in + 16),
                        load<std::uint64_t>(in + 24)};
    if (header.meta_bytes < rule->min_meta || header.meta_bytes > rule->max_meta)
        break_lane("a frame of kind ", +kind, " has ", header.meta_bytes, " bytes of meta");
    if (header.payload_bytes > rule->max_payload)
        break_lane("a frame of kind ", +kind, " has ", header.payload_bytes, " bytes of payload");
    return header;
}

inline std::string encode_request(Kind kind, std::uint64_t id, const std::string& meta, std::uint64_t payload_bytes) {
    return encode_header({kind, id, meta.size(), payload_bytes}) + meta;
}

inline std::string encode_result(std::uint64_t id, std::uint32_t code, const std::string& why) {
    const std::string cut = why.substr(0, max_text_bytes);
    std::string out = encode_header({Kind::result, id, code_bytes + cut.size(), 0});
    append(out, code);
    return out + cut;
}

inline const char* text_of(Status status) {
    switch (status) {
        case good: return "";
        case changed: return "the memory was freed, bound again or unregistered: its guard has changed";
        case aborted: return "the owner of the memory took it back during the transfer";
        case torn:
            return "the memory was freed, bound again or unregistered during the transfer: part of it is written";
        case misfit: return "the memory at the target is of another size than the payload";
        case failed: return "the device of the owner's memory has failed";
        case lost: break;
    }
    return "the lane ended";
}

}  // namespace datadist
