// NVIDIA's driver, loaded when the first device is made: builds, and hosts without a GPU, do without it.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "copy/cuda_abi.h"
#include "error.hpp"

namespace datadist {

// A device failed, or there is none. Becomes an exception of llm_datadist.errors by its code.
struct DeviceError : std::runtime_error {
    static constexpr int missing = 0;     // no driver, no such device, or it cannot do what is needed
    static constexpr int unfinished = -1;  // it does not answer: a copy of this call may still run
    static constexpr int failed = -2;      // it has failed before this call

    DeviceError(int code, const std::string& what) : std::runtime_error(what), code(code) {}
    int code;  // of the driver, or one of the above
};

// Functions by exact names: one that is looked up with a version may change its arguments.
#define DATADIST_FUNCTIONS(X)            \
    X(cuInit)                            \
    X(cuDriverGetVersion)                \
    X(cuGetErrorName)                    \
    X(cuDeviceGetCount)                  \
    X(cuDeviceGetAttribute)              \
    X(cuDeviceGetUuid_v2)                \
    X(cuDeviceGetName)                   \
    X(cuMemGetInfo_v2)                   \
    X(cuDevicePrimaryCtxRetain)          \
    X(cuCtxPushCurrent_v2)               \
    X(cuCtxPopCurrent_v2)                \
    X(cuMemGetAllocationGranularity)     \
    X(cuMemCreate)                       \
    X(cuMemAddressReserve)               \
    X(cuMemMap)                          \
    X(cuMemSetAccess)                    \
    X(cuMemUnmap)                        \
    X(cuMemAddressFree)                  \
    X(cuMemRelease)                      \
    X(cuMemExportToShareableHandle)      \
    X(cuMemImportFromShareableHandle)    \
    X(cuMemAlloc_v2)                     \
    X(cuMemFree_v2)                      \
    X(cuMemAllocHost_v2)                 \
    X(cuMemFreeHost)                     \
    X(cuMemHostRegister_v2)              \
    X(cuMemHostUnregister)               \
    X(cuStreamCreate)                    \
    X(cuStreamDestroy_v2)                \
    X(cuEventCreate)                     \
    X(cuEventDestroy_v2)                 \
    X(cuEventRecord)                     \
    X(cuEventQuery)                      \
    X(cuStreamIsCapturing)               \
    X(cuThreadExchangeStreamCaptureMode) \
    X(cuMemcpyAsync)                     \
    X(cuModuleLoadData)                  \
    X(cuModuleGetFunction)               \
    X(cuLaunchKernel)                    \
    X(cuPointerGetAttribute)

// The functions of the driver; they stay loaded.
struct Cuda {
#define DATADIST_MEMBER(name) decltype(&::name) name = nullptr;
    DATADIST_FUNCTIONS(DATADIST_MEMBER)
#undef DATADIST_MEMBER

    // Throws DeviceError if there is no driver, or one without these functions.
    static const Cuda& get() {
        static const Cuda loaded;
        return loaded;
    }

    // "what: CUDA_ERROR_NAME (code)"
    std::string describe(int code, const char* what) const {
        const char* name = nullptr;
        cuGetErrorName(static_cast<CUresult>(code), &name);
        return text(what, ": ", name != nullptr ? name : "unknown error", " (", code, ")");
    }

private:
    Cuda() {
        void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw DeviceError(DeviceError::missing, ::dlerror());
#define DATADIST_LOAD(name) name = function<decltype(name)>(library, #name);
        DATADIST_FUNCTIONS(DATADIST_LOAD)
#undef DATADIST_LOAD
    }

    template <typename Function>
    static Function function(void* library, const char* name) {
        void* found = ::dlsym(library, name);
        if (found == nullptr) throw DeviceError(DeviceError::missing, text("the driver is too old: it has no ", name));
        return reinterpret_cast<Function>(found);
    }
};

#undef DATADIST_FUNCTIONS

}  // namespace datadist
