// The library that C++ programs link, over doubles of the interpreter and of the engine: want of memory, sixteen
// threads, and the interpreter's end.
#include <functional>
#include <map>
#include <new>
#include <vector>

#include "../../src/llm_datadist/cpp/library.cpp"
#include "check.hpp"
#include "llm_datadist/llm_datadist.h"
#include "python/attached.hpp"

using namespace llm_datadist;

static thread_local long until_one_fails = -1;  // allocations of the thread; -1: none fails

__attribute__((noinline)) void* operator new(std::size_t size) {
    void* made = until_one_fails == 0 ? nullptr : std::malloc(size);
    if (until_one_fails > 0) --until_one_fails;
    if (made == nullptr) throw std::bad_alloc();
    return made;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

std::mutex gil;
thread_local int ensured = 0;  // more often than released; at 0 the thread's state is freed
thread_local bool holds = false;
std::atomic<bool> ended{false};
std::atomic<int> made{0}, alive{0}, calls{0};

std::map<std::uint64_t, int> counts;  // under the lock
constexpr std::uint32_t refused = 0x5010B005;

std::uint32_t double_of_engine(LldInstance* instance, LldCall* call, char* text, std::size_t capacity) {
    const datadist::Attached attached;
    if (!attached) {
        snprintf(text, capacity, "ended");
        return 0xFFFFFFFF;
    }
    ++calls;
    int& count = counts[instance->cluster_id];
    const std::string method = call->method;
    if (method == "Initialize") instance->object = &count;
    if (method.empty()) instance->object = nullptr;
    if (method == "PullKvBlocks") {
        const auto* src = reinterpret_cast<const std::uint64_t*>(call->parts[4]);  // after the index and an id
        count += *src == *reinterpret_cast<const std::uint64_t*>(call->parts[6]);
        snprintf(text, capacity, "block %d", static_cast<int>(*src));
        return refused;
    }
    if (method == "LinkLlmClusters") {
        PyEval_SaveThread();
        usleep(5000);  // as a call that waits for its peer
        PyEval_RestoreThread(nullptr);
        CHECK(call->room == call->parts[0]);
        while (call->count < call->room) call->results[call->count++] = 7;
        return 7;
    }
    if (method == "AllocateCache" || method == "RegisterKvCache") {
        CHECK(call->room == (method == "AllocateCache" ? 3U : 1U));
        for (const std::uint64_t each : {7, 4096, 8192})
            if (call->count < call->room) call->results[call->count++] = each;
    }
    return LLM_SUCCESS;
}

void take() {
    gil.lock();
    CHECK(!ended);  // a thread that waits for the lock then never comes back
    holds = true;
}

void give() {
    holds = false;
    gil.unlock();
}

}  // namespace

extern "C" {

int Py_IsInitialized() { return 1; }
PyObject* PyImport_ImportModule(const char*) { return reinterpret_cast<PyObject*>(&gil); }
void* PyCapsule_Import(const char*, int) { return reinterpret_cast<void*>(&double_of_engine); }
PyThreadState* PyGILState_GetThisThreadState() {
    return ensured > 0 ? reinterpret_cast<PyThreadState*>(&ensured) : nullptr;
}
PyGILState_STATE PyGILState_Ensure() {
    const bool held = holds;
    if (!held) take();
    if (ensured++ == 0) ++made, ++alive;
    return held ? PyGILState_LOCKED : PyGILState_UNLOCKED;
}
void PyGILState_Release(PyGILState_STATE before) {
    if (--ensured == 0) --alive;
    if (before == PyGILState_UNLOCKED) give();
}
PyThreadState* PyEval_SaveThread() {
    give();
    return nullptr;
}
void PyEval_RestoreThread(PyThreadState*) { take(); }

}  // extern "C"

namespace {

// Calls until they are refused for the interpreter's end.
void call(LlmDataDist& shared, std::uint64_t i, std::atomic<int>& begun) {
    LlmDataDist own(100 + i, LlmRole::kMix);
    CHECK(own.Initialize({{OPTION_DEVICE_ID, "0"}}) == LLM_SUCCESS);
    CHECK(shared.Initialize({}) == LLM_SUCCESS);
    ++begun;
    const std::string mine = "block " + std::to_string(i);
    while (true) {
        std::vector<Status> rets;
        const Status linked = own.LinkLlmClusters({{}, {}}, rets);
        CHECK(linked == LLM_FAILED || (linked == 7 && rets == std::vector<Status>(2, 7)));
        const Status pulled = shared.PullKvBlocks({}, {}, {i}, {i});
        CHECK(pulled == LLM_FAILED || (pulled == refused && LastError() == mine));
        if (pulled == LLM_FAILED) break;
        std::thread([&] { shared.PullKvBlocks({}, {}, {99}, {99}); }).join();
    }
    CHECK(std::string(LastError()) == "ended");
}

// Every call of an instance, with one allocation after the other failing, until none does.
void starve(LlmDataDist& dist) {
    std::vector<ClusterInfo> clusters(2);
    clusters[0].remote_ip_infos.resize(2);
    const std::map<AscendString, AscendString> options{{OPTION_DEVICE_ID, "0"}};
    const std::vector<uint64_t> blocks{1, 2};
    const std::vector<std::vector<uint64_t>> lists{blocks, blocks};
    std::vector<Status> rets;
    int64_t id = -1;
    CacheDesc desc;
    desc.num_tensors = 2;
    desc.shape = {4, 4};
    Cache cache;
    const std::function<Status()> calls[] = {
        [&] { return dist.Initialize(options); },
        [&] { return dist.SetRole(LlmRole::kMix, options); },
        [&] { return dist.LinkLlmClusters(clusters, rets) == 7 ? LLM_SUCCESS : LLM_OUT_OF_MEMORY; },
        [&] { return dist.UnlinkLlmClusters(clusters, rets, 1, true); },
        [&] { return dist.AllocateCache(desc, cache); },
        [&] { return dist.RegisterKvCache(desc, blocks, {}, id); },
        [&] { return dist.PullKvCache({}, cache); },
        [&] { return dist.PullKvBlocks({}, cache, blocks, blocks) == refused ? LLM_SUCCESS : LLM_OUT_OF_MEMORY; },
        [&] { return dist.PushKvCache(cache, {}); },
        [&] { return dist.PushKvBlocks(cache, {}, blocks, blocks); },
        [&] { return dist.CopyKvCache(cache, cache); },
        [&] { return dist.CopyKvBlocks(cache, cache, blocks, lists); },
        [&] { return dist.UnregisterKvCache(7); },
        [&] { return dist.DeallocateCache(7); },
    };
    for (const auto& each : calls) {
        Status status = LLM_OUT_OF_MEMORY;
        long failing = 0;
        for (; status == LLM_OUT_OF_MEMORY; ++failing) {
            until_one_fails = failing;
            status = each();
            until_one_fails = -1;
            CHECK(status != LLM_OUT_OF_MEMORY || std::string(LastError()).find("no memory") != std::string::npos);
        }
        CHECK(status == LLM_SUCCESS && failing > 1);
    }
    CHECK(id == 7 && cache.cache_id == 7 && cache.tensor_addrs == (std::vector<uintptr_t>{4096, 8192}));
    CHECK(rets == std::vector<Status>() && cache.cache_desc.shape == desc.shape);
}

}  // namespace

int main() {
    end_if_it_hangs();
    LlmDataDist shared(1, LlmRole::kMix);
    CHECK(shared.PullKvBlocks({}, {}, {1}, {1}) == LLM_FAILED);  // not loaded: nothing of Python has been called
    CHECK(made == 0);
    CHECK(shared.Initialize({}) == LLM_SUCCESS);
    starve(shared);
    std::atomic<int> begun{0};
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 16; ++i) threads.emplace_back([&, i] { call(shared, i, begun); });
    while (begun < 16 || calls < 2000) std::this_thread::yield();
    PyGILState_Ensure();
    datadist::Attached::close();
    ended = true;
    give();
    for (std::thread& each : threads) each.join();
    CHECK(shared.Initialize({}) == LLM_FAILED);
    CHECK(counts[1] > 16 && made < calls);
    CHECK(alive <= 19);  // those of threads that have ended before are freed
    std::printf("%d calls, %d thread states\n", calls.load(), made.load());
}
