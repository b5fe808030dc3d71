// Planner: runs of bytes from lists of block numbers. Tests compare it with a NumPy twin.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace datadist {

// Contiguous copy inside a pair of tensors, in bytes; a row of the (R, 3) array in Python.
struct Run {
    std::uint64_t dst;
    std::uint64_t src;
    std::uint64_t bytes;
};
static_assert(sizeof(Run) == 3 * sizeof(std::uint64_t), "a run is a row of three uint64");

// `ordered` runs take effect one after the other (interface R26).
struct RunList {
    std::vector<Run> runs;
    bool ordered = false;
};

// A caller's block numbers; name and limit are for errors.
struct Blocks {
    const std::int64_t* values;
    std::size_t size;
    std::int64_t count;  // of a tensor; each value is below
    std::string_view name;

    std::uint64_t operator[](std::size_t i) const { return static_cast<std::uint64_t>(values[i]); }
};

// Set of block numbers: a bitmap if small compared to the list, else an open-addressing table.
class BlockSet {
public:
    BlockSet(std::uint64_t limit, std::size_t members) : limit_(limit), dense_(limit / 64 <= members + 64) {
        if (dense_) {
            words_.assign(limit / 64 + 1, 0);
            return;
        }
        std::size_t slots = 16;
        while (slots < members * 2) slots *= 2;
        words_.assign(slots, 0);
    }

    // Returns false if the block is there.
    bool insert(std::uint64_t block) {
        std::uint64_t& word = words_[dense_ ? block / 64 : slot(block)];
        const std::uint64_t mark = dense_ ? std::uint64_t{1} << (block % 64) : block + 1;
        if (dense_ ? (word & mark) != 0 : word == mark) return false;
        word |= mark;  // an empty slot is 0, so this stores the mark
        return true;
    }

    bool contains(std::uint64_t block) const {
        if (block >= limit_) return false;
        return dense_ ? (words_[block / 64] >> (block % 64) & 1) != 0 : words_[slot(block)] == block + 1;
    }

private:
    // Slot of the block, or the empty one for it. At most half are full.
    std::size_t slot(std::uint64_t block) const {
        const std::size_t mask = words_.size() - 1;
        std::size_t at = (block * 0x9E3779B97F4A7C15u >> 32) & mask;
        while (words_[at] != 0 && words_[at] != block + 1) at = (at + 1) & mask;
        return at;
    }

    std::uint64_t limit_;
    bool dense_;
    std::vector<std::uint64_t> words_;  // table slots hold block + 1
};

inline void check_blocks(const Blocks& blocks) {
    const auto limit = static_cast<std::uint64_t>(blocks.count);
    std::uint64_t outside = 0;
    for (std::size_t i = 0; i < blocks.size; ++i) outside |= blocks[i] >= limit;  // a negative value is huge here
    if (!outside) return;
    std::size_t i = 0;
    while (blocks[i] < limit) ++i;
    refuse(blocks.name, "[", i, "] is ", blocks.values[i], ": must be in [0, ", blocks.count,
           "), the blocks of the cache");
}

// Every offset must fit in 63 bits.
inline void check_geometry(const char* count_name, std::int64_t count, std::int64_t block_bytes) {
    if (block_bytes <= 0) refuse("block_bytes is ", block_bytes, ": must be positive");
    if (count < 0) refuse(count_name, " is ", count, ": must not be negative");
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(count, block_bytes, &bytes))
        refuse(count_name, " is ", count, " of ", block_bytes, " bytes each: more than 2**63 - 1 bytes");
}

// Adds a run, or extends the last one if both sides continue.
inline void append_run(std::vector<Run>& runs, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, bool merge) {
    if (merge && !runs.empty()) {
        Run& last = runs.back();
        if (last.dst + last.bytes == dst && last.src + last.bytes == src) {
            last.bytes += bytes;
            return;
        }
    }
    // By field: copying a temporary stalls store forwarding and doubles a plan's time.
    Run& run = runs.emplace_back();
    run.dst = dst;
    run.src = src;
    run.bytes = bytes;
}

inline bool moves_nothing(const Blocks& dst, const Blocks& src, std::size_t i, bool alias) {
    return alias && dst[i] == src[i];
}

// True if another order of the pairs could leave other bytes (interface R26).
inline bool order_shows(const Blocks& dst, const Blocks& src, bool alias) {
    if (dst.size < 2) return false;
    BlockSet written(static_cast<std::uint64_t>(dst.count), dst.size);
    for (std::size_t i = 0; i < dst.size; ++i)
        if (!moves_nothing(dst, src, i, alias) && !written.insert(dst[i])) return true;
    if (!alias) return false;
    for (std::size_t i = 0; i < src.size; ++i)
        if (!moves_nothing(dst, src, i, alias) && written.contains(src[i])) return true;
    return false;
}

inline RunList plan_blocks(const Blocks& dst, const Blocks& src, std::int64_t block_bytes, bool alias) {
    check_geometry("dst_count", dst.count, block_bytes);
    check_geometry("src_count", src.count, block_bytes);
    if (dst.size != src.size)
        refuse(dst.name, " has ", dst.size, " blocks and ", src.name, " has ", src.size, ": must be equally long");
    check_blocks(dst);
    check_blocks(src);
    RunList plan;
    plan.ordered = order_shows(dst, src, alias);
    plan.runs.reserve(dst.size);
    const auto bytes = static_cast<std::uint64_t>(block_bytes);
    for (std::size_t i = 0; i < dst.size; ++i)
        if (!moves_nothing(dst, src, i, alias))
            append_run(plan.runs, dst[i] * bytes, src[i] * bytes, bytes, !plan.ordered);
    return plan;
}

struct Row {
    std::int64_t offset;
    std::int64_t bytes;
};

inline void check_row(const Row& row) {
    if (row.offset < 0) refuse("src_offset is ", row.offset, ": must not be negative");
    if (row.bytes < 0) refuse("src_bytes is ", row.bytes, ": must not be negative");
    std::int64_t end = 0;
    if (__builtin_add_overflow(row.offset, row.bytes, &end))
        refuse("src_offset is ", row.offset, " and src_bytes ", row.bytes, ": end beyond 2**63 - 1");
}

inline void check_pieces(const Blocks& dst, const Row& row, std::int64_t block_bytes) {
    const std::uint64_t pieces = static_cast<std::uint64_t>(row.bytes / block_bytes + (row.bytes % block_bytes != 0));
    if (dst.size > pieces)
        refuse(dst.name, " has ", dst.size, " blocks: ", dst.name, "[", pieces,
               "] would start at or beyond the end of the ", row.bytes, " source bytes (", pieces, " pieces of ",
               block_bytes, ")");
}

inline bool repeats(const Blocks& blocks) {
    if (blocks.size < 2) return false;
    BlockSet seen(static_cast<std::uint64_t>(blocks.count), blocks.size);
    for (std::size_t i = 0; i < blocks.size; ++i)
        if (!seen.insert(blocks[i])) return true;
    return false;
}

inline RunList plan_pieces(const Blocks& dst, const Row& row, std::int64_t block_bytes) {
    check_geometry("dst_count", dst.count, block_bytes);
    check_row(row);
    check_pieces(dst, row, block_bytes);
    check_blocks(dst);
    RunList plan;
    plan.ordered = repeats(dst);
    plan.runs.reserve(dst.size);
    const auto bytes = static_cast<std::uint64_t>(block_bytes);
    for (std::size_t i = 0; i < dst.size; ++i) {
        const std::uint64_t start = i * bytes;  // below row.bytes
        const std::uint64_t length = std::min(bytes, static_cast<std::uint64_t>(row.bytes) - start);
        append_run(plan.runs, dst[i] * bytes, static_cast<std::uint64_t>(row.offset) + start, length, !plan.ordered);
    }
    return plan;
}

inline RunList plan_row(std::int64_t dst_offset, std::int64_t src_offset, std::int64_t length) {
    if (dst_offset < 0) refuse("dst_offset is ", dst_offset, ": must not be negative");
    if (src_offset < 0) refuse("src_offset is ", src_offset, ": must not be negative");
    if (length < 0) refuse("length is ", length, ": must not be negative");
    RunList plan;
    plan.runs.push_back({static_cast<std::uint64_t>(dst_offset), static_cast<std::uint64_t>(src_offset),
                         static_cast<std::uint64_t>(length)});
    return plan;
}

}  // namespace datadist
