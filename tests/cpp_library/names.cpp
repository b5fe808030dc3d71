// The documented names, types, order, defaults and values, as a program sees them. It only has to compile.
#include <llm_datadist/llm_datadist.h>

#include <type_traits>

using namespace llm_datadist;

template <typename A, typename B>
constexpr bool same() {
    return std::is_same<A, B>::value;
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

static_assert(same<std::underlying_type<LlmRole>::type, int32_t>(), "");
static_assert(static_cast<int>(LlmRole::kPrompt) == 1 && static_cast<int>(LlmRole::kDecoder) == 2, "");
static_assert(static_cast<int>(LlmRole::kMix) == 3 && static_cast<int>(LlmRole::kEnd) == 4, "");
static_assert(same<std::underlying_type<CachePlacement>::type, uint32_t>(), "");
static_assert(static_cast<int>(CachePlacement::kHost) == 0 && static_cast<int>(CachePlacement::kDevice) == 1, "");
static_assert(DT_FLOAT == 0 && DT_FLOAT16 == 1 && DT_INT8 == 2 && DT_INT32 == 3 && DT_UINT8 == 4 && DT_INT16 == 6, "");
static_assert(DT_UINT16 == 7 && DT_UINT32 == 8 && DT_INT64 == 9 && DT_UINT64 == 10 && DT_DOUBLE == 11, "");
static_assert(DT_BOOL == 12 && DT_STRING == 13 && DT_BF16 == 27 && same<decltype(DT_BF16), DataType>(), "");

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

// Every default argument, and the structs as programs write them.
Status use(Dist& dist) {
    Options options;
    const std::string text = "0";
    options[OPTION_DEVICE_ID] = text.c_str();
    for (const char* key :
         {OPTION_LISTEN_IP_INFO, OPTION_SYNC_CACHE_WAIT_TIME, OPTION_BUF_POOL_CFG, OPTION_ENABLE_SET_ROLE,
          OPTION_LOCAL_COMM_RES, OPTION_TRANSFER_BACKEND, OPTION_GLOBAL_RESOURCE_CONFIG})
        options[key] = "";
    AscendString one = "a", two(one), three(std::move(two));
    three = "b";
    if (!(one < three && one != three && three > one && one <= three && three >= one && one == "a")) return LLM_FAILED;
    if (one.GetLength() != 1 || std::string(one.GetString()) != "a") return LLM_FAILED;

    IpInfo ip;
    ip.ip = "127.0.0.1";
    ip.port = 26000;
    ClusterInfo cluster;
    cluster.remote_cluster_id = 1;
    cluster.remote_role_type = 1;
    cluster.local_ip_infos.push_back(ip);
    cluster.remote_ip_infos.emplace_back(std::move(ip));
    CacheIndex index = {}, other{1, 1, 0};
    CacheDesc desc{};
    Cache cache{};
    KvCacheExtParam ext{};
    RegisterCfg cfg{};
    if (ClusterInfo().remote_cluster_id != 0 || ClusterInfo().remote_role_type != 0 || IpInfo().port != 0 ||
        desc.placement != CachePlacement::kDevice || desc.num_tensors != 0 || desc.data_type != DT_UNDEFINED ||
        !desc.shape.empty() || cache.cache_id != -1 || !cache.tensor_addrs.empty() || cfg.reserved[0] != 0 ||
        ext.src_layer_range != std::pair<int32_t, int32_t>(-1, -1) || ext.src_layer_range != ext.dst_layer_range ||
        ext.tensor_num_per_layer != 2 || index.cluster_id != 0)
        return LLM_FAILED;
    std::vector<Status> rets;
    int64_t cache_id;
    return dist.Initialize(options) | dist.SetRole(LlmRole::kMix) | dist.SetRole(LlmRole::kMix, options) |
           dist.SetRole(LlmRole::kMix, {{OPTION_LISTEN_IP_INFO, "127.0.0.1:1"}}) |
           dist.LinkLlmClusters({cluster}, rets) | dist.UnlinkLlmClusters({cluster}, rets, 1000, true) |
           dist.UnlinkLlmClusters({cluster}, rets) | dist.AllocateCache(desc, cache) | dist.DeallocateCache(1) |
           dist.PullKvCache(index, cache) | dist.PullKvBlocks(other, cache, {1}, {2}) |
           dist.PullKvBlocks(other, cache, {1}, {2}, {}) | dist.CopyKvCache(cache, cache) |
           dist.CopyKvBlocks(cache, cache, {1}, {{2}, {3}}) | dist.PushKvCache(cache, index) |
           dist.PushKvBlocks(cache, index, {1}, {2}, ext) | dist.RegisterKvCache(desc, {1, 2}, {}, cache_id) |
           dist.UnregisterKvCache(cache_id);
}
