// The documented names, types, order, defaults and values, as a program sees them. It stands in for the
// library, and so sees what the header passes for every default.
#include <llm_datadist/llm_datadist.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

using namespace llm_datadist;

template <typename A, typename B>
constexpr bool same() {
    return std::is_same<A, B>::value;
}

constexpr bool equal(const char* a, const char* b) {
    while (*a != 0 && *a == *b) ++a, ++b;
    return *a == *b;
}

template <typename Struct, typename... Types>
constexpr bool has(Types Struct::*...) {
    return true;
}

using Dist = LlmDataDist;
using Options = std::map<AscendString, AscendString>;
using Clusters = std::vector<ClusterInfo>;
using Blocks = std::vector<uint64_t>;

static_assert(same<Status, uint32_t>(), "");
static_assert(LLM_SUCCESS == 0 && LLM_FAILED == 0xFFFFFFFF && LLM_WAIT_PROC_TIMEOUT == 0x5010B001, "");
static_assert(LLM_KV_CACHE_NOT_EXIST == 0x5010B002 && LLM_PARAM_INVALID == 0x5010B005, "");
static_assert(LLM_NOT_YET_LINK == 0x5010B007 && LLM_ALREADY_LINK == 0x5010B008 && LLM_LINK_FAILED == 0x5010B009, "");
static_assert(LLM_UNLINK_FAILED == 0x5010B00A && LLM_NOTIFY_PROMPT_UNLINK_FAILED == 0x5010B00B, "");
static_assert(LLM_CLUSTER_NUM_EXCEED_LIMIT == 0x5010B00C && LLM_PROCESSING_LINK == 0x5010B00D, "");
static_assert(LLM_DEVICE_OUT_OF_MEMORY == 0x5010B00E && LLM_EXIST_LINK == 0x5010B018, "");
static_assert(LLM_FEATURE_NOT_ENABLED == 0x5010B019 && LLM_TIMEOUT == 0x5010B01A && LLM_LINK_BUSY == 0x5010B01B, "");
static_assert(LLM_OUT_OF_MEMORY == 0x5010B01C && same<decltype(LLM_TIMEOUT), const Status>(), "");
static_assert(LLM_SUSPECT_REMOTE_ERROR == 507057, "");

static_assert(equal(OPTION_LISTEN_IP_INFO, "llm.ListenIpInfo") && equal(OPTION_DEVICE_ID, "llm.DeviceId"), "");
static_assert(equal(OPTION_SYNC_CACHE_WAIT_TIME, "llm.SyncKvCacheWaitTime"), "");
static_assert(equal(OPTION_BUF_POOL_CFG, "llm.BufPoolCfg"), "");
static_assert(equal(OPTION_ENABLE_SET_ROLE, "llm.EnableSwitchRole"), "");
static_assert(equal(OPTION_LOCAL_COMM_RES, "llm.LocalCommRes"), "");
static_assert(equal(OPTION_TRANSFER_BACKEND, "llm.TransferBackend"), "");
static_assert(equal(OPTION_GLOBAL_RESOURCE_CONFIG, "llm.GlobalResourceConfig"), "");

static_assert(same<std::underlying_type<LlmRole>::type, int32_t>(), "");
static_assert(static_cast<int>(LlmRole::kPrompt) == 1 && static_cast<int>(LlmRole::kDecoder) == 2, "");
static_assert(static_cast<int>(LlmRole::kMix) == 3 && static_cast<int>(LlmRole::kEnd) == 4, "");
static_assert(same<std::underlying_type<CachePlacement>::type, uint32_t>(), "");
static_assert(static_cast<int>(CachePlacement::kHost) == 0 && static_cast<int>(CachePlacement::kDevice) == 1, "");
static_assert(DT_FLOAT == 0 && DT_FLOAT16 == 1 && DT_INT8 == 2 && DT_INT32 == 3 && DT_UINT8 == 4 && DT_INT16 == 6, "");
static_assert(DT_UINT16 == 7 && DT_UINT32 == 8 && DT_INT64 == 9 && DT_UINT64 == 10 && DT_DOUBLE == 11, "");
static_assert(DT_BOOL == 12 && DT_STRING == 13 && DT_BF16 == 27 && DT_UNDEFINED == 28, "");

static_assert(has<IpInfo, AscendString, uint16_t, uint8_t[128]>(&IpInfo::ip, &IpInfo::port, &IpInfo::reserved), "");
static_assert(has<ClusterInfo, uint64_t, int32_t, std::vector<IpInfo>, std::vector<IpInfo>, uint8_t[128]>(
                  &ClusterInfo::remote_cluster_id, &ClusterInfo::remote_role_type, &ClusterInfo::local_ip_infos,
                  &ClusterInfo::remote_ip_infos, &ClusterInfo::reserved),
              "");
static_assert(has<CacheIndex, uint64_t, int64_t, uint32_t, uint8_t[128]>(&CacheIndex::cluster_id, &CacheIndex::cache_id,
                                                                         &CacheIndex::batch_index,
                                                                         &CacheIndex::reserved),
              "");
static_assert(has<CacheDesc, CachePlacement, uint32_t, DataType, std::vector<int64_t>, uint8_t[128]>(
                  &CacheDesc::placement, &CacheDesc::num_tensors, &CacheDesc::data_type, &CacheDesc::shape,
                  &CacheDesc::reserved),
              "");
static_assert(has<Cache, int64_t, std::vector<uintptr_t>, CacheDesc, uint8_t[128]>(
                  &Cache::cache_id, &Cache::tensor_addrs, &Cache::cache_desc, &Cache::reserved),
              "");
static_assert(has<KvCacheExtParam, std::pair<int32_t, int32_t>, std::pair<int32_t, int32_t>, uint8_t, uint8_t[127]>(
                  &KvCacheExtParam::src_layer_range, &KvCacheExtParam::dst_layer_range,
                  &KvCacheExtParam::tensor_num_per_layer, &KvCacheExtParam::reserved),
              "");
static_assert(has<RegisterCfg, uint8_t[128]>(&RegisterCfg::reserved), "");

static_assert(!std::is_copy_constructible<Dist>::value && !std::is_copy_assignable<Dist>::value, "");
static_assert(std::is_constructible<Dist, uint64_t, LlmRole>::value, "");
static_assert(same<decltype(&Dist::Initialize), Status (Dist::*)(const Options&)>(), "");
static_assert(same<decltype(&Dist::Finalize), void (Dist::*)()>(), "");
static_assert(same<decltype(&Dist::SetRole), Status (Dist::*)(LlmRole, const Options&)>(), "");
static_assert(
    same<decltype(&Dist::LinkLlmClusters), Status (Dist::*)(const Clusters&, std::vector<Status>&, int32_t)>(), "");
static_assert(
    same<decltype(&Dist::UnlinkLlmClusters), Status (Dist::*)(const Clusters&, std::vector<Status>&, int32_t, bool)>(),
    "");
static_assert(same<decltype(&Dist::AllocateCache), Status (Dist::*)(const CacheDesc&, Cache&)>(), "");
static_assert(same<decltype(&Dist::DeallocateCache), Status (Dist::*)(int64_t)>(), "");
static_assert(same<decltype(&Dist::PullKvCache),
                   Status (Dist::*)(const CacheIndex&, const Cache&, uint32_t, int64_t, const KvCacheExtParam&)>(),
              "");
static_assert(same<decltype(&Dist::PullKvBlocks), Status (Dist::*)(const CacheIndex&, const Cache&, const Blocks&,
                                                                   const Blocks&, const KvCacheExtParam&)>(),
              "");
static_assert(same<decltype(&Dist::CopyKvCache),
                   Status (Dist::*)(const Cache&, const Cache&, uint32_t, uint32_t, uint64_t, int64_t)>(),
              "");
static_assert(same<decltype(&Dist::CopyKvBlocks),
                   Status (Dist::*)(const Cache&, const Cache&, const Blocks&, const std::vector<Blocks>&)>(),
              "");
static_assert(same<decltype(&Dist::PushKvCache),
                   Status (Dist::*)(const Cache&, const CacheIndex&, uint32_t, int64_t, const KvCacheExtParam&)>(),
              "");
static_assert(same<decltype(&Dist::PushKvBlocks), Status (Dist::*)(const Cache&, const CacheIndex&, const Blocks&,
                                                                   const Blocks&, const KvCacheExtParam&)>(),
              "");
static_assert(same<decltype(&Dist::RegisterKvCache),
                   Status (Dist::*)(const CacheDesc&, const Blocks&, const RegisterCfg&, int64_t&)>(),
              "");
static_assert(same<decltype(&Dist::UnregisterKvCache), Status (Dist::*)(int64_t)>(), "");

// What the arguments of the next call must consist of (call.h), at least at their beginning.
Blocks wanted;

uint32_t llm_datadist_call(LldInstance*, LldCall* call) {
    if (!std::equal(wanted.begin(), wanted.end(), call->parts)) {
        std::fprintf(stderr, "%s: other arguments than documented\n", call->method);
        std::exit(1);
    }
    wanted.clear();
    call->count = call->room;
    return LLM_SUCCESS;
}

const char* llm_datadist_last_error() { return ""; }
uint32_t llm_datadist_no_memory() { return LLM_OUT_OF_MEMORY; }

uint64_t at(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// Its reserved bytes come last: given as 99, by default 0.
template <typename Struct>
bool ends(const Struct& of) {
    return of.reserved[0] == 99 && Struct{}.reserved[0] == 0;
}

// Every default argument, and the structs as programs write them.
int main() {
    Dist dist(1, LlmRole::kMix);
    const auto sends = [&](const Blocks& parts) -> Dist& { return wanted = parts, dist; };

    Options options;
    const std::string text = "0";
    options[OPTION_DEVICE_ID] = text.c_str();
    sends({1, at(options.begin()->first.GetString()), at(options.begin()->second.GetString())}).Initialize(options);
    sends({3, 0}).SetRole(LlmRole::kMix);
    sends({3, 1}).SetRole(LlmRole::kMix, {{OPTION_LISTEN_IP_INFO, "127.0.0.1:1"}});

    const IpInfo ip{"127.0.0.1", 26000, {99}};
    const Clusters clusters{{1, 2, {ip}, {ip, {}}, {99}}}, plain_clusters(1);
    const auto &local = clusters[0].local_ip_infos, &remote = clusters[0].remote_ip_infos;
    std::vector<Status> rets;
    sends({1, 1, 2, 1, at(local[0].ip.GetString()), 26000, 2, at(remote[0].ip.GetString()), 26000,
           at(remote[1].ip.GetString()), 0, 1000})
        .LinkLlmClusters(clusters, rets);
    sends({1, 0, 0, 0, 0, 1000, false}).UnlinkLlmClusters(plain_clusters, rets);

    const CacheIndex index{1, 2, 3, {99}};
    const CacheDesc desc{CachePlacement::kHost, 1, DT_INT8, {2}, {99}};
    const Cache cache{4, {5, 6}, desc, {99}}, plain{};
    const KvCacheExtParam ext{{1, 2}, {3, 4}, 5, {99}};
    const RegisterCfg cfg{{99}};
    const Blocks src{1}, dst{2};
    constexpr uint64_t all = UINT64_MAX;  // -1
    int64_t cache_id;
    sends({0, 1, 2, at(desc.shape.data()), 1, at(src.data()), 1}).RegisterKvCache(desc, src, {}, cache_id);
    sends({1, 2, 3, 4, 0, all, all, all, all, all, 2}).PullKvCache(index, cache);
    sends({4, 0, 0, 0, 0, all, all, all, all, all, 2}).PushKvCache(cache, {});
    sends({1, 2, 3, 4, at(src.data()), 1, at(dst.data()), 1, all, all, all, all, 2})
        .PullKvBlocks(index, cache, src, dst);
    sends({4, 1, 2, 3, at(src.data()), 1, at(dst.data()), 1, all, all, all, all, 2})
        .PushKvBlocks(cache, index, src, dst);
    sends({4, 1, 2, 0, at(src.data()), 1, at(dst.data()), 1, 1, 2, 3, 4, 5}).PushKvBlocks(cache, {1, 2}, src, dst, ext);
    sends({4, 4, 0, 0, 0, all}).CopyKvCache(cache, cache);
    sends({4, at(cache.tensor_addrs.data()), 2, 0, 1, 2, at(cache.cache_desc.shape.data()), 1,  // the first cache
           all, at(plain.tensor_addrs.data()), 0, 1, 0, 28, at(plain.cache_desc.shape.data()), 0, at(src.data()), 1, 2})
        .CopyKvBlocks(cache, plain, src, {{2}, {3}});

    AscendString one = "a", two(one), three(std::move(two));
    three = "b";
    if (!(one < three && one != three && three > one && one <= three && three >= one && one == "a")) return 2;
    if (one.GetLength() != 1 || std::string(one.GetString()) != "a") return 3;
    return ends(ip) && ends(clusters[0]) && ends(index) && ends(desc) && ends(cache) && ends(ext) && ends(cfg) ? 0 : 4;
}
