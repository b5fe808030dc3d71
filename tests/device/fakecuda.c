// A fake libcuda.so.1: the driver of GPUs that this host does not have. tests/support/fakecuda.py compiles and loads it.
//
// It does what NVIDIA's documentation promises and no more, in the way that hurts most:
//
// - A device address is mapped without access, so the host crashes where it touches one, as with a GPU. Copies and the
//   kernel use a second mapping of the same bytes. No address is used twice.
// - A stream is a thread that begins late, unless a call waits for it. So a missing wait shows.
// - The runs of a kernel have no order: they are executed from the last to the first.
// - Fresh memory holds POISON.
// - Exported memory is an unlinked file, no memfd.
// - Violations are what a driver does not forgive, and what it allows but this library never means.
//
// "Assumed" marks what no document says. A run on a GPU has to confirm it.
//
// Environment, read by cuInit:
//   FAKECUDA_DEVICES=1      devices of the host; CUDA_VISIBLE_DEVICES chooses among them
//   FAKECUDA_MEMORY=1 GiB   bytes of each device
//   FAKECUDA_DELAY_US=1000  age at which an operation begins although no call waits
//   FAKECUDA_NAME=Fake GPU  name of each device, before its number
//   FAKECUDA_PEERS=1, FAKECUDA_VMM=1, FAKECUDA_POSIX_FD=1, FAKECUDA_HOST_POINTERS=1: 0 takes away access of a device to
//     another one's memory, virtual memory management, its export, kernels' use of registered memory by its host address
//   FAKECUDA_FAIL=name:code[:calls before[:times]],...   calls that fail
//   FAKECUDA_REPORT         file to which a process that exits appends a line: fakecuda_state()
#define _GNU_SOURCE
#include <sys/stat.h>

#include "fakegpu.h"

enum { MAX_FAILURES = 32, WARP = 32 };

struct reservation {
    u64 base, size;
};
struct failure {
    char name[48];
    CUresult code;
    long after, times;
};

static int initialised, ended, owner;  // owner: the process that called cuInit
static int device_count, visible[MAX_DEVICES];

static struct reservation* reservations;
static size_t reservation_count;
static struct memory** handles;  // index + 1 is the handle; NULL: released
static size_t handle_count;

static struct failure failures[MAX_FAILURES];
static int failure_count;

// ---- calls

// What a call needs. Assumed: after an error of the device, calls that touch no memory still answer.
enum needs { DRIVER, HEALTH, CONTEXT };

// Errors that leave the process in an inconsistent state, as their documentation says.
static int is_fatal(CUresult code) {
    return code == CUDA_ERROR_ILLEGAL_ADDRESS || code == CUDA_ERROR_LAUNCH_TIMEOUT || code == CUDA_ERROR_ASSERT ||
           (code >= CUDA_ERROR_HARDWARE_STACK_ERROR && code <= CUDA_ERROR_LAUNCH_FAILED);
}

static CUresult wanted_failure(const char* call) {
    for (struct failure* f = failures; f < failures + failure_count; ++f) {
        if (strcmp(f->name, call) != 0 || f->times == 0 || f->after-- > 0) continue;
        --f->times;
        if (is_fatal(f->code)) sticky = f->code;
        return f->code;
    }
    return CUDA_SUCCESS;
}

static CUresult enter(const char* call, enum needs needs) {
    if (ended) return CUDA_ERROR_DEINITIALIZED;
    if (!initialised || getpid() != owner) return CUDA_ERROR_NOT_INITIALIZED;
    const CUresult wanted = wanted_failure(call);
    if (wanted) return wanted;
    if (needs >= HEALTH && sticky) return sticky;
    if (needs == CONTEXT && current() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    return CUDA_SUCCESS;
}
#define ENTER(needs)                                  \
    LOCKED();                                         \
    const CUresult refused_ = enter(__func__, needs); \
    if (refused_) return refused_
#define REQUIRE(condition, code) \
    if (!(condition)) return code
#define REQUIRE_VALUE(condition) REQUIRE(condition, CUDA_ERROR_INVALID_VALUE)
#define REQUIRE_DEVICE(device) REQUIRE(device >= 0 && device < device_count, CUDA_ERROR_INVALID_DEVICE)

// ---- start, devices

static long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text != NULL && *text != 0 ? atol(text) : otherwise;
}

static void add_failure(const char* name, CUresult code, long after, long times) {
    struct failure* f = failures;
    while (f < failures + failure_count && f->times > 0) ++f;  // one that has come is forgotten
    if (f == failures + MAX_FAILURES) abort();
    if (f == failures + failure_count) ++failure_count;
    *f = (struct failure){.code = code, .after = after, .times = times};
    snprintf(f->name, sizeof f->name, "%s", name);
}

static void read_failures(void) {
    const char* text = getenv("FAKECUDA_FAIL");
    for (; text != NULL; text = strchr(text, ',') != NULL ? strchr(text, ',') + 1 : NULL) {
        char name[48];
        int code;
        long after = 0, times = 1000000000;
        if (sscanf(text, "%47[^:]:%d:%ld:%ld", name, &code, &after, &times) >= 2) add_failure(name, code, after, times);
    }
}

static void read_devices(void) {
    const int physical = (int)setting("FAKECUDA_DEVICES", 1);
    const char* chosen = getenv("CUDA_VISIBLE_DEVICES");
    device_count = 0;
    for (int device = 0; chosen == NULL && device < physical && device < MAX_DEVICES; ++device)
        visible[device_count++] = device;
    while (chosen != NULL && device_count < MAX_DEVICES) {
        char* end;
        const long device = strtol(chosen, &end, 10);
        if (end == chosen || device < 0 || device >= physical) break;  // as documented: the rest is ignored
        visible[device_count++] = (int)device;
        chosen = *end != 0 ? end + 1 : end;
    }
}

static void read_settings(void) {
    hardware.memory = (u64)setting("FAKECUDA_MEMORY", 1l << 30);
    hardware.delay = (u64)setting("FAKECUDA_DELAY_US", 1000) * 1000;
    hardware.peers = (int)setting("FAKECUDA_PEERS", 1);
    hardware.vmm = (int)setting("FAKECUDA_VMM", 1);
    hardware.posix_fd = (int)setting("FAKECUDA_POSIX_FD", 1);
    hardware.host_pointers = (int)setting("FAKECUDA_HOST_POINTERS", 1);
}

static void forked(void) { pthread_mutex_init(&lock, NULL); }

CUresult cuInit(unsigned int flags) {
    LOCKED();
    REQUIRE_VALUE(flags == 0);
    if (ended) return CUDA_ERROR_DEINITIALIZED;
    if (initialised) return getpid() == owner ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    if (hardware.arena == 0) {  // the first try
        void* arena = mmap(NULL, ARENA + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REQUIRE(arena != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
        hardware.arena = ((u64)arena + GRAIN - 1) / GRAIN * GRAIN;
        read_failures();
        pthread_atfork(NULL, NULL, forked);
    }
    const CUresult wanted = wanted_failure(__func__);
    if (wanted) return wanted;
    read_devices();
    REQUIRE(device_count > 0, CUDA_ERROR_NO_DEVICE);
    read_settings();
    owner = getpid();
    initialised = 1;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    *version = 12080;  // also before cuInit
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
#define NAMED(constant, value) \
    case value: *name = #constant; return CUDA_SUCCESS;
    switch (error) { DATADIST_CUDA_ERRORS(NAMED) FAKE_CUDA_ERRORS(NAMED) }
#undef NAMED
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetCount(int* count) {
    ENTER(DRIVER);
    *count = device_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
    ENTER(DRIVER);
    REQUIRE_DEVICE(device);
    const char* given = getenv("FAKECUDA_NAME");
    snprintf(name, (size_t)bytes, "%s %d", given != NULL ? given : "Fake GPU", visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    ENTER(DRIVER);
    REQUIRE_DEVICE(device);
    memcpy(uuid->bytes, "fakecuda-gpu-000", sizeof uuid->bytes);
    uuid->bytes[15] = (char)('0' + visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(DRIVER);
    REQUIRE_DEVICE(device);
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: *value = hardware.host_pointers; break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = hardware.vmm; break;
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = hardware.posix_fd; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// ---- contexts: only primary ones. A handle is the device's ordinal plus one.

static CUcontext context_of(int device) { return (CUcontext)(intptr_t)(device + 1); }

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    ENTER(HEALTH);
    REQUIRE_DEVICE(device);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(DRIVER);
    REQUIRE(context != NULL, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(contexts.depth < STACK, CUDA_ERROR_UNKNOWN);
    contexts.device[contexts.depth++] = (int)(intptr_t)context - 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    ENTER(DRIVER);
    REQUIRE(contexts.depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    if (context != NULL) *context = context_of(current());
    --contexts.depth;
    return CUDA_SUCCESS;
}

// ---- memory of a device, memory of the host

CUresult cuMemGetInfo_v2(size_t* available, size_t* total) {
    ENTER(CONTEXT);
    *total = hardware.memory;
    *available = hardware.memory - used[current()];
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    ENTER(CONTEXT);
    REQUIRE_VALUE(bytes > 0);
    *address = new_addresses(bytes);
    struct memory* memory = *address != 0 ? new_memory(bytes, current(), 0) : NULL;
    REQUIRE(memory != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    add_range(*address, bytes, memory, DEVICE_ALLOCATED)->access[current()] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
}

// Takes memory away, at the end of whose use the call does not wait.
static void take_away(struct range* r, const char* call) {
    check_unused(r, call);
    if (r->memory != NULL) drop_memory(r->memory);
    if (r->kind == HOST_ALLOCATED) munmap((void*)r->base, r->size);
    remove_range(r);
}

// Assumed: freeing waits for the device. No document says so, but programs rely on it.
static CUresult free_memory(u64 base, enum kind kind, const char* call) {
    if (find_at(base, kind) != NULL) check_unused(find_at(base, kind), call);
    drain(NULL);
    struct range* r = find_at(base, kind);
    REQUIRE_VALUE(r != NULL);
    take_away(r, call);
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(CONTEXT);
    return free_memory(address, DEVICE_ALLOCATED, __func__);
}

CUresult cuMemAllocHost_v2(void** address, size_t bytes) {
    ENTER(CONTEXT);
    REQUIRE_VALUE(bytes > 0);
    *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(*address != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    memset(*address, POISON, bytes);
    add_range((u64)*address, bytes, NULL, HOST_ALLOCATED);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* address) {
    ENTER(CONTEXT);
    return free_memory((u64)address, HOST_ALLOCATED, __func__);
}

CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned int flags) {
    ENTER(CONTEXT);
    REQUIRE_VALUE(address != NULL && bytes > 0 && !is_device((u64)address));
    REQUIRE(!any_in((u64)address, bytes), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    add_range((u64)address, bytes, NULL, HOST_REGISTERED)->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* address) {
    ENTER(CONTEXT);
    struct range* r = find_at((u64)address, HOST_REGISTERED);
    REQUIRE(r != NULL, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    take_away(r, __func__);
    return CUDA_SUCCESS;
}

// ---- virtual memory management

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
    ENTER(HEALTH);
    REQUIRE_DEVICE(properties->location.id);
    *bytes = GRAIN;
    return CUDA_SUCCESS;
}

static CUmemGenericAllocationHandle new_handle(struct memory* memory) {
    handles = realloc(handles, (handle_count + 1) * sizeof *handles);
    handles[handle_count++] = memory;
    return handle_count;
}

static struct memory* memory_of(CUmemGenericAllocationHandle handle) {
    return handle >= 1 && handle <= handle_count ? handles[handle - 1] : NULL;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
    ENTER(HEALTH);
    const CUmemLocation where = properties->location;
    const int types = properties->requestedHandleTypes;
    REQUIRE_VALUE(bytes > 0 && bytes % GRAIN == 0 && flags == 0 && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED);
    REQUIRE_VALUE(where.type == CU_MEM_LOCATION_TYPE_DEVICE);
    REQUIRE_DEVICE(where.id);
    REQUIRE(hardware.vmm, CUDA_ERROR_NOT_SUPPORTED);
    // Any other export needs a daemon of NVIDIA's, or Windows.
    REQUIRE(!(types & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), CUDA_ERROR_NOT_PERMITTED);
    REQUIRE(types == 0 || hardware.posix_fd, CUDA_ERROR_NOT_SUPPORTED);  // assumed: this code
    struct memory* memory = new_memory(bytes, where.id, types);
    REQUIRE(memory != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = new_handle(memory);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(HEALTH);
    struct memory* memory = memory_of(handle);
    if (memory == NULL) violation("cuMemRelease of a handle that does not exist");  // documented as undefined
    REQUIRE_VALUE(memory != NULL);
    handles[handle - 1] = NULL;
    drop_memory(memory);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    ENTER(HEALTH);
    REQUIRE_VALUE(bytes > 0 && bytes % GRAIN == 0 && alignment <= GRAIN && flags == 0);
    REQUIRE(hardware.vmm, CUDA_ERROR_NOT_SUPPORTED);
    *address = new_addresses(bytes);
    REQUIRE(*address != 0, CUDA_ERROR_OUT_OF_MEMORY);
    reservations = realloc(reservations, (reservation_count + 1) * sizeof *reservations);
    reservations[reservation_count++] = (struct reservation){*address, bytes};
    return CUDA_SUCCESS;
}

static struct reservation* reservation_of(u64 at) {
    for (size_t i = 0; i < reservation_count; ++i)
        if (at - reservations[i].base < reservations[i].size) return &reservations[i];
    return NULL;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER(HEALTH);
    struct reservation* r = reservation_of(address);
    REQUIRE_VALUE(r != NULL && r->base == address && r->size == bytes);
    REQUIRE_VALUE(!any_in(address, bytes));  // assumed: while memory is mapped there
    *r = reservations[--reservation_count];
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER(HEALTH);
    const struct reservation* r = reservation_of(address);
    struct memory* memory = memory_of(handle);
    REQUIRE_VALUE(memory != NULL && r != NULL && offset == 0 && flags == 0);
    REQUIRE_VALUE(bytes > 0 && bytes % GRAIN == 0 && bytes <= memory->size && address % GRAIN == 0);
    REQUIRE_VALUE(address + bytes <= r->base + r->size && !any_in(address, bytes));
    ++memory->references;
    add_range(address, bytes, memory, DEVICE_MAPPED);  // no device has access yet
    return CUDA_SUCCESS;
}

// The fake knows this and the next call for one mapping at a time.
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
    ENTER(HEALTH);
    struct range* r = find_at(address, DEVICE_MAPPED);
    REQUIRE_VALUE(r != NULL && r->size == bytes);
    for (size_t i = 0; i < count; ++i) {
        const int device = access[i].location.id, flags = access[i].flags;
        REQUIRE_DEVICE(device);
        REQUIRE_VALUE(flags == READS || flags == WRITES || flags == CU_MEM_ACCESS_FLAGS_PROT_NONE);
        REQUIRE(hardware.peers || device == r->device, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);  // assumed: this code
        r->access[device] = flags;
    }
    return CUDA_SUCCESS;
}

// Does not wait for work: kernels that ran met CUDA_ERROR_ILLEGAL_ADDRESS (vLLM's pull request 43020).
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER(HEALTH);
    struct range* r = find_at(address, DEVICE_MAPPED);
    REQUIRE_VALUE(r != NULL && r->size == bytes);
    take_away(r, __func__);
    return CUDA_SUCCESS;
}

// ---- other processes

// The mode of exported memory's file; its last three bits have the device.
#define EXPORTED (S_IFREG | S_ISVTX | S_IRUSR | S_IWUSR)

CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(HEALTH);
    const struct memory* memory = memory_of(handle);
    REQUIRE_VALUE(memory != NULL && flags == 0 && (memory->handle_types & type) != 0);
    const int fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 3);
    REQUIRE(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);  // assumed: this code
    fchmod(fd, (mode_t)(EXPORTED & 07777) | (mode_t)visible[memory->device]);
    *(int*)shareable = fd;
    return CUDA_SUCCESS;
}

static int device_of_physical(int physical) {
    for (int device = 0; device < device_count; ++device)
        if (visible[device] == physical) return device;
    return -1;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
    ENTER(HEALTH);
    REQUIRE_VALUE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const int fd = (int)(intptr_t)shareable;
    struct stat file;
    // Assumed: any other descriptor is refused with this code, and the call does not block.
    REQUIRE_VALUE(fstat(fd, &file) == 0 && (file.st_mode & ~7u) == EXPORTED && file.st_nlink == 0);
    const int device = device_of_physical((int)(file.st_mode & 7));
    REQUIRE_DEVICE(device);  // assumed: this code for memory of a device that CUDA_VISIBLE_DEVICES hides
    struct memory* memory = map_memory((struct memory){
        .size = (u64)file.st_size,
        .fd = fcntl(fd, F_DUPFD_CLOEXEC, 3),
        .device = device,
        .handle_types = type,
        .imported = 1,
    });
    REQUIRE(memory != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = new_handle(memory);
    return CUDA_SUCCESS;
}

// ---- questions about addresses

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER(CONTEXT);
    const struct range* r = find(address);
    REQUIRE_VALUE(r != NULL);
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(int*)value = r->memory != NULL ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = r->device; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

// ---- streams, events, copies

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
    ENTER(CONTEXT);
    *stream = (CUstream)new_stream(current());
    return *stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Null is the default stream of the current device.
static struct stream* stream_of(CUstream handle) {
    static struct stream* defaults[MAX_DEVICES];
    if (handle == NULL && defaults[current()] == NULL) defaults[current()] = new_stream(current());
    const struct stream* wanted = handle == NULL ? defaults[current()] : (struct stream*)handle;
    struct stream* s = streams;
    while (s != NULL && s != wanted) s = s->next;
    return s;
}

// While a stream is captured, threads must be relaxed to ask for events, as with graphs of torch.
static const struct stream* captured;
static __thread CUstreamCaptureMode mode;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* with) {
    const CUstreamCaptureMode before = mode;
    mode = *with;
    *with = before;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    ENTER(CONTEXT);
    struct stream* s = stream_of(stream);
    REQUIRE(s != NULL, CUDA_ERROR_INVALID_HANDLE);
    *status = s == captured;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER(CONTEXT);
    struct stream** at = &streams;
    while (*at != NULL && *at != (struct stream*)stream) at = &(*at)->next;
    struct stream* s = *at;
    REQUIRE(s != NULL, CUDA_ERROR_INVALID_HANDLE);
    // The driver allows it, and ends the work. In this library it is a wait that somebody forgot.
    if (s->first != NULL) violation("cuStreamDestroy with unfinished work");
    *at = s->next;
    s->ending = 1;
    pthread_cond_signal(&s->work);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(CONTEXT);
    struct stream* s = stream_of(stream);
    REQUIRE(s != NULL, CUDA_ERROR_INVALID_HANDLE);
    return drain(s);
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
    ENTER(CONTEXT);
    struct event* e = calloc(1, sizeof *e);
    e->device = current();
    ++event_count;
    *event = (CUevent)e;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    ENTER(CONTEXT);
    --event_count;  // the bytes stay: work that has not ended may use them
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(CONTEXT);
    struct event* e = (struct event*)event;
    struct stream* s = stream_of(stream);
    REQUIRE(s != NULL && e->device == s->device, CUDA_ERROR_INVALID_HANDLE);
    enqueue(s, (struct operation){.what = RECORD, .event = e, .sequence = ++e->recorded});
    return CUDA_SUCCESS;
}

// A question is no wait: nothing begins earlier because of it.
CUresult cuEventQuery(CUevent event) {
    ENTER(HEALTH);
    const struct event* e = (struct event*)event;
    REQUIRE(captured == NULL || mode == CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return e->done < e->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

// Pageable bytes are taken before the call returns. A copy to pageable memory, or from host to host, has then ended; for
// the former, documents of CUDA 12 and later say "might".
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(CONTEXT);
    struct stream* s = stream_of(stream);
    REQUIRE(s != NULL, CUDA_ERROR_INVALID_HANDLE);
    // Assumed, also of memory mapped for reading only: the call refuses, whereas a kernel ends all work with error 700.
    REQUIRE_VALUE(usable(to, bytes, WRITES, s->device, BY_COPY) && usable(from, bytes, READS, s->device, BY_COPY));
    if (to != from && meet(to, bytes, from, bytes)) violation("a copy overlaps itself, at %#llx", to);
    struct operation* op = enqueue(s, (struct operation){.what = COPY, .to = to, .from = from, .bytes = bytes});
    if (!is_device(from) && find(from) == NULL) {
        op->staged = malloc(bytes);
        memcpy(op->staged, (const char*)from, bytes);
        op->from = (u64)op->staged;
    }
    const int late = is_device(to) || (is_device(from) && find(to) != NULL);
    return late ? CUDA_SUCCESS : drain(s);
}

// As CUDA 12.8 declares it, and drivers export it under this name: 13.0 has another one. No order is promised: this is
// the reverse. The attributes are an order of access, two locations of two words, and flags.
CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, int* attributes,
                            size_t* firsts, size_t kinds, size_t* failed, CUstream stream) {
    if (stream == NULL || count == 0 || kinds != 1 || *firsts != 0 || attributes[0] != 1 || attributes[5] != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (*failed = count; (*failed)-- > 0;) {
        const CUresult result = cuMemcpyAsync(to[*failed], from[*failed], bytes[*failed], stream);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

// ---- the kernel: a module is its text, and its one function the same

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    ENTER(CONTEXT);
    const char* text = image;
    REQUIRE(strstr(text, ".version") != NULL, CUDA_ERROR_INVALID_IMAGE);
    REQUIRE(strstr(text, ".target") != NULL && strstr(text, ".address_size 64") != NULL, CUDA_ERROR_INVALID_PTX);
    *module = (CUmodule)strdup(text);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    ENTER(CONTEXT);
    const int found = strcmp(name, "datadist_copy") == 0 && strstr((char*)module, ".entry datadist_copy(") != NULL;
    REQUIRE(found, CUDA_ERROR_NOT_FOUND);
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void** parameters, void** extra) {
    ENTER(CONTEXT);
    struct stream* s = stream_of(stream);
    REQUIRE(s != NULL && function != NULL, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE_VALUE(grid_x > 0 && block_x > 0 && block_x <= 1024 && parameters != NULL && extra == NULL);
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || block_x % WARP != 0)
        violation("datadist_copy needs one dimension and whole warps");
    enqueue(s, (struct operation){
                   .what = KERNEL,
                   .to = *(u64*)parameters[0],
                   .from = *(u64*)parameters[1],
                   .runs = *(u64*)parameters[2],
                   .pairs = *(uint32_t*)parameters[3],
                   .run_count = *(uint32_t*)parameters[4],
               });
    return CUDA_SUCCESS;
}

// ---- for tests: tests/support/fakecuda.py calls these

void fakecuda_fail(const char* name, CUresult code, long after, long times) {
    LOCKED();
    add_failure(name, code, after, times);
}

// Calls work again, also after an error that no driver recovers from.
void fakecuda_heal(void) {
    LOCKED();
    failure_count = 0;
    sticky = CUDA_SUCCESS;
}

void fakecuda_set_delay(long microseconds) {
    LOCKED();
    hardware.delay = (u64)microseconds * 1000;
    wake_all();
}

// A stream of any thread is captured from now on, or none.
void fakecuda_capture(CUstream stream) {
    LOCKED();
    captured = (struct stream*)stream;
}

void fakecuda_set_rate(long bytes_per_second) {
    LOCKED();
    hardware.rate = (u64)bytes_per_second;
    wake_all();
}

// Until hang(0) no event completes, and its stream does nothing more.
void fakecuda_hang(int on) {
    LOCKED();
    hanging = on;
    wake_all();
}

// Where the host can read and write the bytes of a device address as long as they are mapped there; NULL: no memory.
void* fakecuda_alias(CUdeviceptr address) {
    LOCKED();
    return is_device(address) ? bytes_at(address) : NULL;
}

static u64 bytes_of(enum kind kind) {
    u64 bytes = 0;
    for (size_t i = 0; i < range_count; ++i) bytes += ranges[i].kind == kind ? ranges[i].size : 0;
    return bytes;
}

// Writes what there is as a line of JSON. "kept" has what the library keeps until the process ends, on purpose. Of
// "leaked" a program that closed everything has nothing.
static void write_state(FILE* out) {
    u64 made = 0, imported = 0, stream_count = 0, unfinished = 0;
    for (size_t i = 0; i < handle_count; ++i)
        if (handles[i] != NULL) ++*(handles[i]->imported ? &imported : &made);
    for (const struct stream* s = streams; s != NULL; s = s->next) {
        ++stream_count;
        unfinished += s->first != NULL;
    }
    fprintf(out, "{\"pid\": %d, \"sticky\": %d, \"unfinished_streams\": %llu, ", getpid(), sticky, unfinished);
    fprintf(out, "\"copies\": %llu, \"kernels\": %llu, ", copies, kernels);
    fprintf(out, "\"leaked\": {\"handles\": %llu, \"imports\": %llu, ", made, imported);
    fprintf(out, "\"reservations\": %zu, \"mapped_bytes\": %llu, ", reservation_count, bytes_of(DEVICE_MAPPED));
    fprintf(out, "\"registered_bytes\": %llu}, ", bytes_of(HOST_REGISTERED));
    fprintf(out, "\"kept\": {\"streams\": %llu, \"events\": %zu, ", stream_count, event_count);
    fprintf(out, "\"device_bytes\": %llu, ", bytes_of(DEVICE_ALLOCATED));
    fprintf(out, "\"host_bytes\": %llu}, \"violations\": [%s]}\n", bytes_of(HOST_ALLOCATED), violations);
}

void fakecuda_state(char* text, size_t room) {
    LOCKED();
    FILE* out = fmemopen(text, room, "w");
    write_state(out);
    fclose(out);
}

__attribute__((destructor)) static void end(void) {
    LOCKED();
    if (!initialised || getpid() != owner) return;
    ended = 1;
    const char* path = getenv("FAKECUDA_REPORT");
    FILE* out = path != NULL ? fopen(path, "ae") : NULL;
    if (out == NULL) return;
    static char buffer[1 << 16];
    setvbuf(out, buffer, _IOFBF, sizeof buffer);  // written at once, so that lines of several processes stay whole
    write_state(out);
    fclose(out);
}
