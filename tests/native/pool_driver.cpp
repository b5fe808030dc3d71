// Drives the copy pool and the planner without Python, for the sanitizers: several callers share one pool, and every
// byte is compared, inside and outside of what a plan addresses. Built and run by tests/native/drivers.py.
//
//   pool_driver [rounds]
//
// The memory is plain: the thread sanitizer sees a race wherever a copy still touches it after its call returned.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "copy/copy.hpp"
#include "copy/plan.hpp"
#include "copy/pool.hpp"
#include "copy/process.hpp"

using namespace datadist;

namespace {

constexpr std::int64_t never = INT64_MAX;
constexpr std::int64_t block = 8 << 10;
constexpr std::int64_t blocks = 160;  // of a tensor: two tensors are enough to be shared, sixteen to be streamed
constexpr std::int64_t extent = block * blocks;

using Random = std::mt19937_64;
using Tensors = std::vector<std::vector<char>>;

// The tensors of one side, each with a margin before and behind it that no plan addresses.
struct Memory {
    static constexpr std::size_t margin = 64;

    explicit Memory(std::size_t tensors) {
        for (std::size_t n = 0; n < tensors; ++n) bytes.emplace_back(extent + 2 * margin);
        for (auto& tensor : bytes) bases.push_back(reinterpret_cast<std::uint64_t>(tensor.data() + margin));
    }

    // Different in every word, and from one seed to the next.
    void fill(std::uint64_t seed) {
        for (auto& tensor : bytes)
            for (std::size_t at = 0; at + 8 <= tensor.size(); at += 8) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                std::memcpy(&tensor[at], &seed, 8);
            }
    }

    CopySide side(const char* name) const { return {bases.data(), bases.size(), extent, 0, name}; }

    Memory(const Memory&) = delete;  // the bases are of these very bytes
    Memory& operator=(const Memory&) = delete;

    Tensors bytes;
    std::vector<std::uint64_t> bases;
};

struct Pairs {
    std::vector<std::int64_t> dst, src;
};

Blocks named(const std::vector<std::int64_t>& values, const char* name) {
    return {values.data(), values.size(), blocks, name};
}

std::vector<std::int64_t> some_blocks(Random& random, std::size_t count, bool repeated) {
    std::vector<std::int64_t> all(blocks);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    all.resize(count);
    if (repeated)
        for (auto& each : all) each = static_cast<std::int64_t>(random() % blocks);
    return all;
}

Pairs random_pairs(Random& random, bool repeated) {
    const std::size_t count = random() % (blocks + 1);
    return {some_blocks(random, count, repeated), some_blocks(random, count, random() % 2 == 0)};
}

// What the pairs say, one block after the other, without the planner and without the executor.
void move_slowly(const Pairs& pairs, Tensors& dst, const Tensors& src) {
    for (std::size_t tensor = 0; tensor < dst.size(); ++tensor)
        for (std::size_t i = 0; i < pairs.dst.size(); ++i)
            std::memmove(dst[tensor].data() + Memory::margin + pairs.dst[i] * block,
                         src[tensor].data() + Memory::margin + pairs.src[i] * block, block);
}

Copy copy_of(const RunList& plan, const Memory& dst, const Memory& src) {
    return {dst.side("dst"), src.side("src"), dst.bytes.size(), plan.runs.data(), plan.runs.size(), plan.ordered};
}

std::int64_t bytes_of(const RunList& plan, const Memory& memory) {
    std::uint64_t total = 0;
    for (const Run& run : plan.runs) total += run.bytes;
    return static_cast<std::int64_t>(total * memory.bytes.size());
}

std::uint64_t move(const RunList& plan, const Memory& dst, const Memory& src, CopyPool* pool, std::int64_t deadline) {
    const Copy copy = copy_of(plan, dst, src);
    const std::uint64_t each = check(copy, static_cast<std::int64_t>(copy.pairs), bytes_of(plan, dst));
    return execute(copy, each, pool, {deadline});
}

// Between two memories, or inside one (alias); `repeated` blocks make the plan ordered.
void one_copy(Random& random, Memory& dst, Memory& src, CopyPool* pool, bool alias, bool repeated) {
    dst.fill(random());
    src.fill(random());
    const Memory& from = alias ? dst : src;
    const Pairs pairs = random_pairs(random, repeated);
    const RunList plan = plan_blocks(named(pairs.dst, "dst"), named(pairs.src, "src"), block, alias);
    Tensors expected = dst.bytes;
    const Tensors unchanged = src.bytes;
    move_slowly(pairs, expected, alias ? expected : src.bytes);
    CHECK(move(plan, dst, from, pool, never) == static_cast<std::uint64_t>(bytes_of(plan, dst)));
    CHECK(dst.bytes == expected);
    CHECK(src.bytes == unchanged);
}

// Pieces that cost nothing, so that the pool itself is all there is to do.
class Counting final : public Task {
public:
    explicit Counting(int pieces) : left_(pieces) {}

    void run() noexcept override {
        while (left_.fetch_sub(1, std::memory_order_relaxed) > 0) done_.fetch_add(1, std::memory_order_relaxed);
    }

    bool exhausted() const noexcept override { return left_.load(std::memory_order_relaxed) <= 0; }

    int done() const { return done_.load(std::memory_order_relaxed); }

private:
    std::atomic<int> left_;
    std::atomic<int> done_{0};
};

template <typename Work>
void by_many(unsigned callers, Work work) {
    std::vector<std::thread> threads;
    for (unsigned n = 0; n < callers; ++n) threads.emplace_back([n, &work] { work(n); });
    for (std::thread& thread : threads) thread.join();
}

// Several callers, one pool: small and large copies, ordered and shared ones, between memories and inside one.
void callers_share_a_pool(int rounds) {
    CopyPool pool(3);
    by_many(4, [&](unsigned n) {
        Random random(n);
        Memory dst(n == 0 ? 16 : 2), src(n == 0 ? 16 : 2);  // the first is large enough for streaming stores
        for (int i = 0; i < (n == 0 ? rounds / 4 + 1 : rounds); ++i)
            one_copy(random, dst, src, &pool, random() % 3 == 0, random() % 3 == 0);
    });
}

// Tasks on the stacks of their callers, gone as soon as share() returns.
void quick_tasks(int rounds) {
    CopyPool pool(4);
    by_many(4, [&](unsigned n) {
        for (int i = 0; i < rounds * 100; ++i) {
            const int pieces = static_cast<int>((static_cast<unsigned>(i) + n) % 50);
            Counting task(pieces);
            pool.share(task);
            CHECK(task.done() == pieces);
        }
    });
}

// Closed by two at once while others copy: whatever is under way ends whole, and later calls copy alone.
void closed_during_work(int rounds) {
    for (int round = 0; round < rounds; ++round) {
        CopyPool pool(3);
        std::atomic<int> begun{0};
        by_many(4, [&](unsigned n) {
            Random random(static_cast<unsigned>(round) * 8 + n);
            if (n < 2) {
                while (begun < 3) std::this_thread::yield();
                pool.close();
                CHECK(pool.closed());
                return;
            }
            Memory dst(2), src(2);
            for (int i = 0; i < 4; ++i) {
                ++begun;
                one_copy(random, dst, src, &pool, false, false);
            }
        });
    }
}

// No word has a third content: each is what it was or what it is to be.
void check_nothing_else(const Tensors& now, const Tensors& before, const Tensors& after) {
    for (std::size_t tensor = 0; tensor < now.size(); ++tensor)
        for (std::size_t at = 0; at < now[tensor].size(); at += 8) {
            const char* word = &now[tensor][at];
            CHECK(std::memcmp(word, &after[tensor][at], 8) == 0 || std::memcmp(word, &before[tensor][at], 8) == 0);
        }
}

// Late copies end early; and from the return on the memory is the caller's alone.
void deadlines(int rounds) {
    CopyPool pool(3);
    std::atomic<int> whole{0}, cut{0};
    by_many(3, [&](unsigned n) {
        Random random(n + 50);
        Memory dst(3), src(3);
        for (int i = 0; i < rounds; ++i) {
            dst.fill(random());
            src.fill(random());
            const Pairs pairs = random_pairs(random, i % 4 == 0);
            const RunList plan = plan_blocks(named(pairs.dst, "dst"), named(pairs.src, "src"), block, false);
            const Tensors before = dst.bytes;
            Tensors expected = dst.bytes;
            move_slowly(pairs, expected, src.bytes);
            timespec now{};
            clock_gettime(CLOCK_MONOTONIC, &now);
            const std::int64_t deadline = now.tv_sec * 1'000'000'000 + now.tv_nsec + random() % 800'000 - 100'000;
            const std::uint64_t done = move(plan, dst, src, &pool, deadline);
            const auto all = static_cast<std::uint64_t>(bytes_of(plan, dst));
            CHECK(done <= all);
            ++(done == all ? whole : cut);
            if (done == all) CHECK(dst.bytes == expected);
            if (!plan.ordered) check_nothing_else(dst.bytes, before, expected);
            dst.fill(0);
            const Tensors mine = dst.bytes;
            std::this_thread::yield();
            CHECK(dst.bytes == mine);
        }
    });
    std::printf("deadlines: %d whole, %d cut\n", whole.load(), cut.load());
    CHECK(whole > 0 && cut > 0);
}

bool ends_well(pid_t child) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// What a forked child does: copy alone, close what is not its own, end. False when the bytes are wrong.
bool use_in_child(std::unique_ptr<CopyPool> pool, const RunList& plan, const Memory& dst, const Memory& src) {
    alarm(60);  // a lock that was held in the parent is held here for ever
    move(plan, dst, src, pool.get(), never);
    bool same = true;
    for (std::size_t n = 0; n < dst.bytes.size(); ++n)
        same &= std::memcmp(dst.bytes[n].data() + Memory::margin, src.bytes[n].data() + Memory::margin, extent) == 0;
    pool->close();
    return same && pool->closed();
}

// Children of a process whose pool is busy, most of the time with its lock held.
void forked_children(int rounds) {
    auto pool = std::make_unique<CopyPool>(3);
    std::atomic<bool> stop{false};
    std::atomic<long> shared{0};
    std::vector<std::thread> busy;
    for (int n = 0; n < 3; ++n)
        busy.emplace_back([&stop, &shared, use = pool.get()] {
            for (; !stop; ++shared) {
                Counting task(1);
                use->share(task);
            }
        });
    Memory dst(2), src(2);
    src.fill(71);
    const RunList plan = plan_row(0, 0, extent);
    for (int round = 0; round < rounds; ++round) {
        const long before = shared;
        while (shared == before) std::this_thread::yield();
        dst.fill(72);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(use_in_child(std::move(pool), plan, dst, src) ? 0 : 1);
        CHECK(ends_well(child));
    }
    stop = true;
    for (std::thread& thread : busy) thread.join();
}

// The other executor over the same pool: this process is its own peer. A range that is not there fails one call alone.
void between_processes(int rounds) {
    CopyPool pool(3);
    by_many(3, [&](unsigned n) {
        Random random(n + 90);
        Memory dst(2), src(2);
        for (int i = 0; i < rounds; ++i) {
            dst.fill(random());
            src.fill(random());
            const Pairs pairs = random_pairs(random, false);
            const RunList plan = plan_blocks(named(pairs.dst, "dst"), named(pairs.src, "src"), block, false);
            Tensors expected = dst.bytes;
            move_slowly(pairs, expected, src.bytes);
            const Copy copy = copy_of(plan, dst, src);
            const std::uint64_t each = check(copy, 2, bytes_of(plan, dst));
            CHECK(execute_process(copy, each, {getpid(), i % 2 == 0}, &pool, {never}) == each * 2);
            CHECK(dst.bytes == expected);
            const std::uint64_t nowhere[] = {4096, 4096};
            const Copy broken{
                dst.side("dst"), {nowhere, 2, extent, 0, "src"}, 2, plan.runs.data(), plan.runs.size(), false};
            bool failed = each == 0;
            try {
                execute_process(broken, each, {getpid(), false}, &pool, {never});
            } catch (const ProcessError& error) {
                failed = error.code == EFAULT;
            }
            CHECK(failed);
            CHECK(dst.bytes == expected);
        }
    });
}

}  // namespace

int main(int argc, char** argv) {
    end_if_it_hangs();
    watch_forks();
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 40;
    quick_tasks(rounds);
    callers_share_a_pool(rounds);
    closed_during_work(rounds / 4 + 1);
    deadlines(rounds);
    forked_children(rounds / 4 + 1);
    between_processes(rounds);
    std::puts("all is well");
}
