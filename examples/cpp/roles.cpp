// A prompt and a decoder in C++: blocks pulled, copied and pushed; then they change roles and it goes the other way.
//
//   g++ roles.cpp $(llm-datadist cpp --cflags --libs) -o roles
//   ./roles prompt 26000 26001        and, once it says that it listens,        ./roles decoder 26000 26001
#include <llm_datadist/llm_datadist.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

using namespace llm_datadist;

namespace {

constexpr uint64_t prompt_id = 1, decoder_id = 2;
constexpr int64_t blocks = 8, values = 16;

void check(const char* what, Status status) {
    if (status == LLM_SUCCESS) return;
    std::cerr << what << ": 0x" << std::hex << status << " " << LastError() << std::endl;
    std::exit(1);
}

// The instance, its options, and one cache of four tensors, registered: the first of its process, so its id is 1.
struct Side {
    LlmDataDist dist;
    std::vector<std::vector<int32_t>> kv;
    Cache cache;

    Side(uint64_t id, LlmRole role, const std::string& port) : dist(id, role), kv(4) {
        std::map<AscendString, AscendString> options;
        options[OPTION_DEVICE_ID] = "0";
        if (!port.empty()) options[OPTION_LISTEN_IP_INFO] = ("127.0.0.1:" + port).c_str();
        check("Initialize", dist.Initialize(options));
        std::vector<uint64_t> addrs;
        for (std::vector<int32_t>& tensor : kv) {
            for (int32_t i = 0; i < blocks * values; ++i) tensor.push_back(static_cast<int32_t>(id) * 10000 + i);
            addrs.push_back(reinterpret_cast<uint64_t>(tensor.data()));
        }
        cache.cache_desc.num_tensors = 4;
        cache.cache_desc.data_type = DT_INT32;
        cache.cache_desc.shape = {blocks, values};
        check("RegisterKvCache", dist.RegisterKvCache(cache.cache_desc, addrs, {}, cache.cache_id));
    }
    ~Side() { check("UnregisterKvCache", dist.UnregisterKvCache(cache.cache_id)); }

    // The block of every tensor must be what another side began with as this block.
    void expect(int64_t block, uint64_t of, int64_t as) const {
        for (const std::vector<int32_t>& tensor : kv)
            for (int64_t i = 0; i < values; ++i)
                if (tensor[block * values + i] != static_cast<int32_t>(of * 10000 + as * values + i))
                    check("wrong bytes", LLM_FAILED);
    }

    void link(bool on, uint64_t peer, const std::string& port) {
        ClusterInfo info;
        IpInfo local, remote;
        local.ip = remote.ip = "127.0.0.1";
        remote.port = static_cast<uint16_t>(std::stoi(port));
        info.remote_cluster_id = peer;
        info.local_ip_infos.push_back(local);
        info.remote_ip_infos.push_back(remote);
        std::vector<Status> each;
        check("link", on ? dist.LinkLlmClusters({info}, each, 5000) : dist.UnlinkLlmClusters({info}, each, 5000));
    }
};

// Waits for a line: what a framework's own messages would say.
void wait_for(const char* what) {
    std::cout << what << std::endl;
    std::string line;
    std::getline(std::cin, line);
}

void prompt(const std::string& port, const std::string& others) {
    Side side(prompt_id, LlmRole::kPrompt, port);
    wait_for("listening; press Enter when the decoder listens");
    side.expect(7, decoder_id, 3);  // pushed
    check("SetRole", side.dist.SetRole(LlmRole::kDecoder));
    side.link(true, decoder_id, others);
    check("PullKvBlocks", side.dist.PullKvBlocks({decoder_id, 1, 0}, side.cache, {4}, {0}));
    side.expect(0, decoder_id, 4);
    side.link(false, decoder_id, others);
}

void decoder(const std::string& port, const std::string& others) {
    Side side(decoder_id, LlmRole::kDecoder, "");
    side.link(true, prompt_id, others);
    check("PullKvBlocks", side.dist.PullKvBlocks({prompt_id, 1, 0}, side.cache, {1, 2}, {0, 1}));
    check("CopyKvBlocks", side.dist.CopyKvBlocks(side.cache, side.cache, {0, 1}, {{5, 6}}));
    for (const int64_t i : {0, 1}) side.expect(i, prompt_id, 1 + i), side.expect(5 + i, prompt_id, 1 + i);
    check("PushKvBlocks", side.dist.PushKvBlocks(side.cache, {prompt_id, 1, 0}, {3}, {7}));
    side.link(false, prompt_id, others);
    check("SetRole", side.dist.SetRole(LlmRole::kPrompt, {{OPTION_LISTEN_IP_INFO, ("127.0.0.1:" + port).c_str()}}));
    wait_for("listening; press Enter when the prompt has ended");
    side.expect(3, decoder_id, 3);
}

}  // namespace

int main(int count, char** words) {
    const std::string role = count == 4 ? words[1] : "";
    if (role != "prompt" && role != "decoder") check("roles prompt|decoder PORT_OF_PROMPT PORT_OF_DECODER", LLM_FAILED);
    role == "prompt" ? prompt(words[2], words[3]) : decoder(words[3], words[2]);
    std::cout << "bytes equal" << std::endl;
}
