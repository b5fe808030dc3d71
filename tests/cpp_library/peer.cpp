// An instance that does what its standard input says: a command a line, an answer a line.
#include <llm_datadist/llm_datadist.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <thread>

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using namespace llm_datadist;

using Words = std::istringstream;
using Options = std::map<AscendString, AscendString>;

// Its destructor runs last of all, after those of everything that Initialize has loaded.
std::unique_ptr<LlmDataDist> dist;
std::map<std::string, Cache> caches;
std::map<std::string, std::vector<std::vector<uint8_t>>> memory;

template <typename T>
T next(Words& words, T fallback = T()) {
    T value;
    return words >> value ? value : fallback;
}

std::vector<uint64_t> numbers(const std::string& text) {
    std::vector<uint64_t> found;
    std::istringstream parts(text);
    for (std::string each; std::getline(parts, each, ',');)
        if (each != "-") found.push_back(std::stoull(each));
    return found;
}

Options options(Words& words) {
    Options found;
    for (std::string each; words >> each;) {
        const auto at = each.find('=');
        std::string value = each.substr(at + 1);
        if (value == "BAD_UTF8") value = "\xff\xfe";
        found[each.substr(0, at).c_str()] = value.c_str();
    }
    return found;
}

CacheIndex index(Words& words) {
    CacheIndex found = {};
    words >> found.cluster_id >> found.cache_id >> found.batch_index;
    return found;
}

// "-", or first and last layer of both sides and the tensors per layer.
KvCacheExtParam layers(Words& words) {
    KvCacheExtParam found;
    std::string first;
    if (!(words >> first) || first == "-") return found;
    int per_layer = 2;
    found.src_layer_range.first = std::stoi(first);
    words >> found.src_layer_range.second >> found.dst_layer_range.first >> found.dst_layer_range.second >> per_layer;
    found.tensor_num_per_layer = static_cast<uint8_t>(per_layer);
    return found;
}

CacheDesc desc(Words& words) {
    CacheDesc found;
    int type;
    uint32_t placement;
    words >> placement >> found.num_tensors >> type;
    found.placement = static_cast<CachePlacement>(placement);
    found.data_type = static_cast<DataType>(type);
    for (int64_t each : numbers(next<std::string>(words))) found.shape.push_back(each);
    return found;
}

std::vector<ClusterInfo> clusters(Words& words) {
    std::vector<ClusterInfo> found;
    for (std::string each; words >> each && each != ";";) {  // id@ip:port, "-" for no ip
        ClusterInfo info;
        const auto at = each.find('@'), colon = each.rfind(':');
        info.remote_cluster_id = std::stoull(each);
        IpInfo remote, local;
        local.ip = "127.0.0.1";
        info.local_ip_infos.push_back(local);
        remote.ip = each.substr(at + 1, colon - at - 1).c_str();
        remote.port = static_cast<uint16_t>(std::stoul(each.substr(colon + 1)));
        if (remote.ip != "-") info.remote_ip_infos.push_back(remote);
        found.push_back(info);
    }
    return found;
}

// Blocks of int32 that say where they are from.
void fill(const std::string& name, int seed) {
    const Cache& cache = caches[name];
    size_t count = 1;
    for (int64_t each : cache.cache_desc.shape) count *= static_cast<size_t>(each);
    int32_t value = seed;
    for (uintptr_t address : cache.tensor_addrs)
        for (size_t i = 0; i < count; ++i) reinterpret_cast<int32_t*>(address)[i] = value++;
}

std::string bytes(const std::string& name) {
    const Cache& cache = caches[name];
    size_t count = 4;
    for (int64_t each : cache.cache_desc.shape) count *= static_cast<size_t>(each);
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (uintptr_t address : cache.tensor_addrs)
        for (size_t i = 0; i < count; ++i) {
            const auto byte = reinterpret_cast<const uint8_t*>(address)[i];
            text += digits[byte >> 4];
            text += digits[byte & 15];
        }
    return text;
}

Status take(const std::string& name, Words& words, bool own) {
    const int seed = next<int>(words);
    Cache cache;
    cache.cache_desc = desc(words);
    Status status = LLM_SUCCESS;
    if (own) {
        size_t size = 4;
        for (int64_t each : cache.cache_desc.shape) size *= static_cast<size_t>(each);
        std::vector<uint64_t> addrs;
        memory[name].resize(cache.cache_desc.num_tensors);
        for (auto& each : memory[name]) {
            each.resize(size);
            addrs.push_back(reinterpret_cast<uintptr_t>(each.data()));
        }
        cache.tensor_addrs.assign(addrs.begin(), addrs.end());
        if (next<int>(words)) status = dist->RegisterKvCache(cache.cache_desc, addrs, {}, cache.cache_id);
    } else {
        status = dist->AllocateCache(cache.cache_desc, cache);
    }
    if (status == LLM_SUCCESS) {
        caches[name] = cache;
        fill(name, seed);
    }
    return status;
}

// What every thread of a program may do at once: pull, link to and unlink from another cluster, allocate.
Status storm(Words& words) {
    const auto threads = next<int>(words), rounds = next<int>(words);
    const CacheIndex from = index(words);
    const auto other = clusters(words);
    const auto name = next<std::string>(words);
    std::atomic<Status> worst{LLM_SUCCESS};
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i)
        all.emplace_back([&, i] {
            const auto note = [&](Status status) {
                if (status != LLM_SUCCESS) worst = status;
            };
            for (int round = 0; round < rounds; ++round) {
                if (i == 0) {
                    std::vector<Status> each;
                    note(dist->LinkLlmClusters(other, each, 20000));
                    note(dist->UnlinkLlmClusters(other, each, 20000));
                } else if (i == 1) {
                    Cache cache;
                    note(dist->AllocateCache(caches[name].cache_desc, cache));
                    note(dist->DeallocateCache(cache.cache_id));
                } else if (i == 2) {  // a thread's state is freed at its end
                    std::thread([&] { note(dist->PullKvBlocks(from, caches[name], {0}, {0})); }).join();
                } else {
                    const uint64_t block = static_cast<uint64_t>(i % 8);
                    note(dist->PullKvBlocks(from, caches[name], {block}, {block}));
                    if (dist->PullKvBlocks(from, caches[name], {99}, {0}) != LLM_PARAM_INVALID ||
                        std::strstr(LastError(), "99") == nullptr)
                        worst = LLM_FAILED;
                }
            }
        });
    for (auto& each : all) each.join();
    return worst;
}

Status in_child(const std::function<Status()>& work, std::string& text) {
    int ends[2];
    if (pipe(ends) != 0) return LLM_FAILED;
    const pid_t child = fork();
    if (child == 0) {
        const Status status = work();
        std::string said = std::to_string(status) + " " + LastError();
        if (write(ends[1], said.data(), said.size()) < 0) _exit(2);
        exit(0);  // with static destructors
    }
    close(ends[1]);
    char part[512];
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) text.append(part, static_cast<size_t>(got));
    close(ends[0]);
    int code = 0;
    waitpid(child, &code, 0);
    text += " ended with " + std::to_string(code);
    return LLM_SUCCESS;
}

// As a plugin that starts Python, which nothing else links, for itself.
void begin_plugin(Words& words) {
    void* library = dlopen(next<std::string>(words).c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto name = next<std::string>(words);
    static std::wstring program(name.begin(), name.end());
    reinterpret_cast<void (*)(const wchar_t*)>(dlsym(library, "Py_SetProgramName"))(program.c_str());
    reinterpret_cast<void (*)(int)>(dlsym(library, "Py_InitializeEx"))(0);
    reinterpret_cast<void* (*)()>(dlsym(library, "PyEval_SaveThread"))();
}

Status run(const std::string& what, Words& words, std::string& text) {
    if (what == "new") {
        const auto cluster = next<uint64_t>(words);
        dist.reset(new LlmDataDist(cluster, static_cast<LlmRole>(next<int>(words))));
        return LLM_SUCCESS;
    }
    if (what == "forget") return dist.release(), LLM_SUCCESS;
    if (what == "init") return dist->Initialize(options(words));
    if (what == "finalize") return dist->Finalize(), LLM_SUCCESS;
    if (what == "role") {
        const auto role = static_cast<LlmRole>(next<int>(words));
        return dist->SetRole(role, options(words));
    }
    if (what == "link" || what == "unlink") {
        const auto timeout = next<int32_t>(words), force = next<int32_t>(words);
        std::vector<Status> each{77};
        const auto infos = clusters(words);
        const Status status = what == "link" ? dist->LinkLlmClusters(infos, each, timeout)
                                             : dist->UnlinkLlmClusters(infos, each, timeout, force != 0);
        for (Status one : each) text += std::to_string(one) + " ";
        return status;
    }
    if (what == "storm") return storm(words);
    if (what == "exit_when_interrupted") return std::signal(SIGINT, [](int) { exit(7); }), LLM_SUCCESS;
    if (what == "plugin") return begin_plugin(words), LLM_SUCCESS;
    if (what == "fork") return in_child([&] { return dist->SetRole(LlmRole::kMix); }, text);
    if (what == "fork_init") return in_child([&] { return dist->Initialize(options(words)); }, text);
    if (what == "unregister") return dist->UnregisterKvCache(next<int64_t>(words));
    if (what == "deallocate") return dist->DeallocateCache(next<int64_t>(words));
    const auto name = next<std::string>(words);
    if (what == "own") return take(name, words, true);
    if (what == "allocate") return take(name, words, false);
    if (what == "named") return caches[name].cache_id = next<int64_t>(words), LLM_SUCCESS;
    if (what == "id") return text = std::to_string(caches[name].cache_id), LLM_SUCCESS;
    if (what == "bytes") return text = bytes(name), LLM_SUCCESS;
    if (what == "pull_cache") {
        const CacheIndex from = index(words);
        const auto row = next<uint32_t>(words);
        const auto size = next<int64_t>(words);
        return dist->PullKvCache(from, caches[name], row, size, layers(words));
    }
    if (what == "push_cache") {
        const CacheIndex to = index(words);
        const auto row = next<uint32_t>(words);
        const auto size = next<int64_t>(words);
        return dist->PushKvCache(caches[name], to, row, size, layers(words));
    }
    if (what == "pull_blocks" || what == "push_blocks") {
        const CacheIndex peer = index(words);
        const auto src = numbers(next<std::string>(words)), dst = numbers(next<std::string>(words));
        return what == "pull_blocks" ? dist->PullKvBlocks(peer, caches[name], src, dst, layers(words))
                                     : dist->PushKvBlocks(caches[name], peer, src, dst, layers(words));
    }
    const auto other = next<std::string>(words);
    if (what == "copy_cache") {
        const auto src_row = next<uint32_t>(words), dst_row = next<uint32_t>(words);
        const auto offset = next<uint64_t>(words);
        return dist->CopyKvCache(caches[name], caches[other], src_row, dst_row, offset, next<int64_t>(words, -1));
    }
    if (what == "copy_blocks") {
        const auto src = numbers(next<std::string>(words));
        std::vector<std::vector<uint64_t>> lists;
        for (std::string each; words >> each;) lists.push_back(numbers(each));
        return dist->CopyKvBlocks(caches[name], caches[other], src, lists);
    }
    text = "no such command: " + what;
    return LLM_FAILED;
}

}  // namespace

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        Words words(line);
        std::string what, text;
        words >> what;
        if (what == "exit") return 0;  // with what it has: static destructors end it
        const Status status = run(what, words, text);
        std::cout << status << '\t' << text << '\t' << LastError() << std::endl;
    }
}
