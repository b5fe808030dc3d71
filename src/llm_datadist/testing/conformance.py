"""The suite that every transport passes: subclass :class:`TransportConformance`, say how a peer is opened, run pytest.

What the far end holds is written and read by its owner, never through the transport under test, and every byte inside
and outside of what a plan addresses is compared.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from llm_datadist.deadline import Deadline
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkError,
    LLMException,
    ParamError,
    ProtocolError,
    StateError,
    TransferAborted,
)
from llm_datadist.native import CopyPool, Plan, Tensors, plan_blocks, plan_row
from llm_datadist.testing.peers import PRIVATE_BYTES, REGION_BYTES, Peer
from llm_datadist.transport import PRIVATE, Connection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from llm_datadist.transport import RemoteTensors

__all__ = ["TransportConformance", "residue"]

_BLOCKS: Final = 16
_TENSORS: Final = 5
_MS: Final = 20_000  # budget of calls that are expected to succeed: only a hang can use it up


@dataclass(frozen=True)
class Scene:
    """Five equal tensors at both ends, at odd places, all memory around them random. Built anew for each seed.

    Attributes:
        extent: Bytes of each tensor.
        memory: The local memory, tensors and what is between them.
        images: The peer's regions as they were filled.
        starts: Local byte offset of each tensor.
        places: (region, offset) of each of the peer's tensors.
    """

    block_bytes: int
    extent: int
    memory: NDArray[np.uint8]
    images: dict[int, NDArray[np.uint8]]
    starts: list[int]
    places: list[tuple[int, int]]

    @classmethod
    def build(cls, seed: int, peer: Peer) -> Scene:
        """Return a scene drawn from ``seed``, with the peer's memory filled accordingly."""
        rng = np.random.default_rng(seed)
        block_bytes = int(rng.choice([64, 1000, 4096, 4608]))
        extent = block_bytes * _BLOCKS
        images = {region: rng.integers(0, 256, size, np.uint8) for region, size in REGION_BYTES.items()}
        for region, image in images.items():
            peer.poke(region, image)
        memory = rng.integers(0, 256, _TENSORS * (extent + 999) + 999, np.uint8)
        gaps = rng.integers(1, 999, _TENSORS).tolist()
        starts = [index * (extent + 999) + gap for index, gap in enumerate(gaps)]
        # The last one ends exactly at the end of its region.
        places = [(1, start) for start in starts[:3]] + [(2, gaps[3]), (2, REGION_BYTES[2] - extent)]
        return cls(block_bytes, extent, memory, images, starts, places)

    @property
    def local(self) -> Tensors:
        """The local tensors."""
        return Tensors(np.array(self.starts, np.uint64) + np.uint64(self.memory.ctypes.data), self.extent)

    def remote(self, connection: Connection, *, writable: bool) -> RemoteTensors:
        """Return the peer's tensors, mapped through a connection."""
        regions = np.array([region for region, _ in self.places], np.uint32)
        offsets = np.array([offset for _, offset in self.places], np.uint64)
        return connection.map(regions, offsets, self.extent, writable=writable)

    def plan(self, first: tuple[int, int], count: int, dst: list[int], src: list[int]) -> Plan:
        """Return the plan of blocks ``dst[i] <- src[i]`` from tensors ``first`` (destination, source) on."""
        runs, ordered = plan_blocks(
            np.array(dst, np.int64),
            np.array(src, np.int64),
            block_bytes=self.block_bytes,
            dst_count=_BLOCKS,
            src_count=_BLOCKS,
            alias=False,
        )
        return Plan(*first, count, runs, ordered, count * len(dst) * self.block_bytes)

    def local_block(self, tensor: int, block: int) -> NDArray[np.uint8]:
        """Return a block of a local tensor."""
        start = self.starts[tensor] + block * self.block_bytes
        return self.memory[start : start + self.block_bytes]

    def image_block(self, tensor: int, block: int) -> NDArray[np.uint8]:
        """Return a block of the peer's tensor in our image of the peer."""
        region, offset = self.places[tensor]
        start = offset + block * self.block_bytes
        return self.images[region][start : start + self.block_bytes]

    def check_peer(self, peer: Peer) -> None:
        """Compare every byte of the peer with the images."""
        for region, image in self.images.items():
            assert np.array_equal(peer.peek(region), image), f"region {region} differs"


class TransportConformance:
    """What every transport does, whatever it is made of. Subclass it as ``Test...`` and provide :meth:`open_peer`."""

    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        """Return a context manager that yields a peer with zeroed memory; ``writable``: with RCA."""
        raise NotImplementedError

    @pytest.fixture
    def peer(self) -> Iterator[Peer]:
        """Yield a peer whose memory may be written."""
        with self.open_peer(writable=True) as peer:
            yield peer

    @pytest.fixture
    def connection(self, peer: Peer) -> Iterator[Connection]:
        """Yield an open connection to ``peer``."""
        with peer.connect() as connection:
            yield connection

    # Bytes

    @pytest.mark.parametrize("seed", range(6))
    def test_read_moves_exactly_the_addressed_bytes(self, peer: Peer, connection: Connection, seed: int) -> None:
        """Random blocks of a random range of tensors arrive; nothing else changes at either end."""
        scene = Scene.build(seed, peer)
        first, count, dst, src = _random_blocks(seed)
        plan = scene.plan(first, count, dst, src)
        local = scene.local
        expected = scene.memory.copy()
        transfer = connection.read(plan, local, scene.remote(connection, writable=False), None, Deadline(_MS))
        transfer.wait(Deadline(_MS))
        got, scene.memory[:] = scene.memory.copy(), expected
        for tensor in range(count):
            for to, of in zip(dst, src, strict=True):
                scene.local_block(first[0] + tensor, to)[:] = scene.image_block(first[1] + tensor, of)
        assert np.array_equal(got, scene.memory)
        scene.check_peer(peer)
        assert transfer.done()
        assert transfer.nbytes == connection.bytes_read == plan.nbytes

    @pytest.mark.parametrize("seed", range(6))
    def test_write_moves_exactly_the_addressed_bytes(self, peer: Peer, connection: Connection, seed: int) -> None:
        """Random blocks of a random range of tensors reach the owner's eyes; nothing else changes at either end."""
        scene = Scene.build(seed, peer)
        first, count, dst, src = _random_blocks(seed)
        plan = scene.plan(first, count, dst, src)
        before = scene.memory.copy()
        remote = scene.remote(connection, writable=True)
        transfer = connection.write(plan, scene.local, remote, None, Deadline(_MS))
        transfer.wait(Deadline(_MS))
        for tensor in range(count):
            for to, of in zip(dst, src, strict=True):
                scene.image_block(first[0] + tensor, to)[:] = scene.local_block(first[1] + tensor, of)
        scene.check_peer(peer)
        assert np.array_equal(scene.memory, before)
        assert transfer.nbytes == connection.bytes_written == plan.nbytes

    def test_ordered_plans_take_effect_in_their_order(self, peer: Peer, connection: Connection) -> None:
        """A block that is written twice holds what the later pair says, in both directions."""
        scene = Scene.build(7, peer)
        plan = scene.plan((0, 0), _TENSORS, [3, 4, 3, 5, 4], [0, 1, 2, 3, 9])
        assert plan.ordered
        remote = scene.remote(connection, writable=True)
        connection.read(plan, scene.local, remote, None, Deadline(_MS)).wait(Deadline(_MS))
        for tensor in range(_TENSORS):
            for to, of in ((3, 2), (4, 9), (5, 3)):
                assert np.array_equal(scene.local_block(tensor, to), scene.image_block(tensor, of))
        connection.write(plan, scene.local, remote, None, Deadline(_MS)).wait(Deadline(_MS))
        for tensor in range(_TENSORS):
            for to, of in ((3, 2), (4, 9), (5, 3)):
                scene.image_block(tensor, to)[:] = scene.local_block(tensor, of)
        scene.check_peer(peer)

    def test_a_large_transfer_with_helpers(self, peer: Peer, connection: Connection) -> None:
        """What is split among threads arrives whole: there and back, every byte."""
        nbytes = REGION_BYTES[1]
        sent = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        received = np.zeros_like(sent)
        remote = _whole(connection, 1, nbytes, writable=True)
        plan = Plan(0, 0, 1, plan_row(0, 0, nbytes), False, nbytes)
        pool = CopyPool(2)
        try:
            connection.write(plan, _tensors(sent), remote, pool, Deadline(_MS)).wait(Deadline(_MS))
            assert np.array_equal(peer.peek(1), sent)
            connection.read(plan, _tensors(received), remote, pool, Deadline(_MS)).wait(Deadline(_MS))
        finally:
            pool.close()
        assert np.array_equal(received, sent)

    def test_private_memory(self, peer: Peer, connection: Connection) -> None:
        """Memory that is not exported is reached where the transport says so, else refused with a reason."""
        data = np.random.default_rng(2).integers(0, 256, PRIVATE_BYTES, np.uint8)
        peer.poke(PRIVATE, data)
        region, address = np.array([PRIVATE], np.uint32), np.array([peer.private_address() + 5], np.uint64)
        if not connection.capabilities.private_memory:
            with pytest.raises(LinkError, match="private"):
                connection.map(region, address, 1000, writable=False)
            return
        received = np.zeros(1000, np.uint8)
        remote = connection.map(region, address, 1000, writable=True)
        plan = Plan(0, 0, 1, plan_row(1, 1, 998), False, 998)
        connection.read(plan, _tensors(received), remote, None, Deadline(_MS)).wait(Deadline(_MS))
        assert received.tolist() == [0, *data[6:1004].tolist(), 0]
        connection.write(plan, _tensors(received[::-1].copy()), remote, None, Deadline(_MS)).wait(Deadline(_MS))
        data[6:1004] = data[6:1004][::-1].copy()
        assert np.array_equal(peer.peek(PRIVATE), data)

    # Refusals

    @pytest.mark.parametrize(
        ("region", "offset", "extent"),
        [
            (1, REGION_BYTES[1] - 63, 64),
            (1, REGION_BYTES[1], 1),
            (1, 0, REGION_BYTES[1] + 1),
            (1, 2**64 - 32, 64),
            (1, 2**63, 64),
            (2, REGION_BYTES[1] - 64, 64),
            (1, 0, 2**63),
            (1, 0, 2**64),
            (1, 0, -1),
            (3, 0, 64),
            (2**32 - 1, 0, 64),
        ],
    )
    def test_map_refuses_what_is_outside(self, connection: Connection, region: int, offset: int, extent: int) -> None:
        """No tensor outside a region is ever mapped, and a good one before it does not help."""
        regions, offsets = np.array([1, region], np.uint32), np.array([0, offset], np.uint64)
        with pytest.raises(ProtocolError, match=rf"region {region}\b|region 1 "):
            connection.map(regions, offsets, extent, writable=False)

    def test_map_takes_lists_of_one_length(self, connection: Connection) -> None:
        """Regions and offsets belong together, one each."""
        with pytest.raises(ParamError, match="as long"):
            connection.map(np.array([1, 1], np.uint32), np.array([0], np.uint64), 64, writable=False)

    def test_plans_outside_a_tensor_move_nothing(self, peer: Peer, connection: Connection) -> None:
        """The ends of every run and the range of tensors are checked at both ends before the first byte."""
        scene = Scene.build(3, peer)
        before, remote = scene.memory.copy(), scene.remote(connection, writable=True)
        beyond = Plan(0, 0, 1, plan_row(0, scene.extent - 8, 9), False, 9)
        missing = Plan(0, 1, _TENSORS, plan_row(0, 0, 1), False, _TENSORS)
        for plan in (beyond, missing):
            with pytest.raises(ParamError):
                connection.read(plan, scene.local, remote, None, Deadline(_MS))
            with pytest.raises(ParamError):
                connection.write(plan, scene.local, remote, None, Deadline(_MS))
        assert np.array_equal(scene.memory, before)
        scene.check_peer(peer)

    def test_read_only_exports_refuse_writable_maps(self) -> None:
        """Without RCA nothing of the peer can be mapped for writing, while reading works."""
        with self.open_peer(writable=False) as peer, peer.connect() as connection:
            peer.poke(1, np.full(64, 9, np.uint8))
            for region in (1, 2):
                with pytest.raises(LinkError, match="read-only"):
                    _whole(connection, region, 64, writable=True)
            received = np.zeros(64, np.uint8)
            _read_beginning(connection, received)
            assert (received == 9).all()

    def test_tensors_mapped_for_reading_are_not_written(self, peer: Peer, connection: Connection) -> None:
        """A write through a mapping that may be read-only is refused, not a segmentation fault."""
        remote = _whole(connection, 1, 64, writable=False)
        plan = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)
        with pytest.raises(ParamError, match="writable"):
            connection.write(plan, _tensors(np.ones(64, np.uint8)), remote, None, Deadline(_MS))
        assert not peer.peek(1).any()

    def test_tensors_of_another_connection_are_refused(self, peer: Peer, connection: Connection) -> None:
        """Addresses are used by the connection that knows them to be mapped, and by no other."""
        with peer.connect() as other:
            remote = _whole(other, 1, 64, writable=True)
        plan = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)
        for verb in (connection.read, connection.write):
            with pytest.raises(ParamError, match="another connection"):
                verb(plan, _tensors(np.zeros(64, np.uint8)), remote, None, Deadline(_MS))

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_a_passed_deadline(self, peer: Peer, connection: Connection, verb: str) -> None:
        """No time left is ``DeadlineExceeded`` in phase copy, and nothing is counted as moved."""
        remote = _whole(connection, 1, 64, writable=True)
        plan = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)
        with pytest.raises(DeadlineExceeded) as caught:
            getattr(connection, verb)(plan, _tensors(np.ones(64, np.uint8)), remote, None, Deadline(0))
        assert caught.value.phase == "copy"
        assert connection.bytes_read == connection.bytes_written == 0
        assert not peer.peek(1).any()

    # Guards

    def test_generation_sees_the_owner_advance(self, peer: Peer, connection: Connection) -> None:
        """What the owner advanced before is seen after, in its slot only."""
        slot, generation = peer.guard()
        other, untouched = peer.guard()
        assert connection.generation(slot) == generation
        for _ in range(3):
            advanced = peer.advance(slot)
            assert advanced != generation
            assert connection.generation(slot) == advanced
        assert connection.generation(other) == untouched

    @pytest.mark.parametrize("slot", [0, -1, 64, 2**40, 2**64])
    def test_generation_refuses_what_is_no_slot(self, connection: Connection, slot: int) -> None:
        """A slot number from the wire is held against the table's size; slot 0 is the header."""
        with pytest.raises(ProtocolError, match="slot"):
            connection.generation(slot)

    # Ends

    def test_closed_connections_raise(self, peer: Peer) -> None:
        """Every verb of a closed connection is a ``LinkError``; closing again is nothing."""
        for end in ("close", "abort"):
            connection = peer.connect()
            remote = _whole(connection, 1, 64, writable=True)
            getattr(connection, end)()
            assert connection.closed
            plan = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)
            local = _tensors(np.zeros(64, np.uint8))
            with pytest.raises(LinkError, match="closed"):
                connection.read(plan, local, remote, None, Deadline(_MS))
            with pytest.raises(LinkError, match="closed"):
                connection.write(plan, local, remote, None, Deadline(_MS))
            with pytest.raises(LinkError, match="closed"):
                connection.generation(1)
            with pytest.raises(LinkError, match="closed"):
                _whole(connection, 1, 64, writable=False)
            connection.close()
            connection.abort()

    def test_close_leaves_nothing(self, peer: Peer) -> None:
        """Descriptors, mappings and threads after a close are those before the connection."""
        peer.connect().close()  # what a first use loads stays
        before = residue()
        for end in ("close", "abort", "close"):
            connection = peer.connect()
            _read_beginning(connection, np.zeros(4096, np.uint8))
            getattr(connection, end)()
            del connection
        assert residue() == before

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_closing_under_a_copy(self, peer: Peer, end: str) -> None:
        """A connection closed under a running copy ends it with an error at the latest at the next one; no crash."""
        connection = peer.connect()
        received = np.zeros(REGION_BYTES[1], np.uint8)
        running = threading.Event()
        outcome: list[LLMException] = []

        def read_until_refused() -> None:
            try:
                while True:
                    _read_beginning(connection, received)
                    running.set()
            except LLMException as error:
                outcome.append(error)

        reader = threading.Thread(target=read_until_refused)
        reader.start()
        assert running.wait(_MS / 1e3)
        getattr(connection, end)()
        reader.join()
        assert isinstance(outcome[0], LinkError | TransferAborted)

    def test_a_forgotten_close_is_a_warning(self, peer: Peer) -> None:
        """Dropping an open connection warns, and leaves nothing all the same."""
        peer.connect().close()
        before = residue()
        with pytest.warns(ResourceWarning, match="unclosed"):
            _open_and_forget(peer)
        assert residue() == before

    def test_a_forked_child_cannot_use_it_and_does_no_harm(self, peer: Peer, connection: Connection) -> None:
        """In a child every call raises ``StateError`` and close works; the parent does not notice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            pid = os.fork()
        if pid == 0:
            os._exit(_child_of_fork(connection))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        slot, generation = peer.guard()
        assert connection.generation(slot) == generation
        _read_beginning(connection, np.zeros(64, np.uint8))

    def test_repr_shows_the_state(self, connection: Connection) -> None:
        """One line: open or closed, who is inside, bytes moved."""
        _read_beginning(connection, np.zeros(64, np.uint8))
        assert repr(connection) == f"<{type(connection).__name__} open: 0 in use, 64 bytes read, 0 written>"
        connection.close()
        assert "closed" in repr(connection)


def residue() -> dict[str, Any]:
    """Return what a close must give back: descriptors, mapped memfds and threads of this process."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        # Neighbouring mappings of one file merge, so bytes are counted, not lines.
        spans = [line.split()[0].split("-") for line in lines if "/memfd:" in line]
    return {
        "fds": _descriptors(),
        "mapped bytes": sum(int(end, 16) - int(start, 16) for start, end in spans),
        "threads": sorted(os.listdir("/proc/self/task")),
    }


def _descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is in the list and gone when it is looked at.
        with suppress(FileNotFoundError):
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return sorted(found)


def _open_and_forget(peer: Peer) -> None:
    peer.connect()
    gc.collect()


def _random_blocks(seed: int) -> tuple[tuple[int, int], int, list[int], list[int]]:
    """Return ((first destination tensor, first source tensor), count, destination blocks, source blocks)."""
    rng = np.random.default_rng(1000 + seed)
    count = int(rng.integers(1, _TENSORS + 1))
    first = (int(rng.integers(0, _TENSORS - count + 1)), int(rng.integers(0, _TENSORS - count + 1)))
    blocks = int(rng.integers(1, _BLOCKS + 1))
    dst, src = rng.permutation(_BLOCKS)[:blocks].tolist(), rng.permutation(_BLOCKS)[:blocks].tolist()
    if seed % 2:  # neighbours, so that runs are merged
        return first, count, sorted(dst), sorted(src)
    return first, count, dst, src


def _tensors(memory: NDArray[np.uint8]) -> Tensors:
    return Tensors(np.array([memory.ctypes.data], np.uint64), memory.size)


def _whole(connection: Connection, region: int, extent: int, *, writable: bool) -> RemoteTensors:
    return connection.map(np.array([region], np.uint32), np.array([0], np.uint64), extent, writable=writable)


def _read_beginning(connection: Connection, into: NDArray[np.uint8]) -> None:
    remote = _whole(connection, 1, into.size, writable=False)
    plan = Plan(0, 0, 1, plan_row(0, 0, into.size), False, into.size)
    connection.read(plan, _tensors(into), remote, None, Deadline(_MS)).wait(Deadline(_MS))


def _child_of_fork(connection: Connection) -> int:
    """Return 0 when a forked child is refused by every verb and can close. Runs in the child."""
    try:
        for call in (lambda: connection.generation(1), lambda: _whole(connection, 1, 64, writable=False)):
            try:
                call()
            except StateError:
                continue
            return 1
        connection.close()
        connection.close()
    except BaseException:  # noqa: BLE001 - whatever it is, the child must leave through _exit
        return 2
    return 0 if connection.closed else 3
