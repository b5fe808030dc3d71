// The part of the ABI of NVIDIA's driver, libcuda.so.1, that this library uses: C11 and C++17.
//
// Builds need no CUDA: functions are looked up at run time by the names below, which are those that the driver exports.
// `make test-cuda-abi` compares everything here with NVIDIA's headers. There, after <cuda.h>, the types below get a prefix
// and the compiler compares the prototypes.
#pragma once

#include <stddef.h>

#ifdef CUDA_VERSION
#define DATADIST_CUDA(name) datadist_##name
#else
#define DATADIST_CUDA(name) name
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- types

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;

// Enumerations of the driver's header. Here they are integers: a newer driver has values that are not below.
typedef int DATADIST_CUDA(CUresult);
typedef int DATADIST_CUDA(CUdevice_attribute);
typedef int DATADIST_CUDA(CUpointer_attribute);
typedef int DATADIST_CUDA(CUmemAllocationHandleType);
typedef int DATADIST_CUDA(CUmemAllocationGranularity_flags);
typedef int DATADIST_CUDA(CUstreamCaptureMode);
typedef int DATADIST_CUDA(CUstreamCaptureStatus);

typedef struct {
    char bytes[16];
} DATADIST_CUDA(CUuuid);

typedef struct {
    int type;  // CU_MEM_LOCATION_TYPE_DEVICE
    int id;  // a device's ordinal
} DATADIST_CUDA(CUmemLocation);

typedef struct {
    int type;  // CU_MEM_ALLOCATION_TYPE_PINNED
    int requestedHandleTypes;  // bits of CU_MEM_HANDLE_TYPE_*
    DATADIST_CUDA(CUmemLocation) location;
    void* win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} DATADIST_CUDA(CUmemAllocationProp);

typedef struct {
    DATADIST_CUDA(CUmemLocation) location;
    int flags;  // CU_MEM_ACCESS_FLAGS_*
} DATADIST_CUDA(CUmemAccessDesc);

// ---- constants

#define DATADIST_CUDA_ERRORS(X)                       \
    X(CUDA_SUCCESS, 0)                                \
    X(CUDA_ERROR_INVALID_VALUE, 1)                    \
    X(CUDA_ERROR_NOT_INITIALIZED, 3)                  \
    X(CUDA_ERROR_NOT_READY, 600)                      \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713)     \
    X(CUDA_ERROR_NOT_PERMITTED, 800)

#define DATADIST_CUDA_CONSTANTS(X)                                          \
    X(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                         \
    X(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41)                           \
    X(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 91)      \
    X(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)         \
    X(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103) \
    X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                                  \
    X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                               \
    X(CU_MEMORYTYPE_DEVICE, 2)                                              \
    X(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                     \
    X(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                       \
    X(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                          \
    X(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0)                                  \
    X(CU_MEM_ACCESS_FLAGS_PROT_READ, 1)                                     \
    X(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                \
    X(CU_MEMHOSTREGISTER_PORTABLE, 1)                                       \
    X(CU_MEMHOSTREGISTER_DEVICEMAP, 2)                                      \
    X(CU_STREAM_NON_BLOCKING, 1)                                            \
    X(CU_EVENT_DISABLE_TIMING, 2)                                           \
    X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                    \
    X(CU_STREAM_CAPTURE_STATUS_NONE, 0)

#ifndef CUDA_VERSION
#define DATADIST_CUDA_ENUMERATOR(name, value) name = value,
enum { DATADIST_CUDA_ERRORS(DATADIST_CUDA_ENUMERATOR) };
enum { DATADIST_CUDA_CONSTANTS(DATADIST_CUDA_ENUMERATOR) };
#undef DATADIST_CUDA_ENUMERATOR
#endif

// ---- functions, by the names that the driver exports

CUresult cuInit(unsigned int flags);
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorName(CUresult error, const char** name);

CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device);
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device);
CUresult cuDeviceGetName(char* name, int bytes, CUdevice device);

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext* context);

CUresult cuMemGetInfo_v2(size_t* available, size_t* total);
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemAllocHost_v2(void** address, size_t bytes);
CUresult cuMemFreeHost(void* address);
CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned int flags);
CUresult cuMemHostUnregister(void* address);

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option);
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count);
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type);

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address);

CUresult cuStreamCreate(CUstream* stream, unsigned int flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuEventCreate(CUevent* event, unsigned int flags);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventQuery(CUevent event);
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status);
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);

CUresult cuModuleLoadData(CUmodule* module, const void* image);
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name);
CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void** parameters, void** extra);

#ifdef __cplusplus
}
#endif
