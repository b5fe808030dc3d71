// Drives the lanes without Python, for the sanitizers: two engines, many threads, every byte compared.
// Built and run by tests/native/drivers.py.
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "lanes/lane_engine.hpp"

using namespace datadist;

namespace {

constexpr std::uint64_t block = 3000;
constexpr std::uint64_t blocks = 400;
constexpr std::int64_t second_ns = 1'000'000'000;

bool sealed = false;  // all lanes from now on

LaneKeys keys_of(int side) {
    LaneKeys keys;
    keys.send.fill(static_cast<char>(1 + side));
    keys.receive.fill(static_cast<char>(2 - side));
    return keys;
}

// Joins two engines by a lane; returns its number at either side.
std::pair<std::uint64_t, std::uint64_t> join(LaneEngine& near, LaneEngine& far) {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    const LaneKeys ours = keys_of(0), theirs = keys_of(1);
    const std::uint64_t lane = near.add_lane(fds[0], sealed ? &ours : nullptr);
    return {lane, far.add_lane(fds[1], sealed ? &theirs : nullptr)};
}

// A tensor and the arrays a CopySide points to.
struct Memory {
    std::vector<char> bytes = std::vector<char>(block * blocks);
    std::uint64_t base = reinterpret_cast<std::uint64_t>(bytes.data());

    Spans spans(const std::vector<Run>& runs, std::uint64_t Run::* offset, bool mapped = true) const {
        std::uint64_t total = 0;
        for (const Run& run : runs) total += run.bytes;
        const CopySide side{&base, 1, static_cast<std::int64_t>(bytes.size()), 0, "side", {-1, mapped}};
        return Spans(side, 1, runs.data(), runs.size(), offset, static_cast<std::int64_t>(total));
    }
};

std::vector<Run> random_runs(std::mt19937& random, std::size_t count) {
    std::vector<std::uint64_t> dst(blocks), src(blocks);
    for (std::uint64_t i = 0; i < blocks; ++i) dst[i] = src[i] = i * block;
    std::shuffle(dst.begin(), dst.end(), random);
    std::shuffle(src.begin(), src.end(), random);
    std::vector<Run> runs;
    for (std::size_t i = 0; i < count; ++i)
        runs.push_back({dst[i], src[i], random() % 7 == 0 ? 0 : block - random() % 9});
    return runs;
}

std::string encode(const std::vector<Run>& runs) {
    return std::string(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(Run));
}

std::vector<Run> decode(const std::string& meta) {
    std::vector<Run> runs(meta.size() / sizeof(Run));
    if (!runs.empty()) std::memcpy(runs.data(), meta.data(), runs.size() * sizeof(Run));
    return runs;
}

// Answers what the peer asks, in a thread of its own.
class Target {
public:
    explicit Target(LaneEngine& engine) : engine_(engine), thread_([this] { run(); }) {}
    ~Target() {
        stop_ = true;
        thread_.join();
        engine_.close();  // before the memory it may still use
    }

    Memory memory;  // read by the peer
    Memory sink;    // written by the peer
    alignas(8) std::uint64_t generation = 7;
    std::atomic<int> refuse_every{0};

private:
    void run() {
        while (!stop_) {
            for (Event& event : engine_.poll_events()) try {
                    answer(event);
                } catch (const RuleError& error) {
                    engine_.refuse_request(event.lane, event.id, 22, error.what());
                }
            std::this_thread::yield();
        }
    }

    void answer(Event& event) {
        if (event.what == Event::What::lost) return;
        const bool write = event.what == Event::What::write;
        if (refuse_every != 0 && ++asked_ % refuse_every == 0)
            return engine_.refuse_request(event.lane, event.id, 77, "not now");
        const bool mapped = event.id % 2 != 0;  // small blocks by a copy, or by the kernel
        Reply reply{event.id,
                    std::make_shared<Payload>(write ? sink.spans(decode(event.text), &Run::dst, mapped)
                                                    : memory.spans(decode(event.text), &Run::src, mapped)),
                    {},
                    static_cast<std::int64_t>(event.lane % 2)};
        reply.guards.add(reinterpret_cast<std::uint64_t>(&generation), __atomic_load_n(&generation, __ATOMIC_ACQUIRE));
        write ? engine_.accept(event.lane, std::move(reply)) : engine_.serve(event.lane, std::move(reply));
    }

    LaneEngine& engine_;
    int asked_ = 0;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

Outcome finish(LaneEngine& engine, std::uint64_t id, std::int64_t budget_ns) {
    if (const auto outcome = engine.wait(id, monotonic_ns() + budget_ns)) return *outcome;
    return engine.give_up(id);
}

void fill(std::vector<char>& bytes, std::mt19937& random) {
    for (char& byte : bytes) byte = static_cast<char>(random());
}

void check_moved(const Memory& dst, const Memory& src, const std::vector<Run>& runs, std::vector<char> before) {
    for (const Run& run : runs) std::memcpy(before.data() + run.dst, src.bytes.data() + run.src, run.bytes);
    CHECK(before == dst.bytes);
}

// Reads by many threads over several lanes at once: each gets exactly its bytes.
void parallel_reads() {
    LaneEngine near(2), far(2);
    Target target(far);
    std::mt19937 random(1);
    fill(target.memory.bytes, random);
    std::vector<std::uint64_t> lanes;
    for (int i = 0; i < 5; ++i) lanes.push_back(join(near, far).first);
    std::vector<std::thread> threads;
    for (unsigned n = 0; n < 4; ++n)
        threads.emplace_back([&, n] {
            std::mt19937 own(n);
            Memory local;
            for (int i = 0; i < 40; ++i) {
                const auto runs = random_runs(own, own() % blocks);
                fill(local.bytes, own);
                const auto before = local.bytes;
                const auto id = near.start(lanes[own() % lanes.size()], Kind::read, encode(runs),
                                           local.spans(runs, &Run::dst, i % 2 != 0));
                const Outcome outcome = finish(near, id, 20 * second_ns);
                CHECK(outcome.ending == Ending::good);
                check_moved(local, target.memory, runs, before);
            }
        });
    for (std::thread& thread : threads) thread.join();
}

// Writes, one at a time, both ways over the same lane.
void writes_both_ways() {
    LaneEngine near(1), far(1);
    Target at_far(far), at_near(near);
    const auto lanes = join(near, far);
    auto push = [](LaneEngine& engine, std::uint64_t lane, Target& target, unsigned seed) {
        std::mt19937 random(seed);
        Memory local;
        for (int i = 0; i < 40; ++i) {
            const auto runs = random_runs(random, random() % blocks);
            fill(local.bytes, random);
            const auto before = target.sink.bytes;
            const auto id = engine.start(lane, Kind::write, encode(runs), local.spans(runs, &Run::src, false));
            CHECK(finish(engine, id, 20 * second_ns).ending == Ending::good);
            check_moved(target.sink, local, runs, before);
        }
    };
    std::thread other([&] { push(far, lanes.second, at_near, 2); });
    push(near, lanes.first, at_far, 1);
    other.join();
}

// Jobs given up at any moment: from then on the local memory is the caller's alone.
void give_ups() {
    LaneEngine near(1), far(1);
    Target target(far);
    target.refuse_every = 5;
    std::mt19937 random(3);
    std::uint64_t lane = 0;
    Memory local;
    int ended[5] = {};
    for (int i = 0; i < 400; ++i) {
        if (i % 8 == 0) lane = join(near, far).first;  // it may have been lost
        const auto runs = random_runs(random, random() % blocks);
        const bool write = random() % 2 != 0;
        const auto id = near.start(lane, write ? Kind::write : Kind::read, encode(runs),
                                   local.spans(runs, write ? &Run::src : &Run::dst));
        const Outcome outcome = finish(near, id, static_cast<std::int64_t>(random() % 2'000'000));
        ++ended[static_cast<int>(outcome.ending)];
        std::memset(local.bytes.data(), 0, local.bytes.size());
        near.poll_events();
        std::this_thread::yield();
        for (const char byte : local.bytes) CHECK(byte == 0);
    }
    std::printf("give_ups: good %d refused %d lost %d timeout %d\n", ended[0], ended[1], ended[2], ended[3]);
    CHECK(ended[0] > 0 && ended[3] > 0);
}

// Memory taken back under running jobs: after quiesce() it is the owner's alone, and nothing is called good.
void quiesces() {
    LaneEngine near(2), far(2);
    Target target(far);
    std::vector<std::uint64_t> lanes;
    for (int i = 0; i < 4; ++i) lanes.push_back(join(near, far).first);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    std::atomic<int> goods{0}, others{0};
    for (unsigned n = 0; n < 4; ++n)
        threads.emplace_back([&, n] {
            std::mt19937 own(n);
            Memory local;
            while (!stop) {
                const auto runs = random_runs(own, own() % blocks);
                const bool write = n % 2 != 0;
                const auto id = near.start(lanes[n], write ? Kind::write : Kind::read, encode(runs),
                                           local.spans(runs, write ? &Run::src : &Run::dst));
                const Outcome outcome = finish(near, id, 20 * second_ns);
                CHECK(outcome.ending != Ending::timeout && outcome.ending != Ending::lost);
                ++(outcome.ending == Ending::good ? goods : others);
            }
        });
    std::mt19937 random(9);
    while (others < 10 || goods < 100) {
        advance_generation(reinterpret_cast<std::uint64_t>(&target.generation));
        far.quiesce(0);
        far.quiesce(1);
        // Replies made meanwhile carry the new generation: this one is for those before it only.
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    std::printf("quiesces: good %d others %d\n", goods.load(), others.load());
}

// Lanes dropped under their jobs, at either side; then the engines closed under the rest.
void drops() {
    auto near = std::make_unique<LaneEngine>(2);
    auto far = std::make_unique<LaneEngine>(1);  // one: all lanes write the same memory
    {
        Target target(*far);
        std::mt19937 random(5);
        Memory local;
        const auto runs = random_runs(random, blocks);
        for (int i = 0; i < 100; ++i) {
            const auto [lane, other] = join(*near, *far);
            const auto id = near->start(lane, Kind::read, encode(runs), local.spans(runs, &Run::dst));
            i % 2 != 0 ? near->drop_lane(lane) : far->drop_lane(other);
            const Outcome outcome = finish(*near, id, 20 * second_ns);
            CHECK(outcome.ending == Ending::lost || outcome.ending == Ending::good);
        }
        for (int i = 0; i < 50; ++i) {
            near->start(join(*near, *far).first, Kind::write, encode(runs), local.spans(runs, &Run::src));
        }
        near->close();
    }
    far->close();
}

template <typename Error, typename Call>
std::string text_of_error(Call&& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

// What nobody can wait for: the last record of a key.
void last_record() {
    const auto key = keys_of(0).send;
    RecordCipher seals(key, true, max_records - 1), opens(key, false, max_records - 1);
    char length[length_bytes] = {3}, body[3] = {'a', 'b', 'c'}, tag[tag_bytes];
    seals.begin(length);
    seals.update(body, body, sizeof body);
    seals.write_tag(tag);
    CHECK(std::memcmp(body, "abc", 3) != 0);
    opens.begin(length);
    opens.update(body, body, sizeof body);
    opens.check_tag(tag);
    CHECK(std::memcmp(body, "abc", 3) == 0);
    const std::string over = "all 2**32 records of an encrypted lane's key are used";
    CHECK(text_of_error<LaneError>([&] { seals.begin(length); }) == over);
    CHECK(text_of_error<LaneError>([&] { opens.begin(length); }) == over);
}

void no_library() {
    const auto why = text_of_error<RuleError>([] { const Libcrypto none("libno-such-crypto.so.3"); });
    CHECK(why.find("keys: encrypted lanes need OpenSSL 3, and libno-such-crypto.so.3 cannot be used: ") == 0);
    const auto other = text_of_error<RuleError>([] { const Libcrypto wrong("libc.so.6"); });
    CHECK(other.find("EVP_CIPHER_CTX_new") != std::string::npos);
}

}  // namespace

int main() {
    end_if_it_hangs();
    no_library();
    last_record();
    for (const bool seals : {false, true}) {
        sealed = seals;
        parallel_reads();
        writes_both_ways();
        give_ups();
        quiesces();
        drops();
    }
    std::puts("all is well");
}
