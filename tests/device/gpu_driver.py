"""Sections of gpu_check.py that ask the driver: each question has the answer of the fake, on which the library relies.

A section tells figures, one a line of JSON on its standard output. Its process ends without the driver: see main().
"""

import errno
import fcntl
import json
import mmap
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import addressof, byref, c_char, c_char_p, c_void_p, create_string_buffer
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.device import cu
from tests.device.cu import INT, MIB, READ, SIZE, U64, IpcHandle, allocated, event, mapped, pinned, stream, wait
from tests.support import fakecuda
from tests.support.source import ROOT, SOURCE

FAKE: Final = hasattr(cu.driver, "fakecuda_state")
PTX: Final = (SOURCE / "_native" / "copy" / "copy.ptx").read_bytes()
#: Words of the fake's lines whose assumptions need two GPUs, the last one a GPU whose memory cannot be exported.
_UNASKED: Final = (
    "hardware.peers || device == r->device", "CUDA_VISIBLE_DEVICES hides", "types == 0 || hardware.posix_fd",
)  # fmt: skip
_BEGIN: Final = "import socket, time\nfrom tests.device.cu import *\nstart()\n"
_OWNED: Final = (4 if FAKE else 64) * MIB
_OWNER: Final = f"""
at, handle = mapped(n := {_OWNED})
copy(at, pinned(n, bytes(range(256)) * (n // 256)), n, s := stream())
wait(s)
socket.send_fds(socket.socket(fileno=0), [b"x"], [export(handle)])
time.sleep(60)
"""


def tell(**figure: object) -> None:
    print(json.dumps(figure), flush=True)


def ask(question: str, expected: object, got: object, line: str = "") -> None:
    """Tell an answer of the driver; ``line``: words of the fake's line that assumes it."""
    tell(question=question, expected=expected, got=got, right=expected == got, line=line)


def check(claim: str, right: object, **more: object) -> None:
    """Tell whether the library does as it should."""
    tell(claim=claim, right=bool(right), **more)


def check_use() -> None:
    """Tell what the fake saw this process do wrong."""
    if FAKE:
        seen = fakecuda.load().state().violations
        check("the driver is used as documented", not seen, seen=seen)


def answer(function: str, *arguments: object) -> str:
    """Call the driver; return the name of its result without CUDA_ERROR_."""
    name, code = c_char_p(), cu.code(function, *arguments)
    cu.driver.cuGetErrorName(code, byref(name))
    return (name.value or b"%d" % code).decode().replace("CUDA_", "").replace("ERROR_", "")


def array(memory: Any) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)


def milliseconds(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return call(), round((time.perf_counter() - began) * 1e3, 3)


class Bytes:
    """Bytes of device memory for the host, by plain copies of the driver through pinned memory of ``room`` bytes."""

    def __init__(self, room: int) -> None:
        cu.start()
        self._stream, self._memory = stream(), pinned(room)
        self._array = array(self._memory)

    def read(self, at: int, nbytes: int) -> NDArray[np.uint8]:
        cu.copy(self._memory, at, nbytes, self._stream)
        wait(self._stream)
        return self._array[:nbytes].copy()

    def write(self, at: int, content: NDArray[np.uint8]) -> None:
        self._array[: content.nbytes] = content.reshape(-1)
        cu.copy(at, self._memory, content.nbytes, self._stream)
        wait(self._stream)


def card() -> None:
    """Tell which GPU and driver there are."""
    version, name = INT(), create_string_buffer(96)
    cu.start()
    cu.call("cuDriverGetVersion", byref(version))
    cu.call("cuDeviceGetName", name, 96, 0)
    query = "nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader"
    driver = "fake" if FAKE else subprocess.getoutput(query)
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    tell(card=name.value.decode(), driver=driver, cuda=cuda, fake=FAKE)


def questions() -> None:
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    ask("a call before cuInit", "NOT_INITIALIZED", answer("cuDeviceGetCount", byref(INT())))
    cu.start()
    for part in (_device, _exports, _pinning, _order, _frees, _addresses):
        try:
            part()
        except (cu.CudaError, OSError) as error:
            check(f"{part.__name__} comes to its end", right=False, error=repr(error))
    other, _ = _in_time(partial(answer, "cuMemAlloc_v2", byref(U64()), SIZE(1)))
    ask("cuMemAlloc in a thread without a context", "INVALID_CONTEXT", other)
    if (child := os.fork()) == 0:
        os._exit(cu.code("cuDeviceGetCount", byref(INT())))
    ask("a call in a forked child", 3, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for line in _UNASKED:
        tell(note="not asked, needs another GPU", value=line, line=line)


def _device() -> None:
    value, properties, grain = INT(), byref(cu.Properties(1, 1, (1, 0))), SIZE()
    declared = (SOURCE / "_native/copy/cuda_abi.h").read_text() + (ROOT / "tests/device/fakeabi.h").read_text()
    for name, number in re.findall(r"X\(CU_(DEVICE_ATTRIBUTE_\w+), (\d+)\)", declared):
        cu.call("cuDeviceGetAttribute", byref(value), int(number), 0)
        tell(note=name, value=value.value)
    cu.call("cuMemGetAllocationGranularity", byref(grain), properties, 0)
    ask("granularity of exportable memory", 2 * MIB, grain.value)
    tell(note="ms to compile copy.ptx, twice", value=[milliseconds(partial(cu.kernel, PTX))[1] for _ in range(2)])
    ask("a module that is no PTX", "INVALID_IMAGE", answer("cuModuleLoadData", byref(c_void_p()), b"no module"))
    created = answer("cuMemCreate", byref(U64()), SIZE(1 << 50), properties, U64(0))
    ask("cuMemCreate of 1 PiB", "OUT_OF_MEMORY", created)


def _addresses() -> None:
    at, _ = mapped(4 * MIB)
    base, size, found, inside = U64(), SIZE(), INT(), U64(at + 3 * MIB)
    for name, number, expected in (("type", 2, 2), ("device", 9, 0)):
        cu.call("cuPointerGetAttribute", byref(found), number, inside)
        ask(f"{name} of mapped memory", expected, found.value)
    cu.call("cuPointerGetAttribute", byref(found), 2, U64(addressof(pinned(4096))))
    ask("type of memory of cuMemAllocHost", 1, found.value)
    pageable = U64(addressof(create_string_buffer(4096)))
    ask("type of pageable memory", "INVALID_VALUE", answer("cuPointerGetAttribute", byref(found), 2, pageable))
    if not FAKE:  # which lacks what the library never calls
        got = answer("cuMemGetAddressRange_v2", byref(base), byref(size), inside)
        tell(note="cuMemGetAddressRange of mapped memory", value=[got, base.value - at, size.value])
        tell(note="cuIpcGetMemHandle of mapped memory", value=answer("cuIpcGetMemHandle", byref(IpcHandle()), U64(at)))
        program = "h = IpcHandle(); call('cuIpcGetMemHandle', byref(h), U64(allocated(MIB))); print(bytes(h).hex())"
        owner = subprocess.check_output([sys.executable, "-c", _BEGIN + program], text=True)
        opened = answer("cuIpcOpenMemHandle_v2", byref(U64()), IpcHandle(bytes.fromhex(owner)), 1)
        tell(note="cuIpcOpenMemHandle of a process that has ended", value=opened)
    freed = answer("cuMemAddressFree", U64(at), SIZE(4 * MIB))
    ask("cuMemAddressFree under a mapping", "INVALID_VALUE", freed, "while memory is mapped there")


def _free() -> int:
    free = SIZE()
    cu.call("cuMemGetInfo_v2", byref(free), byref(SIZE()))
    return free.value


def _exports() -> None:
    _, handle = mapped(4 * MIB)
    fd, imported, there = cu.export(handle), U64(), U64()
    status = os.fstat(fd)
    tell(note="descriptor", value=[os.readlink(f"/proc/self/fd/{fd}"), oct(status.st_mode), status.st_size])
    try:
        seals = f"seals {fcntl.fcntl(fd, fcntl.F_GET_SEALS)}"
    except OSError as error:
        seals = errno.errorcode[error.errno or 0]
    ask("F_GET_SEALS of a descriptor", "EINVAL", seals)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    full = answer("cuMemExportToShareableHandle", byref(INT()), handle, 1, U64(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    ask("export without room for a descriptor", "OUT_OF_MEMORY", full, "fd >= 0, CUDA_ERROR_OUT_OF_MEMORY")
    cu.call("cuMemImportFromShareableHandle", byref(imported), c_void_p(fd), 1)
    cu.call("cuMemAddressReserve", byref(there), SIZE(8 * MIB), SIZE(0), U64(0), U64(0))
    for size, expected in ((8, "INVALID_VALUE"), (2, "SUCCESS")):
        got = answer("cuMemMap", there, SIZE(size * MIB), SIZE(0), imported, U64(0))
        ask(f"cuMemMap of {size} MiB of imported memory of 4 MiB", expected, got)
    cu.code("cuMemUnmap", there, SIZE(2 * MIB))
    cu.call("cuMemRelease", imported)
    os.close(fd)


def _pinning() -> None:
    os.truncate(fd := os.memfd_create("gpu-check"), 256 * MIB)
    memory = c_char.from_buffer(mmap.mmap(fd, 256 * MIB))
    register = partial(answer, "cuMemHostRegister_v2", c_void_p(addressof(memory)), SIZE(256 * MIB), 3)
    got, spent = milliseconds(register)
    ask("cuMemHostRegister of a memfd", "SUCCESS", got)
    tell(note="ms to pin its 256 MiB", value=spent)
    ask("cuMemHostRegister of the same", "HOST_MEMORY_ALREADY_REGISTERED", register())
    cu.call("cuMemHostUnregister", c_void_p(addressof(memory)))  # its addresses may soon be another memory's


def _order() -> None:
    """Ask what a stream orders, and when a copy has taken or written pageable memory."""
    on, function, n, rounds = stream(), cu.kernel(PTX), MIB // 4, 64
    at, target, through = mapped(2 * MIB)[0], allocated(rounds * n), Bytes(rounds * n)
    image, host = np.random.default_rng(1).integers(0, 256, rounds * n, np.uint8), pinned(rounds * n)
    array(host)[:] = image
    for i in range(rounds):
        cu.copy(at, addressof(host) + i * n, n, on)
        cu.launch(function, [target], [at], [(i * n, 0, n)], on)
    wait(on)
    right = bool((through.read(target, rounds * n) == image).all())
    ask("a kernel sees the copy before it, which the next copy leaves", True, right)
    pageable = np.full(MIB, 1, np.uint8)
    cu.copy(at, pageable.ctypes.data, MIB, on)
    pageable[:] = 2
    wait(on)
    ask("a copy has taken pageable bytes when it returns", True, bool((through.read(at, MIB) == 1).all()))
    cu.copy(pageable.ctypes.data, at, MIB, on)
    ask("a copy has written pageable bytes when it returns", True, bool((pageable == 1).all()))


def _frees() -> None:
    on, done, host, at = stream(), event(), pinned(8 * MIB if FAKE else 64 * MIB), allocated(64 * MIB)
    for call, unused in (("cuMemFree_v2", U64(allocated(MIB))), ("cuMemFreeHost", pinned(4096))):
        for _ in range(16):
            cu.copy(at, host, len(host), on)
        cu.call("cuEventRecord", done, on)
        begun = answer("cuEventQuery", done)
        cu.call(call, unused)
        context = c_void_p()
        cu.call("cuCtxPopCurrent_v2", byref(context))
        after = answer("cuEventQuery", done)  # without a context, as the library asks
        cu.call("cuCtxPushCurrent_v2", context)
        ask(f"{call} waits for the device", ["NOT_READY", "SUCCESS"], [begun, after], "freeing waits for the device")
        wait(on)


def imports() -> None:
    """Import descriptors of other things, each in a thread of its own: the driver may wait."""
    cu.start()
    with TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        fifo = os.open(f"{folder}/fifo", os.O_RDWR)
    (pipe, _), (ours, _theirs), memory = os.pipe(), socket.socketpair(), os.memfd_create("gpu-check")
    os.truncate(memory, 4 * MIB)
    things = {"file": os.open(__file__, os.O_RDONLY), "device file": os.open("/dev/null", os.O_RDWR), "memfd": memory}
    things |= {"closed descriptor": 1000, "socket": ours.fileno(), "pipe": pipe, "FIFO": fifo}  # those may block
    for name, fd in things.items():
        got, spent = _in_time(partial(answer, "cuMemImportFromShareableHandle", byref(U64()), c_void_p(fd), 1))
        ask(f"import of a {name}", "INVALID_VALUE", got, "any other descriptor is refused")
        tell(note=f"ms to refuse a {name}", value=spent)


def _in_time(call: Callable[[], str]) -> tuple[str, float]:
    told: list[tuple[str, float]] = []
    thread = threading.Thread(target=lambda: told.append(milliseconds(call)), daemon=True)
    thread.start()
    thread.join(5)
    return told[0] if told else ("no answer within 5 s", 5e3)


def _not_to_write() -> tuple[int, U64, int, int]:
    """Return memory and its handle, where it is mapped for reading, and where no memory is mapped any more."""
    (at, handle), (gone, other) = mapped(2 * MIB), mapped(2 * MIB)
    cu.unmap(gone, other)
    return at, handle, mapped(2 * MIB, fd=cu.export(handle), access=READ)[0], gone


def refusals() -> None:
    """Copy where no copy may: the library expects an error at once, and that the context goes on."""
    cu.start()
    on, host, through, line = stream(), pinned(4096), Bytes(4096), "mapped for reading only: the call refuses"
    at, _, reading, gone = _not_to_write()
    through.write(at, np.full(4096, 7, np.uint8))
    ask("a copy of memory mapped for reading", 7, int(through.read(reading, 4096)[9]))
    here = addressof(host)
    for what, to, of in (("into memory mapped for reading", reading, here), ("of unmapped memory", here, gone)):
        got = [answer("cuMemcpyAsync", U64(to), U64(of), SIZE(4096), on), answer("cuStreamSynchronize", on)]
        ask(f"a copy {what}, and its stream", ["INVALID_VALUE", "SUCCESS"], got, line)
    ask("memory mapped for reading keeps its bytes", 7, int(through.read(at, 4096)[9]))


def after_error() -> None:
    """Let a kernel write where it may only read; then ask which calls still answer."""
    cu.start()
    on, function, done, host, scratch = stream(), cu.kernel(PTX), event(), pinned(4096), allocated(4096)
    at, handle, reading, gone = _not_to_write()
    cu.launch(function, [at + MIB], [reading], [(0, 0, 4096)], on)
    ask("a kernel reads memory mapped for reading", "SUCCESS", answer("cuStreamSynchronize", on))
    cu.launch(function, [reading], [at + MIB], [(0, 0, 4096)], on)
    got = answer("cuStreamSynchronize", on)
    ask("a kernel writes memory mapped for reading", "ILLEGAL_ADDRESS", got, "a kernel ends all work with error 700")
    if got == "SUCCESS":
        cu.launch(function, [at], [gone], [(0, 0, 4096)], on)
        ask("a kernel reads unmapped memory", "ILLEGAL_ADDRESS", answer("cuStreamSynchronize", on))
    count, value, context, page = byref(INT()), byref(U64()), c_void_p(), SIZE(2 * MIB)
    properties, line = byref(cu.Properties(1, 1, (1, 0))), "calls that touch no memory still answer"
    answers = {
        "cuDeviceGetCount": (count,), "cuDeviceGetAttribute": (count, 16, 0), "cuCtxPopCurrent_v2": (byref(context),),
        "cuCtxPushCurrent_v2": (context,),
    }  # fmt: skip
    fails = {
        "cuDevicePrimaryCtxRetain": (value, 0), "cuMemGetInfo_v2": (value, byref(SIZE())), "cuEventQuery": (done,),
        "cuMemGetAllocationGranularity": (value, properties, 0), "cuMemCreate": (value, page, properties, U64(0)),
        "cuMemExportToShareableHandle": (count, handle, 1, U64(0)), "cuMemAlloc_v2": (value, page),
        "cuMemAllocHost_v2": (value, page), "cuStreamCreate": (value, 1), "cuEventRecord": (done, on),
        "cuMemcpyAsync": (U64(at), U64(addressof(host)), SIZE(4096), on), "cuPointerGetAttribute": (count, 2, U64(at)),
        "cuMemUnmap": (U64(at), page), "cuMemRelease": (handle,), "cuMemFree_v2": (U64(scratch),),
    }  # fmt: skip
    for name, arguments in (answers | fails).items():
        expected = "SUCCESS" if name in answers else "ILLEGAL_ADDRESS"
        ask(f"{name} after error 700", expected, answer(name, *arguments), line)


def dead_vmm() -> None:
    """Kill the owner of imported memory; then ask for its bytes, and when they are freed."""
    through, (ours, theirs) = Bytes(_OWNED), socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", _BEGIN + _OWNER], stdin=theirs.fileno()) as owner:
        _, (fd, *_), _, _ = socket.recv_fds(ours, 1, 1)
        at, handle = mapped(_OWNED, fd=fd)
        os.close(fd)
        free = [_free()]
        owner.kill()
    time.sleep(0 if FAKE else 1)
    right = (through.read(at, _OWNED) == np.arange(_OWNED).astype(np.uint8)).all()
    ask("imported memory keeps its bytes when its owner is killed", True, bool(right))
    free.append(_free())
    cu.unmap(at, handle, _OWNED)
    death, unmapping = np.diff([*free, _free()]).tolist()
    tell(note=f"bytes freed by the owner's death, and by unmapping its {_OWNED}", value=[death, unmapping])
    # The fake counts memory by process.
    ask("unmapping frees the memory of a dead owner", True, FAKE or unmapping >= _OWNED)
