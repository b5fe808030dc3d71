// The hardware behind fakecuda.c: memory with addresses, streams that work late, the one kernel, and what it saw go wrong.
//
// fakecuda.c has the driver's calls. Only it includes this file.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fakeabi.h"

typedef unsigned long long u64;

enum { MAX_DEVICES = 8, STACK = 16, POISON = 0xA7 };
#define GRAIN (2ull << 20)  // granularity of device memory
#define ARENA (512ull << 30)  // bytes of addresses for all device memory that a process ever has

// ---- state. `lock` guards everything except what a thread has of its own.

struct memory {
    u64 size;
    int fd;  // -1: nobody can share it
    int device, handle_types, references, imported;
    char* bytes;
};

enum kind { DEVICE_ALLOCATED, DEVICE_MAPPED, HOST_ALLOCATED, HOST_REGISTERED };
struct range {  // addresses with memory behind them
    u64 base, size;
    struct memory* memory;  // NULL: the host's
    enum kind kind;
    int access[MAX_DEVICES];  // CU_MEM_ACCESS_FLAGS_*
    int device;  // of the memory, or of the context that registered it
    unsigned flags;  // of cuMemHostRegister
};

struct event {
    int device;
    u64 recorded, done;
};

enum what { COPY, KERNEL, RECORD };
struct operation {
    struct operation* next;
    enum what what;
    u64 enqueued;
    u64 to, from, bytes;  // of a copy; of the kernel the lists of bases
    u64 runs, pairs, run_count;  // of the kernel
    char* staged;  // the bytes of a pageable source, taken when the copy was enqueued
    struct event* event;
    u64 sequence;
};
struct stream {
    struct stream* next;
    struct operation *first, *last;  // the first stays in the queue until it has ended
    pthread_cond_t work;
    u64 busy_until;
    int device, ending;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;  // a stream has less to do, for which a call waits

static struct {
    int peers, vmm, posix_fd, host_pointers;
    u64 memory, delay, rate, arena, arena_used;
} hardware;
static CUresult sticky;  // the error that ended all work, and that every later call returns
static int waiters;  // calls that wait for a stream: all streams begin at once
static int hanging;

static struct range* ranges;
static size_t range_count;
static struct stream* streams;
static size_t event_count;
static u64 used[MAX_DEVICES], copies, kernels;

static char violations[1 << 15];  // strings of JSON

static __thread struct {
    int device[STACK];
    int depth;
} contexts;  // the stack of current contexts

static int current(void) { return contexts.depth > 0 ? contexts.device[contexts.depth - 1] : -1; }

static void unlock(const int* unused) { pthread_mutex_unlock(&lock); }
#define LOCKED() __attribute__((cleanup(unlock), unused)) const int locked_ = pthread_mutex_lock(&lock)

static u64 now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}

static void wait_until(pthread_cond_t* condition, u64 when) {
    const struct timespec t = {(time_t)(when / 1000000000), (long)(when % 1000000000)};
    pthread_cond_clockwait(condition, &lock, CLOCK_MONOTONIC, &t);
}

__attribute__((format(printf, 1, 2))) static void violation(const char* format, ...) {
    const size_t seen = strlen(violations);
    if (seen + 256 > sizeof violations) return;
    char text[250];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    sprintf(violations + seen, "%s\"%s\"", seen > 0 ? ", " : "", text);
}

// ---- addresses and bytes

static int is_device(u64 at) { return at - hardware.arena < ARENA; }

static u64 new_addresses(u64 size) {
    const u64 at = hardware.arena + hardware.arena_used;
    hardware.arena_used += (size + GRAIN - 1) / GRAIN * GRAIN + GRAIN;  // whoever runs over the end meets no memory
    return hardware.arena_used <= ARENA ? at : 0;
}

static struct range* find(u64 at) {
    for (struct range* r = ranges; r < ranges + range_count; ++r)
        if (at - r->base < r->size) return r;
    return NULL;
}

static struct range* find_at(u64 base, enum kind kind) {
    struct range* r = find(base);
    return r != NULL && r->base == base && r->kind == kind ? r : NULL;
}

static int meet(u64 a, u64 a_bytes, u64 b, u64 b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

static int any_in(u64 base, u64 size) {
    for (size_t i = 0; i < range_count; ++i)
        if (meet(ranges[i].base, ranges[i].size, base, size)) return 1;
    return 0;
}

static struct range* add_range(u64 base, u64 size, struct memory* memory, enum kind kind) {
    ranges = realloc(ranges, (range_count + 1) * sizeof *ranges);
    struct range* r = &ranges[range_count++];
    *r = (struct range){.base = base, .size = size, .memory = memory, .kind = kind};
    r->device = memory != NULL ? memory->device : current();
    return r;
}

static void remove_range(struct range* r) { *r = ranges[--range_count]; }

static int unlinked_file(u64 size) {
    char path[] = "/var/tmp/fakecuda-XXXXXX";  // in a tmpfs files have seals as memfds do
    const int fd = mkostemp(path, O_CLOEXEC);
    unlink(path);
    if (fd >= 0 && ftruncate(fd, (off_t)size) == 0) return fd;
    close(fd);
    return -1;
}

static struct memory* map_memory(struct memory made) {
    const int flags = made.fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    made.bytes = mmap(NULL, made.size, PROT_READ | PROT_WRITE, flags, made.fd, 0);
    if (made.bytes == MAP_FAILED) {
        if (made.fd >= 0) close(made.fd);
        return NULL;
    }
    made.references = 1;
    struct memory* memory = malloc(sizeof made);
    *memory = made;
    return memory;
}

static struct memory* new_memory(u64 size, int device, int handle_types) {
    if (used[device] + size > hardware.memory) return NULL;
    struct memory wanted = {.size = size, .fd = -1, .device = device, .handle_types = handle_types};
    if (handle_types != 0 && (wanted.fd = unlinked_file(size)) < 0) return NULL;
    struct memory* memory = map_memory(wanted);
    if (memory == NULL) return NULL;
    memset(memory->bytes, POISON, size < (16u << 20) ? size : 16u << 20);  // all of a large pool would take long
    used[device] += size;
    return memory;
}

static void drop_memory(struct memory* memory) {
    if (--memory->references > 0) return;
    if (!memory->imported) used[memory->device] -= memory->size;
    munmap(memory->bytes, memory->size);
    if (memory->fd >= 0) close(memory->fd);
    free(memory);
}

enum access { READS = CU_MEM_ACCESS_FLAGS_PROT_READ, WRITES = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
enum user { BY_COPY, BY_KERNEL };

// Why a device cannot use these bytes; NULL: it can. Only copies can use pageable memory.
static const char* refusal(u64 at, u64 bytes, enum access access, int device, enum user user) {
    const struct range *first = find(at), *last = find(at + bytes - 1);
    if (bytes == 0) return NULL;
    if (!is_device(at)) {
        if (first != last) return "is partly registered";
        if (first == NULL) return user == BY_KERNEL ? "is pageable" : NULL;
        if (user == BY_COPY || first->kind == HOST_ALLOCATED) return NULL;
        if (!(first->flags & CU_MEMHOSTREGISTER_DEVICEMAP)) return "is not mapped for devices";
        return hardware.host_pointers ? NULL : "has another address on the device";
    }
    if (first == NULL || first != last) return "has no memory: freed, unmapped, or never mapped";
    if (first->access[device] == CU_MEM_ACCESS_FLAGS_PROT_NONE) return "is not accessible to this device";
    return (first->access[device] & (int)access) == (int)access ? NULL : "is mapped for reading only";
}

static int usable(u64 at, u64 bytes, enum access access, int device, enum user user) {
    const char* why = refusal(at, bytes, access, device, user);
    if (why != NULL) violation("%s of %#llx, which %s", access == READS ? "read" : "write", at, why);
    return why == NULL;
}

// Where the bytes lie for this driver; NULL: a device address without memory.
static char* bytes_at(u64 at) {
    if (!is_device(at)) return (char*)at;
    const struct range* r = find(at);
    return r != NULL ? r->memory->bytes + (at - r->base) : NULL;
}

// ---- streams

static void wake_all(void) {
    for (struct stream* s = streams; s != NULL; s = s->next) pthread_cond_signal(&s->work);
}

// Lets the time pass that these bytes take. Other threads go on meanwhile, and may take the memory away.
static void pace(struct stream* s, u64 bytes) {
    if (hardware.rate == 0) return;
    const u64 begin = now();
    if (s->busy_until < begin) s->busy_until = begin;
    s->busy_until += bytes * 1000000000 / hardware.rate;
    while (hardware.rate > 0 && now() + 100000 < s->busy_until) wait_until(&s->work, s->busy_until);
}

static CUresult move(struct stream* s, u64 to, u64 from, u64 bytes) {
    if (bytes == 0) return CUDA_SUCCESS;
    pace(s, bytes);
    char *target = bytes_at(to), *source = bytes_at(from);
    if (target == NULL || source == NULL) {
        violation("memory at %#llx went away under a copy", target == NULL ? to : from);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    memmove(target, source, bytes);
    return CUDA_SUCCESS;
}

static CUresult read_words(const struct stream* s, u64 at, u64* words, u64 count) {
    if (at % 8 != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    if (!usable(at, 8 * count, READS, s->device, BY_KERNEL)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    memcpy(words, bytes_at(at), 8 * count);
    return CUDA_SUCCESS;
}

// datadist_copy: all pairs of bases times all runs (destination offset, source offset, bytes), as memory has them now.
static CUresult run_kernel(struct stream* s, const struct operation* op) {
    for (u64 pair = op->pairs; pair-- > 0;)
        for (u64 run = op->run_count; run-- > 0;) {
            u64 to, from, words[3];
            CUresult bad = read_words(s, op->to + 8 * pair, &to, 1);
            if (!bad) bad = read_words(s, op->from + 8 * pair, &from, 1);
            if (!bad) bad = read_words(s, op->runs + 24 * run, words, 3);
            if (bad) return bad;
            to += words[0];
            from += words[1];
            if (!usable(to, words[2], WRITES, s->device, BY_KERNEL)) return CUDA_ERROR_ILLEGAL_ADDRESS;
            if (!usable(from, words[2], READS, s->device, BY_KERNEL)) return CUDA_ERROR_ILLEGAL_ADDRESS;
            if (to != from && meet(to, words[2], from, words[2])) violation("a run overlaps itself, at %#llx", to);
            if ((bad = move(s, to, from, words[2]))) return bad;
        }
    return CUDA_SUCCESS;
}

static void perform(struct stream* s, const struct operation* op) {
    CUresult bad = CUDA_SUCCESS;
    if (op->what == COPY && !sticky) {
        ++copies;
        bad = move(s, op->to, op->from, op->bytes);
    } else if (op->what == KERNEL && !sticky) {
        ++kernels;
        bad = run_kernel(s, op);
    } else if (op->what == RECORD) {
        op->event->done = op->sequence;
    }
    if (bad) sticky = bad;
}

static void* serve(void* argument) {
    struct stream* s = argument;
    LOCKED();
    while (s->first != NULL || !s->ending) {
        struct operation* op = s->first;
        if (op == NULL || (op->what == RECORD && hanging)) {
            pthread_cond_wait(&s->work, &lock);
        } else if (waiters == 0 && !s->ending && now() < op->enqueued + hardware.delay) {
            wait_until(&s->work, op->enqueued + hardware.delay);
        } else {
            perform(s, op);
            s->first = op->next;
            free(op->staged);
            free(op);
            if (waiters > 0) pthread_cond_broadcast(&idle);
        }
    }
    free(s);
    return NULL;
}

static struct stream* new_stream(int device) {
    struct stream* s = calloc(1, sizeof *s);
    *s = (struct stream){.next = streams, .device = device, .work = PTHREAD_COND_INITIALIZER};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's own threads handle its signals
    pthread_t thread;
    const int bad = pthread_create(&thread, NULL, serve, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (bad) return NULL;
    pthread_setname_np(thread, "fakecuda");
    pthread_detach(thread);
    return streams = s;
}

static struct operation* enqueue(struct stream* s, struct operation made) {
    struct operation* op = malloc(sizeof made);
    *op = made;
    op->enqueued = now();
    if (s->first == NULL)
        s->first = op;
    else
        s->last->next = op;
    s->last = op;
    pthread_cond_signal(&s->work);
    return op;
}

static int has_work_since(u64 time, const struct stream* only) {
    for (const struct stream* s = streams; s != NULL; s = s->next)
        if ((only == NULL || s == only) && s->first != NULL && s->first->enqueued <= time) return 1;
    return 0;
}

// Waits for what a stream, or any with NULL, was given before; streams may come and go meanwhile.
static CUresult drain(const struct stream* only) {
    const u64 begin = now();
    ++waiters;
    wake_all();
    while (has_work_since(begin, only)) pthread_cond_wait(&idle, &lock);
    --waiters;
    return sticky;
}

// Finds work that still uses memory which goes away. What a kernel's runs address is known only when it begins.
static void check_unused(const struct range* r, const char* call) {
    for (struct stream* s = streams; s != NULL; s = s->next)
        for (const struct operation* op = s->first; op != NULL; op = op->next) {
            const u64 bytes = op->what == KERNEL ? 8 * op->pairs : op->bytes;
            if (meet(op->to, bytes, r->base, r->size) || meet(op->from, bytes, r->base, r->size) ||
                meet(op->runs, 24 * op->run_count, r->base, r->size))
                violation("%s of %#llx, which unfinished work uses", call, r->base);
        }
}
