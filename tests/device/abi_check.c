// Compiles only if NVIDIA's cuda.h and cuda_abi.h declare the same: `make test-cuda-abi`.
//
// After cuda.h, cuda_abi.h declares functions and handles a second time, so the compiler compares them. The enumerations
// and structures of cuda_abi.h have the prefix datadist_ here.
#include <cuda.h>

#include "fakeabi.h"

#define CONSTANT(name, value) _Static_assert(name == value, #name);
DATADIST_CUDA_ERRORS(CONSTANT)
DATADIST_CUDA_CONSTANTS(CONSTANT)
FAKE_CUDA_ERRORS(CONSTANT)
FAKE_CUDA_CONSTANTS(CONSTANT)

#define TYPE(name) _Static_assert(sizeof(name) == sizeof(datadist_##name), #name);
TYPE(CUresult)
TYPE(CUdevice_attribute)
TYPE(CUpointer_attribute)
TYPE(CUmemAllocationHandleType)
TYPE(CUmemAllocationGranularity_flags)
TYPE(CUstreamCaptureMode)
TYPE(CUstreamCaptureStatus)
TYPE(CUuuid)
TYPE(CUmemLocation)
TYPE(CUmemAllocationProp)
TYPE(CUmemAccessDesc)

#define FIELD(type, field)                                                                       \
    _Static_assert(offsetof(type, field) == offsetof(datadist_##type, field), #type "." #field); \
    _Static_assert(sizeof(((type*)0)->field) == sizeof(((datadist_##type*)0)->field), #type "." #field);
FIELD(CUmemLocation, type)
FIELD(CUmemLocation, id)
FIELD(CUmemAllocationProp, type)
FIELD(CUmemAllocationProp, requestedHandleTypes)
FIELD(CUmemAllocationProp, location)
FIELD(CUmemAllocationProp, win32HandleMetaData)
FIELD(CUmemAllocationProp, allocFlags.compressionType)
FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)
FIELD(CUmemAllocationProp, allocFlags.usage)
FIELD(CUmemAccessDesc, location)
FIELD(CUmemAccessDesc, flags)
