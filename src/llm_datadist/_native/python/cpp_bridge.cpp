// Calls of C++ programs (llm_datadist/cpp), made on llm_datadist.cpp_api.
#include <llm_datadist/call.h>
#include <nanobind/nanobind.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>

#include "python/attached.hpp"
#include "python/plan_python.hpp"

namespace datadist {

namespace {

constexpr std::uint32_t success = 0, failed = 0xFFFFFFFF, invalid = 0x5010B005, no_memory = 0x5010B01C;
constexpr std::int64_t undefined_type = 28;

// Names of llm_datadist.cpp_api.
struct Api {
    nb::module_ module = nb::module_::import_("llm_datadist.cpp_api");
    nb::object Cache = module.attr("Cache"), CacheIndex = module.attr("CacheIndex"),
               ALL_LAYERS = module.attr("arguments").attr("ALL_LAYERS");

    template <typename... Arguments>
    nb::object make(const char* name, Arguments&&... arguments) const {
        return module.attr(name)(std::forward<Arguments>(arguments)...);
    }

    // Imported at the first call, and never freed.
    static const Api& get() {
        static std::atomic<const Api*> found{nullptr};
        if (found.load() == nullptr) {
            auto* made = new Api();
            // After what finalizes instances at the exit, so it runs before that: a call may still use their memory.
            nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Attached::close));
            found.store(made);
        }
        return *found.load();
    }
};

// The arguments of a call, one after the other, as objects of Python.
class Reader {
public:
    explicit Reader(const LldCall& call) : at_(call.parts) {}

    nb::object next(char kind) {
        const Api& api = Api::get();
        switch (kind) {
            case 'n': return nb::int_(number());  // signed
            case 'u': return nb::int_(*at_++);
            case 'f': return nb::bool_(number() != 0);  // flag
            case 'r': return api.make("LlmRole", number());
            case 'o': return options();
            case 'k': return list_of([&] { return cluster(); });
            case 'd': return desc();
            case 'a': return integers<std::uint64_t>();  // addresses
            case 'c': return api.Cache(number());  // by id
            case 'w': return cache();  // whole
            case 'i': return index();
            case 'b': return blocks();
            case 'm': return list_of([&] { return blocks(); });
            default: return layers();
        }
    }

private:
    std::int64_t number() { return static_cast<std::int64_t>(*at_++); }

    template <typename T>
    const T* address() {
        return reinterpret_cast<const T*>(*at_++);
    }

    nb::object text() {
        nb::object made = nb::steal(PyUnicode_FromString(address<char>()));
        if (!made.is_valid()) throw nb::python_error();
        return made;
    }

    template <typename Item>
    nb::list list_of(Item&& item) {
        nb::list list;
        for (std::int64_t left = number(); left > 0; --left) list.append(item());
        return list;
    }

    template <typename Number>
    nb::list integers() {
        const auto* each = address<Number>();
        return list_of([&] { return *each++; });
    }

    nb::dict options() {
        nb::dict dict;
        for (std::int64_t left = number(); left > 0; --left) {
            const nb::object key = text();
            dict[key] = text();
        }
        return dict;
    }

    nb::object cluster() {
        const std::uint64_t id = *at_++;
        const std::int64_t role = number();
        const nb::list local = list_of([&] { return endpoint(); });
        return Api::get().make("ClusterInfo", id, role, local, list_of([&] { return endpoint(); }));
    }
    nb::object endpoint() {
        const nb::object ip = text();
        return Api::get().make("IpInfo", ip, number());
    }

    nb::object desc() {
        const Api& api = Api::get();
        const nb::object placement = api.make("CachePlacement", number());
        const std::int64_t tensors = number(), code = number();
        const nb::object type =
            code == undefined_type ? nb::object(api.module.attr("DT_UNDEFINED")) : api.make("DataType", code);
        return api.make("CacheDesc", placement, tensors, type, integers<std::int64_t>());
    }

    // Only its id is read, except of host memory without one.
    nb::object cache() {
        const std::int64_t id = number();
        if (id >= 1) {
            at_ += 7;
            return Api::get().Cache(id);
        }
        const nb::object addrs = integers<std::uint64_t>();
        return Api::get().Cache(id, addrs, desc());
    }

    nb::object index() {
        const std::uint64_t* parts = std::exchange(at_, at_ + 3);
        return Api::get().CacheIndex(parts[0], static_cast<std::int64_t>(parts[1]), parts[2]);
    }

    // Parsed without an object for each block.
    nb::object blocks() {
        const auto* data = address<std::uint64_t>();
        const auto* end = data + number();
        const auto* wrong = std::find_if(data, end, [](std::uint64_t each) { return each >> 63 != 0; });
        if (wrong == end) return nb::cast(BlockList(BlockList::Numbers(data, end)));
        PyErr_Format(PyExc_ValueError, "block %zd is %llu: must be in [0, 2**63)", wrong - data,
                     static_cast<unsigned long long>(*wrong));
        throw nb::python_error();
    }

    nb::object layers() {
        const auto* parts = reinterpret_cast<const std::int64_t*>(std::exchange(at_, at_ + 5));
        if (std::count(parts, parts + 4, -1) == 4 && parts[4] == 2) return Api::get().ALL_LAYERS;
        const nb::tuple src = nb::make_tuple(parts[0], parts[1]), dst = nb::make_tuple(parts[2], parts[3]);
        return Api::get().make("KvCacheExtParam", src, dst, parts[4]);
    }

    const std::uint64_t* at_;
};

std::uint32_t number_of(nb::handle status) {
    return static_cast<std::uint32_t>(PyLong_AsUnsignedLongLongMask(status.ptr()));
}

// Hands the second result of a call to the program.
void give(LldCall& call, nb::handle value) {
    const auto add = [&](nb::handle number) {
        if (call.count < call.room) call.results[call.count++] = PyLong_AsUnsignedLongLongMask(number.ptr());
    };
    if (PyLong_Check(value.ptr())) {
        add(value);
    } else if (PyList_Check(value.ptr())) {
        for (nb::handle each : value) add(each);
    } else {
        add(value.attr("cache_id"));
        for (nb::handle each : value.attr("tensor_addrs")) add(each);
    }
}

void write(nb::handle error, char* text, std::size_t capacity) {
    const nb::str said(error);
    std::snprintf(text, capacity, "%s", nb::len(said) > 0 ? said.c_str() : nb::repr(error).c_str());
}

std::uint32_t run(LldInstance* instance, LldCall& call, char* text, std::size_t capacity) {
    const std::string_view name = call.method;
    if (instance->object == nullptr && !name.empty()) {
        nb::object role = Api::get().make("LlmRole", instance->role);
        nb::object made = Api::get().make("LlmDataDist", instance->cluster_id, role);
        if (instance->object == nullptr) instance->object = made.release().ptr();  // no other thread has made one
    }
    const nb::handle dist(static_cast<PyObject*>(instance->object));
    if (name.empty()) {
        if (dist.is_valid()) dist.attr("Finalize")();
        dist.dec_ref();
        return success;
    }
    Reader reader(call);
    nb::object arguments[8];
    PyObject* plain[8];
    std::size_t count = 0;
    for (const char kind : std::string_view(call.kinds)) {
        arguments[count] = reader.next(kind);
        plain[count] = arguments[count].ptr();
        ++count;
    }
    const nb::object method = dist.attr(call.method);
    const nb::object result = nb::steal(PyObject_Vectorcall(method.ptr(), plain, count, nullptr));
    if (!result.is_valid()) throw nb::python_error();
    const bool pair = PyTuple_Check(result.ptr());
    if (pair && !nb::object(result[1]).is_none()) give(call, result[1]);
    const std::uint32_t status = number_of(pair ? nb::object(result[0]) : result);
    if (status != success) write(dist.attr("last_error"), text, capacity);
    return status;
}

std::uint32_t status_of(nb::python_error& error) {
    if (nb::hasattr(error.value(), "status_code")) return number_of(error.value().attr("status_code"));
    if (error.matches(PyExc_ValueError)) return invalid;
    return error.matches(PyExc_MemoryError) ? no_memory : failed;
}

std::uint32_t call_in_python(LldInstance* instance, LldCall* call, char* text, std::size_t capacity) noexcept {
    const Attached attached;
    if (!attached) {
        std::snprintf(text, capacity, "the Python interpreter of this process ends");
        const std::string_view name = call->method;
        return name == "Finalize" || name.empty() ? success : failed;
    }
    try {
        try {
            return run(instance, *call, text, capacity);
        } catch (nb::python_error& error) {
            write(error.value(), text, capacity);
            const std::uint32_t status = status_of(error);
            // Last: the host shall have it.
            if (error.matches(PyExc_KeyboardInterrupt) && PyEval_GetFrame() != nullptr) PyErr_SetInterrupt();
            return status;
        }
    } catch (const std::exception&) {  // of C++
        std::snprintf(text, capacity, "there is no memory for the arguments");
        return no_memory;
    }
}

}  // namespace

void bind_cpp(nb::module_& m) {
    pthread_atfork(nullptr, nullptr, &Attached::forget);
    m.attr("cpp_bridge_1") =
        nb::steal(PyCapsule_New(reinterpret_cast<void*>(&call_in_python), LLM_DATADIST_BRIDGE, nullptr));
}

}  // namespace datadist
