// libllm_datadist.so: finds or starts the interpreter, and passes calls to the bridge in the native module.
//
// It has no symbol of Python to link, so that programs link without libpython.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <mutex>
#include <stdexcept>
#include <string>

#include "llm_datadist/call.h"
#include "thread.hpp"

extern "C" char** environ;

namespace {

using Error = std::runtime_error;

constexpr std::uint32_t failed = 0xFFFFFFFF;

thread_local char last_error[1024];  // without a destructor: static destructors of the program call, too

std::atomic<LldBridge*> bridge{nullptr};
std::atomic<bool> used{false};
bool forked = false;  // this process is a copy of one that used it
thread_local int running = 0;  // calls of this thread; more than 0 where one begins: it is in a signal handler
std::mutex starting;
bool started_here = false;  // the interpreter

std::uint32_t fail(const char* text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    return failed;
}

// A function of Python.
template <typename Function>
Function* find(const char* name) {
    auto* function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    if (function == nullptr) throw Error(std::string("this Python has no ") + name);
    return function;
}

bool initialized() {
    return dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr && find<int()>("Py_IsInitialized")() != 0;
}

void execute(const char* code) { find<int(const char*)>("PyRun_SimpleString")(code); }

// The interpreter that LLM_DATADIST_PYTHON names, or that of the folder where this library is installed.
std::string interpreter() {
    const char* named = getenv("LLM_DATADIST_PYTHON");
    if (named != nullptr && *named != '\0') return named;
    Dl_info here;
    char file[PATH_MAX];
    if (dladdr(&starting, &here) == 0 || realpath(here.dli_fname, file) == nullptr) return "python3";
    std::string prefix = file;  // of PREFIX/lib/python3.x/site-packages/llm_datadist/cpp/lib/libllm_datadist.so
    for (int i = 0; i < 7; ++i) prefix.resize(std::min(prefix.size(), prefix.rfind('/')));
    return access((prefix += "/bin/python3").c_str(), X_OK) == 0 ? prefix : "python3";
}

// Prints the executable, by which an interpreter finds its virtual environment, and its library.
constexpr char question[] =
    "import os, sys, sysconfig as s\n"
    "name = s.get_config_var('INSTSONAME') or ''\n"
    "path = os.path.join(s.get_config_var('LIBDIR') or '', name)\n"
    "os.ftruncate(1, 0)  # site modules may have printed, or do at the end\n"
    "os.pwrite(1, os.fsencode(f'{sys.executable}\\n{path if os.path.exists(path) else name}\\n'), 0)\n"
    "os._exit(0)";

// Lines that the interpreter prints.
std::string ask(std::string program) {
    const int answer = memfd_create("lldd-python", MFD_CLOEXEC);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, answer, STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    char safe[] = "-P", code[] = "-c";  // -P: no module of the working folder
    char* const arguments[] = {&program[0], safe, code, const_cast<char*>(question), nullptr};
    pid_t child;
    const int error = answer < 0 ? errno : posix_spawnp(&child, program.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    while (error == 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    char lines[2 * PATH_MAX + 2];
    const std::string output(lines,
                             static_cast<std::size_t>(std::max<ssize_t>(pread(answer, lines, sizeof lines, 0), 0)));
    close(answer);
    if (std::count(output.begin(), output.end(), '\n') == 2) return output;
    throw Error(program + ": " + (error != 0 ? strerror(error) : "does not run") +
                "; name an interpreter that has open-datadist in LLM_DATADIST_PYTHON");
}

// Starts the interpreter in a thread that is Python's main thread for as long as the process lives: so none of the
// program is that one, and may end, nor handles signals for it.
void start() {
    const std::string program = interpreter(), lines = ask(program);
    const std::size_t end = lines.find('\n');
    const std::string executable = lines.substr(0, end), path = lines.substr(end + 1, lines.size() - end - 2);
    if (path.empty() || dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
        throw Error(program + " has no shared libpython (" + path +
                    "): install it (Debian: libpython3.11), or name an " +
                    "interpreter that was built with --enable-shared in LLM_DATADIST_PYTHON");
    if (initialized()) return;  // by a plugin that had loaded the library for itself
    auto* done = new std::promise<void>();  // used by a thread that may outlive all else
    std::future<void> over = done->get_future();
    datadist::quiet_thread("lldd-python", [done, executable] {
        try {
            find<void(const wchar_t*)>("Py_SetProgramName")(
                find<wchar_t*(const char*, std::size_t*)>("Py_DecodeLocale")(executable.c_str(), nullptr));
            find<void(int)>("Py_InitializeEx")(0);  // no signal handlers
            execute("import threading");  // it takes the thread that imports it for the main thread
            find<void*()>("PyEval_SaveThread")();
            done->set_value();
        } catch (...) {
            done->set_exception(std::current_exception());
        }
        for (;;) pause();
    }).detach();
    over.get();
    started_here = true;
}

// Text of the exception that Python has set.
std::string python_error() {
    void *kind = nullptr, *value = nullptr, *trace = nullptr;
    find<void(void**, void**, void**)>("PyErr_Fetch")(&kind, &value, &trace);
    void* text = find<void*(void*)>("PyObject_Str")(value == nullptr ? kind : value);
    auto* utf8 = find<const char*(void*, ssize_t*)>("PyUnicode_AsUTF8AndSize");
    const char* bytes = text == nullptr ? nullptr : utf8(text, nullptr);
    return bytes == nullptr ? "import llm_datadist fails" : bytes;  // what stays in memory is little, and rare
}

LldBridge* load() {
    {
        // Not held below: a thread that waits for it here may hold Python's lock.
        const std::lock_guard<std::mutex> lock(starting);
        if (!initialized()) start();
    }
    auto* release = find<void(int)>("PyGILState_Release");
    auto* import = find<void*(const char*)>("PyImport_ImportModule");
    auto* capsule = find<void*(const char*, int)>("PyCapsule_Import");  // it hides why an import fails
    const int held = find<int()>("PyGILState_Ensure")();
    const datadist::SignalsBlocked inherited;  // by threads of what is imported
    const bool imported = import("llm_datadist") != nullptr;
    auto* found = reinterpret_cast<LldBridge*>(imported ? capsule(LLM_DATADIST_BRIDGE, 0) : nullptr);
    const std::string error = found == nullptr ? python_error() : "";
    release(held);
    if (found != nullptr) return found;
    throw Error(error +
                "; install this library's open-datadist there, or start the program with another "
                "interpreter in LLM_DATADIST_PYTHON");
}

// Finalizes what is left, as Python does at its exit. It runs before the static destructors of all that the interpreter
// has loaded; those of the program may follow, and find that nothing is left to do.
void at_exit() {
    if (forked || running > 0) return;  // an exit in a signal handler cannot wait for what it interrupts
    const int held = find<int()>("PyGILState_Ensure")();
    execute("import atexit; atexit._run_exitfuncs()");
    find<void(int)>("PyGILState_Release")(held);
}

// The loaded bridge, or null with a text.
LldBridge* loaded() {
    static const int handled = pthread_atfork(nullptr, nullptr, [] { forked = used; });
    static_cast<void>(handled);
    used = true;
    try {
        LldBridge* found = load();
        static const int registered = started_here ? atexit(&at_exit) : 0;
        static_cast<void>(registered);
        bridge.store(found);
        return found;
    } catch (const std::exception& error) {
        fail(error.what());
        return nullptr;
    }
}

}  // namespace

extern "C" const char* llm_datadist_last_error() { return last_error; }

extern "C" std::uint32_t llm_datadist_no_memory() {
    fail("the program has no memory for the arguments or results of this call");
    return 0x5010B01C;
}

extern "C" std::uint32_t llm_datadist_call(LldInstance* instance, LldCall* call) {
    if (call->abi != LLM_DATADIST_ABI)
        return fail("the program was compiled with the header of another version than that of libllm_datadist.so");
    const bool ends = *call->method == '\0' || strcmp(call->method, "Finalize") == 0;
    LldBridge* to = bridge.load(std::memory_order_acquire);
    if (ends && (forked || to == nullptr || running > 0)) return 0;
    if (forked)
        return fail("this process is a fork of one that uses LlmDataDist; call exec, or fork before Initialize");
    if (to == nullptr && strcmp(call->method, "Initialize") != 0)
        return fail("this LlmDataDist is not initialised; call Initialize first");
    if (to == nullptr && (to = loaded()) == nullptr) return failed;
    ++running;
    const std::uint32_t status = to(instance, call, last_error, sizeof last_error);
    --running;
    return status;
}
