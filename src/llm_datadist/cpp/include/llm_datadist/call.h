// The boundary of libllm_datadist.so: plain C, the same for every compiler and C++ library. Programs use llm_datadist.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LLM_DATADIST_ABI 1  // another number for any other layout, order or meaning of what is below
#define LLM_DATADIST_BRIDGE "llm_datadist._native._native.cpp_bridge_1"  // a capsule; it ends with the number

// One instance. The library sets `object`.
typedef struct {
    uint64_t cluster_id;
    int32_t role;
    void* object;
} LldInstance;

// A call. `parts` is what its arguments consist of, in order: numbers (signed ones as their bits), texts (their
// addresses; UTF-8) and lists of 64-bit numbers (their addresses and sizes). They are read during the call only.
typedef struct {
    uint32_t abi;
    const char* method;  // of LlmDataDist; "": the destructor
    const char* kinds;  // of its arguments, a letter for each (cpp_bridge.cpp)
    const uint64_t* parts;
    uint64_t* results;  // statuses of clusters, or a new cache's id and addresses
    size_t room;  // for so many results
    size_t count;  // of them; the program sets 0
} LldCall;

// What the library loads. It puts the reason of a failure into `text`.
typedef uint32_t LldBridge(LldInstance* instance, LldCall* call, char* text, size_t capacity);

uint32_t llm_datadist_call(LldInstance* instance, LldCall* call);
const char* llm_datadist_last_error(void);
uint32_t llm_datadist_no_memory(void);  // sets the last error, returns the status

#ifdef __cplusplus
}
#endif
