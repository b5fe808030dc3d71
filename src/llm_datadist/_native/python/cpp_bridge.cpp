// Calls of C++ programs (llm_datadist/cpp), made on llm_datadist.cpp_api.
#include <nanobind/nanobind.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <llm_datadist/call.h>

#include "python/attached.hpp"
#include "python/plan_python.hpp"

namespace datadist {

namespace {

constexpr std::uint32_t success = 0, failed = 0xFFFFFFFF, invalid = 0x5010B005, no_memory = 0x5010B01C;

// Names of llm_datadist.cpp_api, imported at the first call.
struct Api {
    nb::module_ module = nb::module_::import_("llm_datadist.cpp_api");
    nb::object LlmDataDist = module.attr("LlmDataDist"), LlmRole = module.attr("LlmRole"),
               CachePlacement = module.attr("CachePlacement"), DataType = module.attr("DataType"),
               DT_UNDEFINED = module.attr("DT_UNDEFINED"), CacheDesc = module.attr("CacheDesc"),
               Cache = module.attr("Cache"), CacheIndex = module.attr("CacheIndex"),
               ClusterInfo = module.attr("ClusterInfo"), IpInfo = module.attr("IpInfo"),
               KvCacheExtParam = module.attr("KvCacheExtParam"),
               ALL_LAYERS = nb::module_::import_("llm_datadist.cpp_api.arguments").attr("ALL_LAYERS");

    static const Api& get() {
        static std::atomic<const Api*> found{nullptr};  // never freed
        if (found.load() == nullptr) {
            auto* made = new Api();
            // After what finalizes instances at the exit, so it runs before that: a call may still use their memory.
            nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Attached::close));
            found.store(made);
        }
        return *found.load();
    }
};

constexpr int undefined_type = 28;

nb::list list_of(const LldNumbers& numbers) {
    nb::list list;
    for (std::size_t i = 0; i < numbers.size; ++i) list.append(numbers.data[i]);
    return list;
}

nb::object blocks_of(const char* name, const LldNumbers& numbers) {
    const auto* end = numbers.data + numbers.size;
    const auto* wrong = std::find_if(numbers.data, end, [](std::uint64_t each) { return each >> 63 != 0; });
    if (wrong != end) {
        nb::object text = nb::str("{}[{}] is {}: must be in [0, 2**63)").format(name, wrong - numbers.data, *wrong);
        throw nb::value_error(nb::cast<const char*>(text));
    }
    return nb::cast(BlockList(BlockList::Numbers(numbers.data, end)));
}

nb::object text_of(const char* text) {
    nb::object made = nb::steal(PyUnicode_FromString(text));
    if (!made.is_valid()) throw nb::python_error();
    return made;
}

nb::dict options_of(const LldCall& call) {
    nb::dict options;
    for (std::size_t i = 0; i < call.option_count; ++i)
        options[text_of(call.options[i].key)] = text_of(call.options[i].value);
    return options;
}

nb::list endpoints_of(const LldEndpoint* ends, std::size_t count) {
    nb::list list;
    for (std::size_t i = 0; i < count; ++i) list.append(Api::get().IpInfo(text_of(ends[i].ip), ends[i].port));
    return list;
}

nb::list clusters_of(const LldCall& call) {
    nb::list list;
    for (std::size_t i = 0; i < call.cluster_count; ++i) {
        const LldCluster& each = call.clusters[i];
        list.append(Api::get().ClusterInfo(each.cluster_id, each.role, endpoints_of(each.local, each.local_count),
                                           endpoints_of(each.remote, each.remote_count)));
    }
    return list;
}

nb::object desc_of(const LldDesc& desc) {
    const Api& api = Api::get();
    nb::list shape;
    for (std::size_t i = 0; i < desc.rank; ++i) shape.append(desc.shape[i]);
    nb::object type = desc.data_type == undefined_type ? api.DT_UNDEFINED : api.DataType(desc.data_type);
    return api.CacheDesc(api.CachePlacement(desc.placement), desc.num_tensors, type, shape);
}

// Only its id is read, except that host memory without one is copied.
nb::object cache_of(const LldCache& cache, bool whole = false) {
    if (!whole || cache.cache_id >= 1) return Api::get().Cache(cache.cache_id);
    return Api::get().Cache(cache.cache_id, list_of(cache.addrs), desc_of(cache.desc));
}

nb::object index_of(const LldIndex& index) {
    return Api::get().CacheIndex(index.cluster_id, index.cache_id, index.batch_index);
}

nb::object layers_of(const LldLayers* layers) {
    if (layers == nullptr) return Api::get().ALL_LAYERS;
    return Api::get().KvCacheExtParam(nb::make_tuple(layers->src[0], layers->src[1]),
                                      nb::make_tuple(layers->dst[0], layers->dst[1]), layers->tensors_per_layer);
}

nb::object run(nb::handle dist, const LldCall& call) {
    const Api& api = Api::get();
    switch (call.method) {
        case LLD_INITIALIZE: return dist.attr("Initialize")(options_of(call));
        case LLD_FINALIZE: return dist.attr("Finalize")();
        case LLD_SET_ROLE: return dist.attr("SetRole")(api.LlmRole(call.role), options_of(call));
        case LLD_LINK: return dist.attr("LinkLlmClusters")(clusters_of(call), call.timeout);
        case LLD_UNLINK: return dist.attr("UnlinkLlmClusters")(clusters_of(call), call.timeout, call.force != 0);
        case LLD_ALLOCATE: return dist.attr("AllocateCache")(desc_of(call.dst.desc));
        case LLD_DEALLOCATE: return dist.attr("DeallocateCache")(call.dst.cache_id);
        case LLD_REGISTER: return dist.attr("RegisterKvCache")(desc_of(call.dst.desc), list_of(call.dst.addrs));
        case LLD_UNREGISTER: return dist.attr("UnregisterKvCache")(call.dst.cache_id);
        case LLD_PULL_CACHE:
            return dist.attr("PullKvCache")(index_of(call.peer), cache_of(call.dst), call.dst_row, call.size,
                                            layers_of(call.layers));
        case LLD_PULL_BLOCKS:
            return dist.attr("PullKvBlocks")(index_of(call.peer), cache_of(call.dst),
                                             blocks_of("src_blocks", call.src_blocks),
                                             blocks_of("dst_blocks", call.dst_blocks[0]), layers_of(call.layers));
        case LLD_PUSH_CACHE:
            return dist.attr("PushKvCache")(cache_of(call.src), index_of(call.peer), call.src_row, call.size,
                                            layers_of(call.layers));
        case LLD_PUSH_BLOCKS:
            return dist.attr("PushKvBlocks")(cache_of(call.src), index_of(call.peer),
                                             blocks_of("src_blocks", call.src_blocks),
                                             blocks_of("dst_blocks", call.dst_blocks[0]), layers_of(call.layers));
        case LLD_COPY_CACHE:
            return dist.attr("CopyKvCache")(cache_of(call.src), cache_of(call.dst), call.src_row, call.dst_row,
                                            call.offset, call.size);
        case LLD_COPY_BLOCKS: {
            nb::list lists;
            for (std::size_t i = 0; i < call.dst_list_count; ++i)
                lists.append(blocks_of("dst_blocks_list", call.dst_blocks[i]));
            return dist.attr("CopyKvBlocks")(cache_of(call.src, true), cache_of(call.dst, true),
                                             blocks_of("src_blocks", call.src_blocks), lists);
        }
        default: throw std::invalid_argument("the header is of a newer version than the library");
    }
}

void put(const LldCall& call, nb::handle numbers) {
    std::vector<std::uint64_t> plain;
    for (nb::handle each : numbers) plain.push_back(PyLong_AsUnsignedLongLongMask(each.ptr()));
    if (call.put(call.to, plain.data(), plain.size()) == 0) throw std::bad_alloc();
}

// Hands the second result of a call to the program.
void give(nb::handle dist, const LldCall& call, nb::handle value) {
    if (call.method == LLD_LINK || call.method == LLD_UNLINK) return put(call, value);
    if (value.is_none()) return;
    if (call.method == LLD_REGISTER) {
        *call.cache_id = nb::cast<std::int64_t>(value);
        return;
    }
    nb::object made = value.attr("cache_id");
    try {
        put(call, value.attr("tensor_addrs"));
    } catch (...) {
        dist.attr("DeallocateCache")(made);
        throw;
    }
    *call.cache_id = nb::cast<std::int64_t>(made);
}

std::uint32_t number_of(nb::handle status) {
    return static_cast<std::uint32_t>(PyLong_AsUnsignedLongLongMask(status.ptr()));
}

void write(nb::handle error, char* text, std::size_t capacity) {
    const nb::str said(error);
    std::snprintf(text, capacity, "%s", said.c_str());
}

std::uint32_t run_and_give(LldInstance* instance, const LldCall& call, char* text, std::size_t capacity) {
    auto* object = static_cast<PyObject*>(instance->object);
    if (call.method == LLD_RELEASE) {
        Py_XDECREF(object);
        instance->object = nullptr;
        return success;
    }
    if (object == nullptr) {
        if (call.method == LLD_FINALIZE) return success;
        if (call.method == LLD_INITIALIZE) {
            nb::object made = Api::get().LlmDataDist(instance->cluster_id, Api::get().LlmRole(instance->role));
            // Another thread may have made one meanwhile.
            if (instance->object == nullptr) instance->object = made.release().ptr();
            object = static_cast<PyObject*>(instance->object);
        } else {
            std::snprintf(text, capacity, "this LlmDataDist is not initialised; call Initialize first");
            return failed;
        }
    }
    const nb::handle dist(object);
    const nb::object result = run(dist, call);
    const bool pair = PyTuple_Check(result.ptr());
    if (pair) give(dist, call, result[1]);
    const std::uint32_t status = number_of(pair ? nb::object(result[0]) : result);
    if (status != success) write(dist.attr("last_error"), text, capacity);
    return status;
}

std::uint32_t status_of(nb::python_error& error) {
    if (nb::hasattr(error.value(), "status_code")) return number_of(error.value().attr("status_code"));
    if (error.matches(PyExc_ValueError)) return invalid;
    return error.matches(PyExc_MemoryError) ? no_memory : failed;
}

std::uint32_t call_in_python(LldInstance* instance, const LldCall* call, char* text, std::size_t capacity) noexcept {
    const Attached attached;
    if (!attached) {
        std::snprintf(text, capacity, "the Python interpreter of this process ends");
        return call->method == LLD_FINALIZE || call->method == LLD_RELEASE ? success : failed;
    }
    try {
        return run_and_give(instance, *call, text, capacity);
    } catch (nb::python_error& error) {
        try {
            write(error.value(), text, capacity);
            return status_of(error);
        } catch (...) {
            return failed;
        }
    } catch (const std::bad_alloc&) {
        std::snprintf(text, capacity, "there is no memory for the results");
        return no_memory;
    } catch (const std::invalid_argument& error) {
        std::snprintf(text, capacity, "%s", error.what());
        return failed;
    } catch (const nb::builtin_exception& error) {
        std::snprintf(text, capacity, "%s", error.what());
        return error.type() == nb::exception_type::value_error ? invalid : failed;
    } catch (const std::exception& error) {
        std::snprintf(text, capacity, "%s", error.what());
        return failed;
    }
}

}  // namespace

void bind_cpp(nb::module_& m) {
    static const LldBridge bridge{LLM_DATADIST_ABI, &call_in_python};
    m.attr("cpp_bridge") = nb::steal(PyCapsule_New(const_cast<LldBridge*>(&bridge), LLM_DATADIST_BRIDGE, nullptr));
}

}  // namespace datadist
