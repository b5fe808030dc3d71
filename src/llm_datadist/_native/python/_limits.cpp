// Raw limits of this machine: a separate module that only the benchmark and the doctor import. _limits.pyi describes it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <system_error>

#include "copy/limits.hpp"
#include "python/error_python.hpp"
#include "python/gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace datadist {
namespace {

using LimitAddresses = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

LimitBlocks limit_blocks(const LimitAddresses& addresses, std::int64_t block_bytes) {
    return {addresses.data(), addresses.size(), static_cast<std::size_t>(block_bytes)};
}

// Works without the GIL; errors of the kernel become OSError.
template <typename Work>
void without_gil(const Work& work) {
    try {
        const GilReleased released;
        work();
    } catch (const std::system_error& error) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
        throw nb::python_error();
    }
}

void py_limit_memcpy(const LimitAddresses& dst, const LimitAddresses& src, std::int64_t block_bytes, int threads,
                     bool streaming) {
    const LimitBlocks to = limit_blocks(dst, block_bytes), from = limit_blocks(src, block_bytes);
    check_limit_pair(to, from, block_bytes, threads);
    without_gil([&] { limit_memcpy(to, from, threads, streaming); });
}

void py_limit_process(int pid, bool write, const LimitAddresses& near, const LimitAddresses& far,
                      std::int64_t block_bytes, int threads) {
    const LimitBlocks here = limit_blocks(near, block_bytes), there = limit_blocks(far, block_bytes);
    check_limit_pair(here, there, block_bytes, threads);
    without_gil([&] { limit_process(pid, write, here, there, threads); });
}

std::uint64_t py_limit_stream(int fd, bool send, const LimitAddresses& addresses, std::int64_t block_bytes, int wait,
                              const nb::bytes& key, std::uint64_t first) {
    const LimitBlocks blocks = limit_blocks(addresses, block_bytes);
    check_limit_blocks(blocks, block_bytes, std::numeric_limits<std::int64_t>::max());
    if (wait < 0 || wait > static_cast<int>(StreamWait::spin)) refuse("wait is ", wait, ": must be in [0, 2]");
    const std::size_t given = key.size();
    if (given != 0 && given != key_bytes) refuse("key has ", given, " bytes: must have ", key_bytes, ", or none");
    std::array<char, key_bytes> copy{};
    std::copy_n(key.c_str(), given, copy.data());
    without_gil([&] {
        if (given == 0)
            limit_stream(fd, send, blocks, static_cast<StreamWait>(wait));
        else
            first = limit_encrypted(fd, send, blocks, static_cast<StreamWait>(wait), copy, first);
    });
    return first;
}

nb::tuple cipher_library() {
    const Libcrypto& crypto = Libcrypto::get();
    return nb::make_tuple(crypto.version(), crypto.path());
}

}  // namespace
}  // namespace datadist

NB_MODULE(_limits, m) {
    using namespace datadist;
    translate_rule_errors();
    m.def("streaming_bits", [] { return widest_streamer().first; });
    m.def("limit_memcpy", &py_limit_memcpy, "dst"_a.noconvert(), "src"_a.noconvert(), "block_bytes"_a, "threads"_a,
          "streaming"_a);
    m.def("limit_process", &py_limit_process, "pid"_a, "write"_a, "near"_a.noconvert(), "far"_a.noconvert(),
          "block_bytes"_a, "threads"_a);
    m.def("limit_stream", &py_limit_stream, "fd"_a, "send"_a, "addresses"_a.noconvert(), "block_bytes"_a, "wait"_a,
          "key"_a, "first"_a);
    m.def("limit_cipher", [](std::uint64_t records) { without_gil([&] { limit_cipher(records); }); }, "records"_a);
    m.def("cipher_library", &cipher_library);
}
