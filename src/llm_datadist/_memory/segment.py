"""Segments: contiguous bytes at an address of this process, shared with peers or owned by the user.

Threads: any. A failed construction leaves no descriptor and no mapping.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np

from llm_datadist._memory import huge_pages as huge
from llm_datadist._memory.unmap import unmap
from llm_datadist._native import MAPPED, PinnedMemory, Place
from llm_datadist._native.public_call import public_call
from llm_datadist.errors import LLMException, LLMStatusCode, OutOfMemory, ParamError, ProtocolError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_MFD_NOEXEC_SEAL: Final = 0x0008  # linux/memfd.h, since 6.3; required by vm.memfd_noexec=2
F_SEAL_FUTURE_WRITE: Final = 0x0010  # linux/fcntl.h, since 5.1
_TMPFS_MAGIC: Final = 0x01021994  # linux/magic.h
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# A lack of memory, address space or descriptors.
EXHAUSTED: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


class Segment:
    """Bytes at an address of this process.

    Its creator closes it after the last use of the *address*; arrays from :meth:`view` stay valid. Once closed it
    raises StateError; dropping an unclosed one is a ResourceWarning.
    """

    place: Place = MAPPED  # for copies
    uuid = b""  # of the GPU whose memory it is

    def __init__(self, name: str, memory: AddressRange) -> None:
        self.name = name
        self.nbytes = memory.nbytes
        self.writable = memory.writable
        self._memory: AddressRange | None = memory

    @property
    def address(self) -> int:
        return self._open_memory().address

    @property
    def closed(self) -> bool:
        return self._memory is None

    def view(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """View bytes ``[offset, offset + nbytes)``, by default to the end, as an array; read-only if the segment is."""
        count = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            what = f"offset {offset} with nbytes {count} is not inside {self.nbytes} bytes"
            raise ParamError(f"view of segment {self.name!r}: {what}")
        return self._open_memory().array()[offset : offset + count]

    def pinned_by(self, pinned: PinnedMemory) -> None:
        """Keep the memory pinned as long as it is mapped; devices reach it from now on."""
        self._open_memory().pinned = pinned
        self.place = Place(mapped=True, pinned=True)

    def keep(self) -> object:
        """Return an object that keeps the memory mapped."""
        return self.view()

    def open_for_peer(self, *, writable: bool) -> int:
        """Return a descriptor for one peer, which the caller closes; it can only read unless the peer may write."""
        raise LLMException(f"segment {self.name!r} has no descriptor")

    def close(self) -> None:
        """Drop the memory, which the last array over it unmaps. Idempotent."""
        self._memory = None

    def _open_memory(self) -> AddressRange:
        if (memory := self._memory) is None:
            raise StateError(f"segment {self.name!r} is closed")
        return memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @partial(public_call, here=True)  # below any lock of this thread
    def __del__(self) -> None:
        if not self.closed:
            try:
                warnings.warn(f"unclosed segment {self!r}", ResourceWarning, stacklevel=2, source=self)
            finally:
                self.close()

    def __repr__(self) -> str:
        memory = self._memory
        state = "closed" if memory is None else f"at {memory.address:#x}"
        return f"<{type(self).__name__} {self.name!r} {self.nbytes} bytes {state}>"


class SharedSegment(Segment):
    """Memfd mapped here, which peers map through its descriptor.

    It is sealed against resizing, because shrinking would kill readers by SIGBUS; its mode is 0600. The creator keeps
    the descriptor until :meth:`close` or :meth:`close_descriptor`, a peer keeps none.
    """

    def __init__(self, name: str, mapping: Mapping, fd: int | None) -> None:
        super().__init__(name, mapping)
        self._fd = fd

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, peers_may_write: bool, prefault: bool = False, huge_pages: bool = False
    ) -> Self:
        """Create ``nbytes`` zero bytes that peers can map.

        Pages take memory at first use, or now with ``prefault`` or ``huge_pages``. Unless ``peers_may_write``, a seal
        lets only this mapping write. ParamError: ``nbytes`` is out of range, or this host has no huge pages for it.
        OutOfMemory: memory, address space or descriptors are exhausted. LLMException (``LLM_FAILED``): the kernel
        failed otherwise.
        """
        if not 0 < nbytes <= sys.maxsize:
            raise ParamError(f"segment {name!r}: nbytes is {nbytes}, must be in [1, {sys.maxsize}]")
        if huge_pages:
            huge.check_size(name, nbytes)
        try:
            fd = new_memfd(name)
            try:
                # With 0666 another user's peer could reopen its read-only descriptor for writing.
                os.fchmod(fd, 0o600)
                mapping = _map_memfd(name, fd, nbytes, prefault=prefault, huge_pages=huge_pages)
                # Only now: F_SEAL_FUTURE_WRITE refuses every later writable mapping.
                more = 0 if peers_may_write else F_SEAL_FUTURE_WRITE
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL | more)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise _creation_error(name, nbytes, error) from error
        return cls(name, mapping, fd)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writable: bool, sparse: bool = False) -> Self:
        """Map a peer's segment, and close ``fd``, also if this raises. ``sparse`` is as in :func:`unmap`.

        ProtocolError: ``fd`` is not a tmpfs file of that size, sealed against resizing, that can be mapped so.
        OutOfMemory: memory or address space is exhausted.
        """
        try:
            _check_attachable(fd, nbytes)
            mapping = Mapping(fd, nbytes, writable=writable, sparse=sparse)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise _creation_error(f"fd {fd} of a peer", nbytes, error) from error
            raise ProtocolError(f"segment of a peer (fd {fd}, {nbytes} bytes, writable={writable}): {error}") from error
        finally:
            os.close(fd)
        return cls("peer", mapping, None)

    @property
    def fd(self) -> int:
        """Descriptor for peers; StateError if there is none."""
        if self._fd is None:
            raise StateError(f"segment {self.name!r} holds no descriptor: it is closed, or attached from a peer")
        return self._fd

    @property
    def sealed(self) -> bool:
        """True if only the owner's mapping can write."""
        return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE)

    def open_for_peer(self, *, writable: bool) -> int:
        """Return a descriptor as :class:`Segment` says; a seal does for reading. OSError: none left, no ``/proc``."""
        if writable or self.sealed:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close_descriptor(self) -> None:
        """Close the descriptor and keep the mapping. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        self.close_descriptor()
        super().close()


def view_of(address: int, nbytes: int) -> NDArray[np.uint8]:
    """View memory of the user, who keeps it allocated while the array is used."""
    if address <= 0 or nbytes <= 0 or address + nbytes > 1 << 64:
        raise ParamError(f"external memory: address {address} and nbytes {nbytes} are not a range of addresses")
    return AddressRange(address, nbytes, writable=True).array()


def new_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3
            raise
        return os.memfd_create(name, flags)


def _map_memfd(name: str, fd: int, nbytes: int, *, prefault: bool, huge_pages: bool) -> Mapping:
    os.ftruncate(fd, nbytes)
    if prefault and not huge_pages:
        # A lack of memory is an error here, and a SIGBUS at the touch below.
        os.posix_fallocate(fd, 0, nbytes)
    mapping = Mapping(fd, nbytes, writable=True)
    if huge_pages:
        try:
            huge.populate(name, fd, mapping.address, nbytes)
        except BaseException:
            del mapping  # the traceback would keep the memory
            raise
    if prefault:
        mapping.array()[:: mmap.PAGESIZE] = 0
    return mapping


def _check_attachable(fd: int, nbytes: int) -> None:
    found = (ctypes.c_long * 32)()  # struct statfs: 120 bytes on 64-bit Linux, f_type first
    if _libc.fstatfs(fd, found):
        raise _last_error()
    kind = int(found[0])
    if kind != _TMPFS_MAGIC:
        # On hugetlbfs the owner can remove pages: SIGBUS for readers.
        raise ProtocolError(f"segment of a peer ({nbytes} bytes): file system {kind:#x}, must be tmpfs")
    size = os.fstat(fd).st_size
    if size != nbytes or nbytes <= 0:
        raise ProtocolError(f"segment of a peer: announced as {nbytes} bytes, its descriptor has {size}")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise ProtocolError(
            f"segment of a peer ({nbytes} bytes): seals {seals:#x} lack shrink and grow ({_SIZE_SEALS:#x})"
        )


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _creation_error(name: str, nbytes: int, error: OSError) -> LLMException:
    text = f"segment {name!r} of {nbytes} bytes cannot be created: {error}"
    if error.errno in EXHAUSTED:
        return OutOfMemory(text, pool=name, requested=nbytes)
    return LLMException(text, status_code=LLMStatusCode.LLM_FAILED)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10
_RESERVE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@dataclass(eq=False)
class AddressRange:
    """Description of bytes at an address of this process. Immutable."""

    address: int
    nbytes: int
    writable: bool
    pinned: PinnedMemory | None = field(default=None, init=False)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Description for NumPy, whose array keeps this object alive."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable)}

    def array(self) -> NDArray[np.uint8]:
        # cast: NumPy's ArrayLike lacks __array_interface__.
        return np.asarray(cast("Any", self))


class Mapping(AddressRange):
    """Shared mapping of a descriptor, which may be closed. Dropping the last reference calls :func:`unmap`."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool, sparse: bool = False) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if nbytes < huge.ALIGNMENT:
            address = _mmap(None, nbytes, protection, mmap.MAP_SHARED, fd)
        else:
            address = _map_aligned(fd, nbytes, protection)
        super().__init__(address, nbytes, writable)
        self._sparse = sparse

    # No weakref.finalize: one that comes or goes in another thread at exit stops all others, the user's too. At the
    # very end the kernel unmaps.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # this module may be gone by then
        if finalizing() or not hasattr(self, "_sparse"):  # there is no mapping
            return
        if self.pinned is None or self.pinned.release():
            unmap(self.address, self.nbytes, sparse=self._sparse)


def _map_aligned(fd: int, nbytes: int, protection: int) -> int:
    """Map at a multiple of ``huge.ALIGNMENT``, which not every kernel does unasked."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = _mmap(None, size + huge.ALIGNMENT, 0, _RESERVE, -1)
    address = -(-reserved // huge.ALIGNMENT) * huge.ALIGNMENT
    try:
        _mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(reserved, size + huge.ALIGNMENT)
        raise
    if before := address - reserved:
        _libc.munmap(reserved, before)
    _libc.munmap(address + size, huge.ALIGNMENT - before)  # before is less, so something is left
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        raise _last_error()
    return int(found)
