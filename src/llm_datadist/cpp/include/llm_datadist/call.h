// The boundary of libllm_datadist.so: plain C, the same for every compiler and C++ library. Programs use llm_datadist.h.
//
// Pointers are the caller's, and read during the call only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LLM_DATADIST_ABI 1  // another number for any other layout or meaning of what is below

enum LldMethod {
    LLD_INITIALIZE,
    LLD_FINALIZE,
    LLD_RELEASE,  // the destructor
    LLD_SET_ROLE,
    LLD_LINK,
    LLD_UNLINK,
    LLD_ALLOCATE,
    LLD_DEALLOCATE,
    LLD_REGISTER,
    LLD_UNREGISTER,
    LLD_PULL_CACHE,
    LLD_PULL_BLOCKS,
    LLD_PUSH_CACHE,
    LLD_PUSH_BLOCKS,
    LLD_COPY_CACHE,
    LLD_COPY_BLOCKS,
};

typedef struct {
    const char *key, *value;  // as all texts UTF-8
} LldOption;

typedef struct {
    const char* ip;
    uint16_t port;
} LldEndpoint;

typedef struct {
    uint64_t cluster_id;
    int32_t role;
    const LldEndpoint *local, *remote;
    size_t local_count, remote_count;
} LldCluster;

typedef struct {
    const uint64_t* data;
    size_t size;
} LldNumbers;

typedef struct {
    uint32_t placement, num_tensors;
    int32_t data_type;
    const int64_t* shape;
    size_t rank;
} LldDesc;

typedef struct {
    int64_t cache_id;
    LldNumbers addrs;
    LldDesc desc;
} LldCache;

typedef struct {
    uint64_t cluster_id;
    int64_t cache_id;
    uint32_t batch_index;
} LldIndex;

typedef struct {
    int32_t src[2], dst[2];  // first and last layer
    uint8_t tensors_per_layer;
} LldLayers;

// One instance. The library sets `object`.
typedef struct {
    uint64_t cluster_id;
    int32_t role;
    void* object;
} LldInstance;

typedef struct {
    uint32_t abi;
    int32_t method;
    int32_t role, timeout, force;
    const LldOption* options;
    size_t option_count;
    const LldCluster* clusters;
    size_t cluster_count;
    LldIndex peer;  // the peer's cache
    LldCache src, dst;  // local caches; `dst` also of the calls with one
    LldNumbers src_blocks;
    const LldNumbers* dst_blocks;  // of CopyKvBlocks several lists
    size_t dst_list_count;
    const LldLayers* layers;  // null: all
    uint32_t src_row, dst_row;
    uint64_t offset;
    int64_t size;
    int64_t* cache_id;  // of a new cache
    // Takes a list of results; 0: there is no memory for it.
    int (*put)(void* to, const uint64_t* values, size_t count);
    void* to;
} LldCall;

// What the library loads: `call` puts the reason of a failure into `text`.
typedef struct {
    uint32_t abi;
    uint32_t (*call)(LldInstance* instance, const LldCall* call, char* text, size_t capacity);
} LldBridge;

#define LLM_DATADIST_BRIDGE "llm_datadist._native._native.cpp_bridge"  // a capsule

uint32_t llm_datadist_call(LldInstance* instance, const LldCall* call);
const char* llm_datadist_last_error(void);

#ifdef __cplusplus
}
#endif
