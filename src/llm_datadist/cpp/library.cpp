// libllm_datadist.so: finds or starts the interpreter, and passes calls to the bridge in the native module.
//
// It has no Python symbol to link, so that programs link without libpython. docs/notes/cpp.md: who touches what.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "llm_datadist/call.h"

extern "C" char** environ;

namespace {

constexpr std::uint32_t failed = 0xFFFFFFFF;

// No object with a destructor: static destructors of the program call too.
thread_local char last_error[1024];

std::atomic<const LldBridge*> bridge{nullptr};
std::atomic<int> loading{0};  // threads that load, or have loaded
bool forked = false;  // this process is a copy of one that had loaded, or was about to
std::mutex starting;
bool started_here = false;  // the interpreter

using Error = std::runtime_error;

std::uint32_t fail(const char* text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    return failed;
}

// A function of Python; null or an Error if this interpreter has none.
template <typename Function>
Function* find(const char* name, bool required = true) {
    auto* function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    if (function == nullptr && required) throw Error(std::string("this Python has no ") + name);
    return function;
}

bool initialized() {
    auto* function = find<int()>("Py_IsInitialized", false);
    return function != nullptr && function() != 0;
}

void execute(const char* code) { find<int(const char*)>("PyRun_SimpleString")(code); }

bool exists(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

// The interpreter that LLM_DATADIST_PYTHON names, or the one of the folder that this library is installed in.
std::string interpreter() {
    const char* named = getenv("LLM_DATADIST_PYTHON");
    if (named != nullptr && *named != '\0') return named;
    Dl_info here;
    if (dladdr(reinterpret_cast<void*>(&initialized), &here) == 0) return "python3";
    // PREFIX/lib/python3.x/site-packages/llm_datadist/cpp/lib/libllm_datadist.so
    char file[PATH_MAX];
    if (realpath(here.dli_fname, file) == nullptr) return "python3";
    std::string folder = file;
    for (int i = 0; i < 7; ++i) folder.resize(std::min(folder.size(), folder.rfind('/')));
    return exists(folder + "/bin/python3") ? folder + "/bin/python3" : "python3";
}

// Lines: the executable, so that it finds its virtual environment; the shared library; other places for it.
constexpr char question[] =
    "import os, sys, sysconfig as s\n"
    "name = s.get_config_var('INSTSONAME') or ''\n"
    "print(sys.executable, os.path.join(s.get_config_var('LIBDIR') or '', name), name, sep='\\n')";

// Runs a program and returns its standard output.
std::string output_of(const std::string& program) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw Error(std::string("pipe2: ") + strerror(errno));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    std::string name = program, option = "-c", code = question;
    char* arguments[] = {&name[0], &option[0], &code[0], nullptr};
    pid_t child;
    const int error = posix_spawnp(&child, program.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    std::string output;
    char part[512];
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0 || (got < 0 && errno == EINTR);)
        if (got > 0) output.append(part, static_cast<std::size_t>(got));
    close(ends[0]);
    int status = 0;
    if (error == 0)
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (error != 0 || output.empty())
        throw Error(program + (error != 0 ? std::string(": ") + strerror(error) : " printed nothing") +
                    "; name an interpreter that has open-datadist in LLM_DATADIST_PYTHON");
    return output;
}

std::string line(std::string& lines) {
    const std::size_t end = lines.find('\n');
    std::string first = lines.substr(0, end);
    lines.erase(0, end == std::string::npos ? end : end + 1);
    return first;
}

// Python's main thread. It outlives every call, so no thread of the program is that one.
struct Start {
    std::string executable, error;
    bool done = false;
    std::mutex mutex;
    std::condition_variable over;

    void run() {
        try {
            if (auto* name = find<void(const wchar_t*)>("Py_SetProgramName", false)) {
                auto* decoded = find<wchar_t*(const char*, std::size_t*)>("Py_DecodeLocale")(executable.c_str(), nullptr);
                if (decoded != nullptr) name(decoded);  // it stays in use
            }
            find<void(int)>("Py_InitializeEx")(0);  // no signal handlers
            execute("import threading");  // it takes the thread that imports it for the main thread
            find<void*()>("PyEval_SaveThread")();
        } catch (const std::exception& problem) {
            error = problem.what();
        }
        {
            const std::lock_guard<std::mutex> lock(mutex);
            done = true;
            over.notify_all();
        }
        for (;;) pause();
    }
};

void start() {
    const std::string program = interpreter();
    std::string lines = output_of(program);
    auto* started = new Start();  // used by a thread that never ends
    started->executable = line(lines);
    const std::string path = line(lines), name = line(lines);
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr && dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
        throw Error(program + " has no shared libpython (" + path +
                    "): install it (Debian: libpython3.x), or name an interpreter that was built with --enable-shared in "
                    "LLM_DATADIST_PYTHON");
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    std::thread([started] { started->run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    std::unique_lock<std::mutex> lock(started->mutex);
    started->over.wait(lock, [started] { return started->done; });
    if (!started->error.empty()) throw Error(started->error);
    started_here = true;
}

// Text of the exception that Python has set.
std::string python_error() {
    void *kind = nullptr, *value = nullptr, *trace = nullptr;
    find<void(void**, void**, void**)>("PyErr_Fetch")(&kind, &value, &trace);
    void* text = find<void*(void*)>("PyObject_Str")(value == nullptr ? kind : value);
    const char* bytes =
        text == nullptr ? nullptr : find<const char*(void*, ssize_t*)>("PyUnicode_AsUTF8AndSize")(text, nullptr);
    const std::string found = bytes == nullptr ? "import llm_datadist fails" : bytes;
    find<void()>("PyErr_Clear")();
    for (void* each : {kind, value, trace, text})
        if (each != nullptr) find<void(void*)>("Py_DecRef")(each);
    return found;
}

const LldBridge* load() {
    {
        // Not held below: a thread that waits for it here may hold Python's lock.
        const std::lock_guard<std::mutex> lock(starting);
        if (!initialized()) start();
    }
    auto* import_capsule = find<void*(const char*, int)>("PyCapsule_Import");
    auto* release = find<void(int)>("PyGILState_Release");
    const int held = find<int()>("PyGILState_Ensure")();
    // First, because the other one hides why an import fails. Its reference is kept, as the module is.
    const void* package = find<void*(const char*)>("PyImport_ImportModule")("llm_datadist");
    const auto* found =
        package == nullptr ? nullptr : static_cast<const LldBridge*>(import_capsule(LLM_DATADIST_BRIDGE, 0));
    std::string error;
    if (found == nullptr)
        error = python_error() + "; install open-datadist of this library's version for the interpreter, or name another one in LLM_DATADIST_PYTHON";
    else if (found->abi != LLM_DATADIST_ABI)
        error = "libllm_datadist.so and the interpreter's open-datadist are of different versions; use those of one installation";
    release(held);
    if (!error.empty()) throw Error(error);
    return found;
}

// Finalizes what is left, as Python does at its exit. It runs before the static destructors of all that the interpreter
// has loaded; those of the program may follow, and find that nothing is left to do.
void at_exit() {
    if (forked) return;
    const int held = find<int()>("PyGILState_Ensure")();
    execute("import atexit; atexit._run_exitfuncs()");
    find<void(int)>("PyGILState_Release")(held);
}

// The loaded bridge, or null with a text.
const LldBridge* loaded() {
    static const int handled = pthread_atfork(nullptr, nullptr, [] { forked = loading.load() > 0; });
    static_cast<void>(handled);
    ++loading;
    try {
        const LldBridge* found = load();
        static const int registered = started_here ? atexit(&at_exit) : 0;
        static_cast<void>(registered);
        bridge.store(found);
        return found;
    } catch (const std::exception& error) {
        fail(error.what());
    }
    --loading;
    return nullptr;
}

}  // namespace

extern "C" const char* llm_datadist_last_error() { return last_error; }

extern "C" std::uint32_t llm_datadist_call(LldInstance* instance, const LldCall* call) {
    const bool ends = call->method == LLD_FINALIZE || call->method == LLD_RELEASE;
    if (call->abi != LLM_DATADIST_ABI)
        return fail("libllm_datadist.so is of another version than the header that the program was compiled with");
    if (forked)
        return ends ? 0 : fail("this process is a fork of one that uses LlmDataDist; call exec, or fork before Initialize");
    const LldBridge* to = bridge.load(std::memory_order_acquire);
    if (to == nullptr) {
        if (ends) return 0;
        if (call->method != LLD_INITIALIZE) return fail("this LlmDataDist is not initialised; call Initialize first");
        if ((to = loaded()) == nullptr) return failed;
    }
    return to->call(instance, call, last_error, sizeof last_error);
}
