// More of the ABI of NVIDIA's driver: what the fake has beside cuda_abi.h, declared alike.
#pragma once

#include "../../src/llm_datadist/_native/copy/cuda_abi.h"

#define FAKE_CUDA_ERRORS(X)                       \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2)                \
    X(CUDA_ERROR_DEINITIALIZED, 4)                \
    X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46)          \
    X(CUDA_ERROR_NO_DEVICE, 100)                  \
    X(CUDA_ERROR_INVALID_DEVICE, 101)             \
    X(CUDA_ERROR_INVALID_IMAGE, 200)              \
    X(CUDA_ERROR_INVALID_CONTEXT, 201)            \
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217)    \
    X(CUDA_ERROR_INVALID_PTX, 218)                \
    X(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221)     \
    X(CUDA_ERROR_INVALID_HANDLE, 400)             \
    X(CUDA_ERROR_NOT_FOUND, 500)                  \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)             \
    X(CUDA_ERROR_ASSERT, 710)                     \
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714)       \
    X(CUDA_ERROR_MISALIGNED_ADDRESS, 716)         \
    X(CUDA_ERROR_LAUNCH_FAILED, 719)              \
    X(CUDA_ERROR_NOT_SUPPORTED, 801)              \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900) \
    X(CUDA_ERROR_UNKNOWN, 999)

#define FAKE_CUDA_CONSTANTS(X)                          \
    X(CU_DEVICE_ATTRIBUTE_INTEGRATED, 18)               \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 20)             \
    X(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 40)       \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75) \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76) \
    X(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 99)  \
    X(CU_MEMORYTYPE_HOST, 1)                            \
    X(CU_MEM_ACCESS_FLAGS_PROT_NONE, 0)

#ifndef CUDA_VERSION
#define FAKE_CUDA_ENUMERATOR(name, value) name = value,
enum { FAKE_CUDA_ERRORS(FAKE_CUDA_ENUMERATOR) };
enum { FAKE_CUDA_CONSTANTS(FAKE_CUDA_ENUMERATOR) };
#undef FAKE_CUDA_ENUMERATOR
#endif

CUresult cuStreamSynchronize(CUstream stream);
