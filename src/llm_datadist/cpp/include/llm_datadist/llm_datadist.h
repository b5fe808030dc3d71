// LLM-DataDist for C++ programs: link with libllm_datadist.so. docs/cpp.md describes the calls.
//
// C++14. Everything here is inline; nothing of the C++ library crosses into the shared library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
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
    DT_UNDEFINED = 28,
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

// One instance. Any thread may call, except that Finalize and the destructor must be alone.
class LlmDataDist {
public:
    LlmDataDist(uint64_t cluster_id, LlmRole role) : instance_{cluster_id, static_cast<int32_t>(role), nullptr} {}
    ~LlmDataDist() {
        Finalize();
        Make(LLD_RELEASE).Run();
    }

    LlmDataDist(const LlmDataDist&) = delete;
    LlmDataDist& operator=(const LlmDataDist&) = delete;

    Status Initialize(const std::map<AscendString, AscendString>& options) {
        return Make(LLD_INITIALIZE).RunWith(options);
    }

    void Finalize() { Make(LLD_FINALIZE).Run(); }

    Status SetRole(LlmRole role, const std::map<AscendString, AscendString>& options = {}) {
        Call call = Make(LLD_SET_ROLE);
        call.role = static_cast<int32_t>(role);
        return call.RunWith(options);
    }

    // Links to peers that listen; rets: a status for each, or none if an argument is invalid.
    Status LinkLlmClusters(const std::vector<ClusterInfo>& clusters, std::vector<Status>& rets,
                           int32_t timeout_in_millis = 1000) {
        return Make(LLD_LINK).RunWith(clusters, rets, timeout_in_millis);
    }

    Status UnlinkLlmClusters(const std::vector<ClusterInfo>& clusters, std::vector<Status>& rets,
                             int32_t timeout_in_millis = 1000, bool force_flag = false) {
        Call call = Make(LLD_UNLINK);
        call.force = force_flag;
        return call.RunWith(clusters, rets, timeout_in_millis);
    }

    Status AllocateCache(const CacheDesc& cache_desc, Cache& cache) {
        Call call = Make(LLD_ALLOCATE);
        call.dst.desc = Plain(cache_desc);
        int64_t cache_id = -1;
        std::vector<uintptr_t> addrs;
        call.cache_id = &cache_id;
        call.Into(addrs);
        return call.Guarded([&] {
            CacheDesc desc = cache_desc;  // before the call: nothing may fail after it
            const Status status = call.Run();
            if (status == LLM_SUCCESS) {
                cache.cache_id = cache_id;
                cache.tensor_addrs = std::move(addrs);
                cache.cache_desc = std::move(desc);
            }
            return status;
        });
    }

    Status DeallocateCache(int64_t cache_id) {
        Call call = Make(LLD_DEALLOCATE);
        call.dst.cache_id = cache_id;
        return call.Run();
    }

    Status PullKvCache(const CacheIndex& src_cache_index, const Cache& dst_cache, uint32_t batch_index = 0,
                       int64_t size = -1, const KvCacheExtParam& ext_param = {}) {
        Call call = Make(LLD_PULL_CACHE);
        call.dst.cache_id = dst_cache.cache_id;
        call.dst_row = batch_index;
        call.size = size;
        return call.RunWith(src_cache_index, ext_param);
    }

    Status PullKvBlocks(const CacheIndex& src_cache_index, const Cache& dst_cache,
                        const std::vector<uint64_t>& src_blocks, const std::vector<uint64_t>& dst_blocks,
                        const KvCacheExtParam& ext_param = {}) {
        Call call = Make(LLD_PULL_BLOCKS);
        call.dst.cache_id = dst_cache.cache_id;
        return call.RunWith(src_cache_index, ext_param, src_blocks, dst_blocks);
    }

    Status CopyKvCache(const Cache& src_cache, const Cache& dst_cache, uint32_t src_batch_index = 0,
                       uint32_t dst_batch_index = 0, uint64_t offset = 0, int64_t size = -1) {
        Call call = Make(LLD_COPY_CACHE);
        call.src.cache_id = src_cache.cache_id;
        call.dst.cache_id = dst_cache.cache_id;
        call.src_row = src_batch_index;
        call.dst_row = dst_batch_index;
        call.offset = offset;
        call.size = size;
        return call.Run();
    }

    Status CopyKvBlocks(const Cache& src_cache, const Cache& dst_cache, const std::vector<uint64_t>& src_blocks,
                        const std::vector<std::vector<uint64_t>>& dst_blocks_list) {
        Call call = Make(LLD_COPY_BLOCKS);
        call.src = Plain(src_cache);
        call.dst = Plain(dst_cache);
        call.src_blocks = Plain(src_blocks);
        return call.Guarded([&] {
            std::vector<LldNumbers> lists;
            for (const std::vector<uint64_t>& each : dst_blocks_list) lists.push_back(Plain(each));
            call.dst_blocks = lists.data();
            call.dst_list_count = lists.size();
            return call.Run();
        });
    }

    Status PushKvCache(const Cache& src_cache, const CacheIndex& dst_cache_index, uint32_t src_batch_index = 0,
                       int64_t size = -1, const KvCacheExtParam& ext_param = {}) {
        Call call = Make(LLD_PUSH_CACHE);
        call.src.cache_id = src_cache.cache_id;
        call.src_row = src_batch_index;
        call.size = size;
        return call.RunWith(dst_cache_index, ext_param);
    }

    Status PushKvBlocks(const Cache& src_cache, const CacheIndex& dst_cache_index,
                        const std::vector<uint64_t>& src_blocks, const std::vector<uint64_t>& dst_blocks,
                        const KvCacheExtParam& ext_param = {}) {
        Call call = Make(LLD_PUSH_BLOCKS);
        call.src.cache_id = src_cache.cache_id;
        return call.RunWith(dst_cache_index, ext_param, src_blocks, dst_blocks);
    }

    Status RegisterKvCache(const CacheDesc& cache_desc, const std::vector<uint64_t>& addrs, const RegisterCfg& cfg,
                           int64_t& cache_id) {
        static_cast<void>(cfg);
        Call call = Make(LLD_REGISTER);
        call.dst.desc = Plain(cache_desc);
        call.dst.addrs = Plain(addrs);
        call.cache_id = &cache_id;
        return call.Run();
    }

    Status UnregisterKvCache(int64_t cache_id) {
        Call call = Make(LLD_UNREGISTER);
        call.dst.cache_id = cache_id;
        return call.Run();
    }

private:
    // A call of this instance, as the library takes it.
    struct Call : LldCall {
        LldInstance* instance;

        Status Run() const { return llm_datadist_call(instance, this); }

        Status RunWith(const std::map<AscendString, AscendString>& given) {
            return Guarded([&] {
                std::vector<LldOption> plain;
                for (const auto& each : given) plain.push_back({each.first.GetString(), each.second.GetString()});
                options = plain.data();
                option_count = plain.size();
                return Run();
            });
        }

        Status RunWith(const std::vector<ClusterInfo>& given, std::vector<Status>& rets, int32_t milliseconds) {
            timeout = milliseconds;
            rets.clear();
            Into(rets);
            return Guarded([&] {
                std::vector<std::vector<LldEndpoint>> ends;  // two lists of each cluster
                for (const ClusterInfo& each : given) {
                    ends.push_back(Plain(each.local_ip_infos));
                    ends.push_back(Plain(each.remote_ip_infos));
                }
                std::vector<LldCluster> plain;
                for (std::size_t i = 0; i < given.size(); ++i) {
                    const auto &local = ends[2 * i], &remote = ends[2 * i + 1];
                    plain.push_back({given[i].remote_cluster_id, given[i].remote_role_type, local.data(), remote.data(),
                                     local.size(), remote.size()});
                }
                clusters = plain.data();
                cluster_count = plain.size();
                return Run();
            });
        }

        Status RunWith(const CacheIndex& index, const KvCacheExtParam& ext) {
            const std::pair<int32_t, int32_t>&a = ext.src_layer_range, &b = ext.dst_layer_range, all(-1, -1);
            const LldLayers given{{a.first, a.second}, {b.first, b.second}, ext.tensor_num_per_layer};
            peer = {index.cluster_id, index.cache_id, index.batch_index};
            layers = a == all && b == all && ext.tensor_num_per_layer == 2 ? nullptr : &given;
            return Run();
        }

        Status RunWith(const CacheIndex& index, const KvCacheExtParam& ext, const std::vector<uint64_t>& sources,
                       const std::vector<uint64_t>& destinations) {
            const LldNumbers list = Plain(destinations);
            src_blocks = Plain(sources);
            dst_blocks = &list;
            dst_list_count = 1;
            return RunWith(index, ext);
        }

        template <typename T>
        void Into(std::vector<T>& results) {
            to = &results;
            put = [](void* place, const uint64_t* values, std::size_t count) -> int {
                return Attempt([&] { static_cast<std::vector<T>*>(place)->assign(values, values + count); });
            };
        }

        template <typename Work>
        static Status Guarded(Work&& work) {
            Status status = LLM_OUT_OF_MEMORY;
            Attempt([&] { status = work(); });
            return status;
        }

        // False for want of memory, all that may be thrown here.
        template <typename Work>
        static bool Attempt(Work&& work) {
#ifdef __cpp_exceptions
            try {
                work();
            } catch (...) {
                return false;
            }
#else
            work();
#endif
            return true;
        }
    };

    Call Make(LldMethod method) {
        Call call = {};
        call.abi = LLM_DATADIST_ABI;
        call.method = method;
        call.src.cache_id = call.dst.cache_id = -1;
        call.instance = &instance_;
        return call;
    }

    static LldNumbers Plain(const std::vector<uint64_t>& numbers) { return {numbers.data(), numbers.size()}; }
    static LldDesc Plain(const CacheDesc& desc) {
        return {static_cast<uint32_t>(desc.placement), desc.num_tensors, desc.data_type, desc.shape.data(),
                desc.shape.size()};
    }
    static LldCache Plain(const Cache& cache) {
        static_assert(sizeof(uintptr_t) == sizeof(uint64_t), "64-bit processors only");
        return {cache.cache_id, {reinterpret_cast<const uint64_t*>(cache.tensor_addrs.data()), cache.tensor_addrs.size()},
                Plain(cache.cache_desc)};
    }
    static std::vector<LldEndpoint> Plain(const std::vector<IpInfo>& infos) {
        std::vector<LldEndpoint> plain;
        for (const IpInfo& each : infos) plain.push_back({each.ip.GetString(), each.port});
        return plain;
    }

    LldInstance instance_;
};

}  // namespace llm_datadist
