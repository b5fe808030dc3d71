// A library of a program in Python, which calls LLM-DataDist from C++, also while that interpreter ends.
#include <llm_datadist/llm_datadist.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>

using namespace llm_datadist;

namespace {

struct Program {
    std::unique_ptr<LlmDataDist> dist{new LlmDataDist(1, LlmRole::kMix)};
    Cache cache;
    std::thread copying;
    std::atomic<int> copied{0};

    Status copy() { return dist->CopyKvBlocks(cache, cache, {1}, {{2}}); }

    ~Program() {
        if (!copying.joinable()) return;
        copying.join();
        std::printf("then 0x%08x %s\n", copy(), LastError());
        dist.reset();
        std::puts("over");
    }
} program;

}  // namespace

extern "C" {

Status begin(const char* pool) {
    const Status status = program.dist->Initialize({{OPTION_DEVICE_ID, "0"}, {"llm.MemPoolConfig", pool}});
    if (status != LLM_SUCCESS) return status;
    CacheDesc desc;
    desc.num_tensors = 2;
    desc.data_type = DT_INT32;
    desc.shape = {4, 4};
    const Status made = program.dist->AllocateCache(desc, program.cache);
    if (made != LLM_SUCCESS) return made;
    auto* first = reinterpret_cast<int32_t*>(program.cache.tensor_addrs[0]);
    for (int i = 0; i < 16; ++i) first[i] = i;
    return LLM_SUCCESS;
}

Status copy() { return program.copy(); }

Status link_to(uint16_t port) {
    IpInfo there, here;
    there.ip = here.ip = "127.0.0.1";
    there.port = port;
    ClusterInfo info;
    info.local_ip_infos = {here};
    info.remote_ip_infos = {there};
    std::vector<Status> rets;
    return program.dist->LinkLlmClusters({info}, rets, 60000);
}

int value(int i) { return reinterpret_cast<const int32_t*>(program.cache.tensor_addrs[0])[i]; }

const char* reason() { return LastError(); }

// Copies in a thread of its own, until that fails.
void keep_copying() {
    program.copying = std::thread([] {
        while (program.copy() == LLM_SUCCESS) ++program.copied;
        std::printf("0x%08x %s\n", program.copy(), LastError());
    });
    while (program.copied < 10) std::this_thread::yield();
}
}
