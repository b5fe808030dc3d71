// LLM-DataDist for C++ programs: link with libllm_datadist.so. docs/cpp.md describes the calls.
//
// C++14. Everything here is inline; nothing of the C++ library crosses into the shared library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llm_datadist/call.h"

namespace llm_datadist {

using Status = uint32_t;

constexpr Status LLM_SUCCESS = 0;
constexpr Status LLM_FAILED = 0xFFFFFFFF;
constexpr Status LLM_WAIT_PROC_TIMEOUT = 0x5010B001;
constexpr Status LLM_KV_CACHE_NOT_EXIST = 0x5010B002;
constexpr Status LLM_PARAM_INVALID = 0x5010B005;
constexpr Status LLM_NOT_YET_LINK = 0x5010B007;
constexpr Status LLM_ALREADY_LINK = 0x5010B008;
constexpr Status LLM_LINK_FAILED = 0x5010B009;
constexpr Status LLM_UNLINK_FAILED = 0x5010B00A;
constexpr Status LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B;
constexpr Status LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C;
constexpr Status LLM_PROCESSING_LINK = 0x5010B00D;
constexpr Status LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E;
constexpr Status LLM_EXIST_LINK = 0x5010B018;
constexpr Status LLM_FEATURE_NOT_ENABLED = 0x5010B019;
constexpr Status LLM_TIMEOUT = 0x5010B01A;
constexpr Status LLM_LINK_BUSY = 0x5010B01B;
constexpr Status LLM_OUT_OF_MEMORY = 0x5010B01C;
constexpr Status LLM_SUSPECT_REMOTE_ERROR = 507057;  // the peer died; an extension

constexpr const char OPTION_LISTEN_IP_INFO[] = "llm.ListenIpInfo";
constexpr const char OPTION_DEVICE_ID[] = "llm.DeviceId";
constexpr const char OPTION_SYNC_CACHE_WAIT_TIME[] = "llm.SyncKvCacheWaitTime";
constexpr const char OPTION_BUF_POOL_CFG[] = "llm.BufPoolCfg";
constexpr const char OPTION_ENABLE_SET_ROLE[] = "llm.EnableSwitchRole";
constexpr const char OPTION_LOCAL_COMM_RES[] = "llm.LocalCommRes";
constexpr const char OPTION_TRANSFER_BACKEND[] = "llm.TransferBackend";
constexpr const char OPTION_GLOBAL_RESOURCE_CONFIG[] = "llm.GlobalResourceConfig";

// Reason of this thread's last failed call, or "". Valid until the thread's next call. An extension.
inline const char* LastError() { return llm_datadist_last_error(); }

class AscendString {
public:
    AscendString() = default;
    AscendString(const char* text) : text_(text == nullptr ? "" : text) {}

    const char* GetString() const { return text_.c_str(); }
    std::size_t GetLength() const { return text_.size(); }

    friend bool operator<(const AscendString& a, const AscendString& b) { return a.text_ < b.text_; }
    friend bool operator>(const AscendString& a, const AscendString& b) { return b < a; }
    friend bool operator<=(const AscendString& a, const AscendString& b) { return !(b < a); }
    friend bool operator>=(const AscendString& a, const AscendString& b) { return !(a < b); }
    friend bool operator==(const AscendString& a, const AscendString& b) { return a.text_ == b.text_; }
    friend bool operator!=(const AscendString& a, const AscendString& b) { return !(a == b); }

private:
    std::string text_;
};

enum DataType : int32_t {
    DT_FLOAT = 0,
    DT_FLOAT16 = 1,
    DT_INT8 = 2,
    DT_INT32 = 3,
    DT_UINT8 = 4,
    DT_INT16 = 6,
    DT_UINT16 = 7,
    DT_UINT32 = 8,
    DT_INT64 = 9,
    DT_UINT64 = 10,
    DT_DOUBLE = 11,
    DT_BOOL = 12,
    DT_STRING = 13,
    DT_BF16 = 27,
    DT_UNDEFINED = 28
};

enum class LlmRole : int32_t { kPrompt = 1, kDecoder = 2, kMix = 3, kEnd };
enum class CachePlacement : uint32_t { kHost = 0, kDevice = 1 };

// The reserved members mean nothing.
struct IpInfo {
    AscendString ip;
    uint16_t port = 0;
    uint8_t reserved[128] = {0};
};

struct ClusterInfo {
    uint64_t remote_cluster_id = 0;
    int32_t remote_role_type = 0;
    std::vector<IpInfo> local_ip_infos;
    std::vector<IpInfo> remote_ip_infos;
    uint8_t reserved[128] = {0};
};

struct CacheIndex {
    uint64_t cluster_id = 0;
    int64_t cache_id = 0;
    uint32_t batch_index = 0;
    uint8_t reserved[128] = {0};
};

struct CacheDesc {
    CachePlacement placement = CachePlacement::kDevice;
    uint32_t num_tensors = 0;
    DataType data_type = DT_UNDEFINED;
    std::vector<int64_t> shape;
    uint8_t reserved[128] = {0};
};

struct Cache {
    int64_t cache_id = -1;
    std::vector<uintptr_t> tensor_addrs;
    CacheDesc cache_desc;
    uint8_t reserved[128] = {0};
};

struct KvCacheExtParam {
    std::pair<int32_t, int32_t> src_layer_range = {-1, -1};  // first and last, both inclusive; all: {-1, -1}
    std::pair<int32_t, int32_t> dst_layer_range = {-1, -1};
    uint8_t tensor_num_per_layer = 2;
    uint8_t reserved[127] = {0};
};

struct RegisterCfg {
    uint8_t reserved[128] = {0};
};

namespace detail {

// Arguments and results of a call as the library takes and gives them.
class Call {
public:
    std::vector<uint64_t> results;

    Call(LldInstance& instance, const char* method, const char* kinds, std::size_t room = 0)
        : results(room), instance_(instance), method_(method), kinds_(kinds) {}

    template <typename... Arguments>
    Status Run(const Arguments&... arguments) {
        AddAll(arguments...);
        LldCall call = {LLM_DATADIST_ABI, method_, kinds_, parts_.data(), results.data(), results.size(), 0};
        const Status status = llm_datadist_call(&instance_, &call);
        results.resize(call.count);
        return status;
    }

    // Status of the work, or that there is no memory: nothing else may be thrown here.
    template <typename Work>
    static Status Guarded(Work&& work) {
#ifdef __cpp_exceptions
        try {
            return work();
        } catch (...) {
            return llm_datadist_no_memory();
        }
#else
        return work();
#endif
    }

private:
    template <typename Number,
              typename = std::enable_if_t<std::is_arithmetic<Number>::value || std::is_enum<Number>::value>>
    void Add(Number number) {
        parts_.push_back(static_cast<uint64_t>(number));
    }
    void Add(const void* address) { Add(reinterpret_cast<uintptr_t>(address)); }
    void Add(const AscendString& text) { Add(text.GetString()); }
    void Add(const std::vector<uint64_t>& list) { AddAll(list.data(), list.size()); }
    void Add(const std::pair<const AscendString, AscendString>& option) { AddAll(option.first, option.second); }
    void Add(const IpInfo& info) { AddAll(info.ip, info.port); }
    void Add(const ClusterInfo& info) {
        AddAll(info.remote_cluster_id, info.remote_role_type, info.local_ip_infos, info.remote_ip_infos);
    }
    void Add(const CacheIndex& index) { AddAll(index.cluster_id, index.cache_id, index.batch_index); }
    void Add(const std::pair<int32_t, int32_t>& range) { AddAll(range.first, range.second); }
    void Add(const KvCacheExtParam& ext) { AddAll(ext.src_layer_range, ext.dst_layer_range, ext.tensor_num_per_layer); }
    void Add(const CacheDesc& desc) {
        AddAll(desc.placement, desc.num_tensors, desc.data_type, desc.shape.data(), desc.shape.size());
    }
    void Add(const Cache& cache) { AddAll(cache.cache_id, cache.tensor_addrs, cache.cache_desc); }

    template <typename Range, typename = typename Range::value_type>
    void Add(const Range& range) {
        Add(range.size());
        for (const auto& each : range) Add(each);
    }
    template <typename... Parts>
    void AddAll(const Parts&... parts) {
        const bool in_order[] = {true, (Add(parts), true)...};
        static_cast<void>(in_order);
    }

    LldInstance& instance_;
    const char *method_, *kinds_;
    std::vector<uint64_t> parts_;
};

}  // namespace detail

// One instance. Any thread may call, except that Finalize and the destructor must be alone.
class LlmDataDist {
public:
    LlmDataDist(uint64_t cluster_id, LlmRole role) : instance_{cluster_id, static_cast<int32_t>(role), nullptr} {}
    ~LlmDataDist() { Run("", ""); }

    LlmDataDist(const LlmDataDist&) = delete;
    LlmDataDist& operator=(const LlmDataDist&) = delete;

    Status Initialize(const std::map<AscendString, AscendString>& options) { return Run("Initialize", "o", options); }

    void Finalize() { Run("Finalize", ""); }

    Status SetRole(LlmRole role, const std::map<AscendString, AscendString>& options = {}) {
        return Run("SetRole", "ro", role, options);
    }

    // Links to peers that listen; rets: a status for each, or none if the call as a whole is refused.
    Status LinkLlmClusters(const std::vector<ClusterInfo>& clusters, std::vector<Status>& rets,
                           int32_t timeout_in_millis = 1000) {
        return RunForEach("LinkLlmClusters", "kn", rets, clusters, timeout_in_millis);
    }

    Status UnlinkLlmClusters(const std::vector<ClusterInfo>& clusters, std::vector<Status>& rets,
                             int32_t timeout_in_millis = 1000, bool force_flag = false) {
        return RunForEach("UnlinkLlmClusters", "knf", rets, clusters, timeout_in_millis, force_flag);
    }

    Status AllocateCache(const CacheDesc& cache_desc, Cache& cache) {
        return detail::Call::Guarded([&] {
            CacheDesc desc = cache_desc;  // before the call: nothing fails after it
            const std::size_t tensors = std::min<std::size_t>(desc.num_tensors, 1 << 20);  // more are refused
            detail::Call call(instance_, "AllocateCache", "d", 1 + tensors);
            const Status status = call.Run(desc);
            if (status != LLM_SUCCESS) return status;
            cache.cache_id = static_cast<int64_t>(call.results[0]);
            call.results.erase(call.results.begin());
            cache.tensor_addrs = std::move(call.results);
            cache.cache_desc = std::move(desc);
            return status;
        });
    }

    Status DeallocateCache(int64_t cache_id) { return Run("DeallocateCache", "n", cache_id); }

    Status PullKvCache(const CacheIndex& src_cache_index, const Cache& dst_cache, uint32_t batch_index = 0,
                       int64_t size = -1, const KvCacheExtParam& ext_param = {}) {
        return Run("PullKvCache", "icnne", src_cache_index, dst_cache.cache_id, batch_index, size, ext_param);
    }

    Status PullKvBlocks(const CacheIndex& src_cache_index, const Cache& dst_cache,
                        const std::vector<uint64_t>& src_blocks, const std::vector<uint64_t>& dst_blocks,
                        const KvCacheExtParam& ext_param = {}) {
        return Run("PullKvBlocks", "icbbe", src_cache_index, dst_cache.cache_id, src_blocks, dst_blocks, ext_param);
    }

    Status CopyKvCache(const Cache& src_cache, const Cache& dst_cache, uint32_t src_batch_index = 0,
                       uint32_t dst_batch_index = 0, uint64_t offset = 0, int64_t size = -1) {
        return Run("CopyKvCache", "ccnnun", src_cache.cache_id, dst_cache.cache_id, src_batch_index, dst_batch_index,
                   offset, size);
    }

    Status CopyKvBlocks(const Cache& src_cache, const Cache& dst_cache, const std::vector<uint64_t>& src_blocks,
                        const std::vector<std::vector<uint64_t>>& dst_blocks_list) {
        return Run("CopyKvBlocks", "wwbm", src_cache, dst_cache, src_blocks, dst_blocks_list);
    }

    Status PushKvCache(const Cache& src_cache, const CacheIndex& dst_cache_index, uint32_t src_batch_index = 0,
                       int64_t size = -1, const KvCacheExtParam& ext_param = {}) {
        return Run("PushKvCache", "cinne", src_cache.cache_id, dst_cache_index, src_batch_index, size, ext_param);
    }

    Status PushKvBlocks(const Cache& src_cache, const CacheIndex& dst_cache_index,
                        const std::vector<uint64_t>& src_blocks, const std::vector<uint64_t>& dst_blocks,
                        const KvCacheExtParam& ext_param = {}) {
        return Run("PushKvBlocks", "cibbe", src_cache.cache_id, dst_cache_index, src_blocks, dst_blocks, ext_param);
    }

    Status RegisterKvCache(const CacheDesc& cache_desc, const std::vector<uint64_t>& addrs, const RegisterCfg&,
                           int64_t& cache_id) {
        cache_id = -1;
        return detail::Call::Guarded([&] {
            detail::Call call(instance_, "RegisterKvCache", "da", 1);
            const Status status = call.Run(cache_desc, addrs);
            if (status == LLM_SUCCESS) cache_id = static_cast<int64_t>(call.results[0]);
            return status;
        });
    }

    Status UnregisterKvCache(int64_t cache_id) { return Run("UnregisterKvCache", "n", cache_id); }

private:
    template <typename... Arguments>
    Status Run(const char* method, const char* kinds, const Arguments&... arguments) {
        return detail::Call::Guarded([&] { return detail::Call(instance_, method, kinds).Run(arguments...); });
    }

    template <typename... Arguments>
    Status RunForEach(const char* method, const char* kinds, std::vector<Status>& rets,
                      const std::vector<ClusterInfo>& clusters, const Arguments&... arguments) {
        rets.clear();
        return detail::Call::Guarded([&] {
            rets.reserve(clusters.size());  // before the call: nothing fails after it
            detail::Call call(instance_, method, kinds, clusters.size());
            const Status status = call.Run(clusters, arguments...);
            rets.assign(call.results.begin(), call.results.end());
            return status;
        });
    }

    LldInstance instance_;
};

}  // namespace llm_datadist
