"""The suite that every transport passes: subclass :class:`TransportConformance`, open a peer, run pytest.

For a peer in its own process: :class:`ProcessConformance`; if it takes part in every transfer:
:class:`ServedConformance`. The peer's owner reads and writes its memory, never the tested transport. Every byte is
compared.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._native import CopyPool, Plan, plan_row
from llm_datadist._transport.connection import MemoryChanged, Transfer, guards_of
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkError,
    LLMException,
    ParamError,
    PeerLost,
    ProtocolError,
    TransferAborted,
    TransferFailed,
)
from llm_datadist.testing.peers import NON_POOL_BYTES, REGION_BYTES, Peer, PeerProcess
from llm_datadist.testing.scene import (
    BLOCKS,
    BUDGET_MS,
    TENSORS,
    Scene,
    beginning_of,
    child_of_fork,
    held,
    one_row,
    open_and_forget,
    pull,
    push,
    random_blocks,
    read_beginning,
    residue_at_rest,
    settled,
    tensors_over,
    unchanged,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from llm_datadist._transport.connection import Connection


_TRIES: Final = 20  # repetitions of races
#: The blocks of the ordered plan, as they are at its end.
_LATER: Final = (0, 0), TENSORS, [3, 4, 5], [2, 9, 3]


class TransportConformance:
    """Tests of every transport. Subclass it as ``Test...`` and provide :meth:`open_peer`."""

    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        """Return a context manager that yields a peer with zeroed memory; ``writable``: with RCA."""
        raise NotImplementedError

    @pytest.fixture
    def peer(self) -> Iterator[Peer]:
        """Yield a peer with writable memory."""
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
        scene, blocks = Scene.build(seed, peer), random_blocks(seed)
        plan, expected = scene.plan(*blocks), scene.after_read(*blocks)
        remote = scene.remote(connection, writable=False)
        moved = pull(plan, scene.local, remote, Deadline(BUDGET_MS))
        assert np.array_equal(scene.memory, expected)
        scene.check_peer()
        assert moved == connection.usage().read_bytes == plan.nbytes

    @pytest.mark.parametrize("seed", range(6))
    def test_write_moves_exactly_the_addressed_bytes(self, peer: Peer, connection: Connection, seed: int) -> None:
        scene, blocks = Scene.build(seed, peer), random_blocks(seed)
        plan, before = scene.plan(*blocks), scene.memory.copy()
        remote = scene.remote(connection, writable=True)
        moved = push(plan, scene.local, remote, Deadline(BUDGET_MS))
        scene.expect_write(*blocks)
        scene.check_peer()
        assert np.array_equal(scene.memory, before)
        assert moved == connection.usage().written_bytes == plan.nbytes

    def test_ordered_plans_take_effect_in_their_order(self, peer: Peer, connection: Connection) -> None:
        """A block that is written twice holds the later pair's bytes."""
        scene = Scene.build(7, peer)
        plan = scene.plan((0, 0), TENSORS, [3, 4, 3, 5, 4], [0, 1, 2, 3, 9])
        assert plan.ordered
        remote, expected = scene.remote(connection, writable=True), scene.after_read(*_LATER)
        pull(plan, scene.local, remote, Deadline(BUDGET_MS))
        assert np.array_equal(scene.memory, expected)
        push(plan, scene.local, remote, Deadline(BUDGET_MS))
        scene.expect_write(*_LATER)
        scene.check_peer()

    def test_a_large_transfer_with_helpers(self, peer: Peer, connection: Connection) -> None:
        nbytes = REGION_BYTES[1]
        sent = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        received = np.zeros_like(sent)
        remote = beginning_of(peer, connection, 1, nbytes, writable=True)
        plan = one_row(nbytes)
        with closing(CopyPool(2)) as pool:
            push(plan, tensors_over(sent), remote, Deadline(BUDGET_MS), pool=pool)
            assert np.array_equal(peer.peek(1), sent)
            pull(plan, tensors_over(received), remote, Deadline(BUDGET_MS), pool=pool)
        assert np.array_equal(received, sent)

    def test_private_memory(self, peer: Peer, connection: Connection) -> None:
        """Non-pool memory is reached if the transport says so, else refused."""
        data = np.random.default_rng(2).integers(0, 256, NON_POOL_BYTES, np.uint8)
        peer.poke(NON_POOL, data)
        region, address = np.array([NON_POOL], np.uint32), np.array([peer.address(NON_POOL) + 5], np.uint64)
        if not connection.capabilities.non_pool_memory:
            with pytest.raises(LinkError, match="non-pool"):
                connection.map(region, address, 1000, writable=False)
            return
        received = np.zeros(1000, np.uint8)
        remote = connection.map(region, address, 1000, writable=True)
        plan = Plan(0, 0, 1, plan_row(1, 1, 998), False, 998)
        pull(plan, tensors_over(received), remote, Deadline(BUDGET_MS))
        assert received.tolist() == [0, *data[6:1004].tolist(), 0]
        push(plan, tensors_over(received[::-1].copy()), remote, Deadline(BUDGET_MS))
        data[6:1004] = data[6:1004][::-1].copy()
        assert np.array_equal(peer.peek(NON_POOL), data)

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
        """No tensor outside a region is mapped, not even after a good one."""
        regions, offsets = np.array([1, region], np.uint32), np.array([0, offset], np.uint64)
        shared = connection.capabilities.shared_regions
        with pytest.raises(ProtocolError if shared else LinkError, match=rf"region {region}\b|region 1 "):
            connection.map(regions, offsets, extent, writable=False)

    def test_map_takes_lists_of_one_length(self, connection: Connection) -> None:
        with pytest.raises(ParamError, match="as long"):
            connection.map(np.array([1, 1], np.uint32), np.array([0], np.uint64), 64, writable=False)

    def test_plans_outside_a_tensor_move_nothing(self, peer: Peer, connection: Connection) -> None:
        """Runs and tensors of a plan are checked on both sides before the first byte."""
        scene = Scene.build(3, peer)
        before, remote = scene.memory.copy(), scene.remote(connection, writable=True)
        beyond = Plan(0, 0, 1, plan_row(0, scene.extent - 8, 9), False, 9)
        missing = Plan(0, 1, TENSORS, plan_row(0, 0, 1), False, TENSORS)
        for plan, verb in product((beyond, missing), (pull, push)):
            with pytest.raises(ParamError):
                verb(plan, scene.local, remote, Deadline(BUDGET_MS))
        assert np.array_equal(scene.memory, before)
        scene.check_peer()

    def test_read_only_exports_refuse_writable_maps(self) -> None:
        """Without RCA writable maps are refused; reads work."""
        with self.open_peer(writable=False) as peer, peer.connect() as connection:
            peer.poke(1, np.full(64, 9, np.uint8))
            for region in (1, 2):
                with pytest.raises(LinkError, match="read-only"):
                    beginning_of(peer, connection, region, 64, writable=True)
            assert (read_beginning(peer, connection, np.zeros(64, np.uint8)) == 9).all()

    def test_tensors_mapped_for_reading_are_not_written(self, peer: Peer, connection: Connection) -> None:
        remote = beginning_of(peer, connection, 1, 64, writable=False)
        with pytest.raises(ParamError, match="writable"):
            push(one_row(64), tensors_over(np.ones(64, np.uint8)), remote, Deadline(BUDGET_MS))
        assert not peer.peek(1).any()

    def test_tensors_of_another_connection_are_refused(self, peer: Peer, connection: Connection) -> None:
        with peer.connect() as other:
            remote = beginning_of(peer, other, 1, 64, writable=True)
        local = tensors_over(np.zeros(64, np.uint8))
        for write in (False, True):
            with pytest.raises(ParamError, match="another connection"):
                connection.move(Transfer(one_row(64), local, remote, None, Deadline(BUDGET_MS), write))

    @pytest.mark.parametrize("verb", [pull, push])
    def test_a_passed_deadline(self, peer: Peer, connection: Connection, verb: Callable[..., int]) -> None:
        """No time left: ``DeadlineExceeded`` in phase copy with the bytes done, no bytes counted."""
        remote = beginning_of(peer, connection, 1, 64, writable=True)
        with pytest.raises(DeadlineExceeded, match="0 of 64 bytes done") as caught:
            verb(one_row(64), tensors_over(np.ones(64, np.uint8)), remote, Deadline(0))
        assert caught.value.phase == "copy"
        assert connection.usage()[:2] == (0, 0)
        assert not peer.peek(1).any()

    def test_a_deadline_leaves_local_memory_alone(self, peer: Peer, connection: Connection) -> None:
        """No byte arrives, or is read, after a transfer was given up; the next succeeds."""
        nbytes = REGION_BYTES[1]
        remote = beginning_of(peer, connection, 1, nbytes, writable=True)
        data, given_up = np.ones(nbytes, np.uint8), 0
        for budget_ms in [*(1, 2, 3) * 10, 0]:
            for verb in (pull, push):
                try:
                    verb(one_row(nbytes), tensors_over(data), remote, Deadline(budget_ms))
                except DeadlineExceeded:
                    given_up += 1
                data[:] = 7
                assert (data == 7).all()
        assert given_up
        received = np.zeros(64, np.uint8)
        peer.poke(2, np.full(64, 9, np.uint8))  # in region 1 the bytes of a write that was given up may still arrive
        other = beginning_of(peer, connection, 2, 64, writable=False)
        pull(one_row(64), tensors_over(received), other, Deadline(BUDGET_MS))
        assert (received == 9).all()
        assert (data == 7).all()

    # Guards

    def test_guards_show_that_the_owner_advanced(self, peer: Peer, connection: Connection) -> None:
        """An advance shows at once, in its slot only."""
        slot, generation = peer.guard()
        if connection.capabilities.remote_guards:
            with pytest.raises(LinkError, match="remote_guards"):
                unchanged(connection, slot, generation)
            return
        other, untouched = peer.guard()
        assert unchanged(connection, slot, generation)
        for _ in range(3):
            before, generation = generation, peer.advance(slot)
            assert not unchanged(connection, slot, before)
            assert unchanged(connection, slot, generation)
        assert unchanged(connection, other, untouched)

    def test_nothing_moves_under_a_guard_that_has_advanced(self, peer: Peer, connection: Connection) -> None:
        """MemoryChanged, in both directions, also where another guard is as promised."""
        if connection.capabilities.remote_guards:
            return  # the owner compares; the test of what is revoked during a transfer is for it
        kept, (slot, generation) = peer.guard(), peer.guard()
        guards = guards_of(connection, [kept, (slot, generation)])
        remote = beginning_of(peer, connection, 1, 64, writable=True)
        for verb, local in ((pull, np.full(64, 3, np.uint8)), (push, np.full(64, 4, np.uint8))):
            peer.poke(1, np.full(64, 7, np.uint8))
            verb(one_row(64), tensors_over(local), remote, Deadline(BUDGET_MS), guards)
            assert (peer.peek(1)[:64] == local).all()
        peer.advance(slot)
        before = peer.peek(1).copy()
        for verb in (pull, push):
            local = np.full(64, 5, np.uint8)
            with pytest.raises(MemoryChanged):
                verb(one_row(64), tensors_over(local), remote, Deadline(BUDGET_MS), guards)
            assert (local == 5).all()
            assert (peer.peek(1) == before).all()

    def test_what_is_revoked_during_the_transfer_never_passes(self, peer: Peer, connection: Connection) -> None:
        """A successful read has the bytes from before the advance."""
        nbytes, old, new = REGION_BYTES[1], 7, 9
        remote = beginning_of(peer, connection, 1, nbytes, writable=False)
        plan, into = one_row(nbytes), np.zeros(nbytes, np.uint8)

        def read(slot: int, generation: int, deadline: Deadline) -> bool:
            """Return True if it succeeds."""
            with_guards = not connection.capabilities.remote_guards
            guards = guards_of(connection, [(slot, generation)]) if with_guards else None
            try:
                pull(plan, tensors_over(into), remote, deadline, guards)
            except TransferFailed:
                return False
            return True

        def reuse(slot: int, ended: threading.Event) -> None:
            """Wait for the first byte or the read's end, then reuse the memory."""
            while not into[0] and not ended.is_set():
                pass
            peer.advance(slot)
            peer.poke(1, np.full(nbytes, new, np.uint8))

        for _ in range(_TRIES):
            peer.poke(1, np.full(nbytes, old, np.uint8))
            slot, generation = peer.guard()
            peer.hold(slot, generation)
            into[:] = 0
            ended = threading.Event()
            owner = threading.Thread(target=reuse, args=(slot, ended))
            owner.start()
            whole = read(slot, generation, Deadline(BUDGET_MS))
            ended.set()
            owner.join()
            assert not whole or (into == old).all()
        slot, generation = peer.guard()
        peer.hold(slot, generation)
        with held(partial(read, slot, generation)) as last:
            peer.advance(slot)
        assert not last.result()

    @pytest.mark.parametrize("slot", [0, 64, 2**40])
    def test_guards_refuse_what_is_no_slot(self, connection: Connection, slot: int) -> None:
        """Slot numbers outside the table, and the header's, are refused."""
        remote = connection.capabilities.remote_guards
        with pytest.raises(LinkError if remote else ProtocolError, match="guards" if remote else "slot"):
            unchanged(connection, slot, 0)

    # Ends

    def test_many_threads_share_a_connection(self, peer: Peer, connection: Connection) -> None:
        scene = Scene.build(5, peer)
        remote = scene.remote(connection, writable=False)
        blocks = (0, 0), TENSORS, list(range(BLOCKS)), list(range(BLOCKS))[::-1]
        plan, readers = scene.plan(*blocks), threading.Barrier(4)

        def read(_: int) -> None:
            own = replace(scene, memory=np.zeros_like(scene.memory))
            expected = own.after_read(*blocks)
            readers.wait(BUDGET_MS / 1e3)
            for _ in range(10):
                own.memory[:] = 0
                pull(plan, own.local, remote, Deadline(BUDGET_MS))
                assert np.array_equal(own.memory, expected)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(read, range(4)))

    def test_closed_connections_raise(self, peer: Peer) -> None:
        """Every verb of a closed connection is a ``LinkError``; close may be repeated."""
        for end in ("close", "abort"):
            connection = peer.connect()
            remote = beginning_of(peer, connection, 1, 64, writable=True)
            getattr(connection, end)()
            assert connection.closed
            asked = one_row(64), tensors_over(np.zeros(64, np.uint8)), remote, Deadline(BUDGET_MS)
            for call in (
                partial(pull, *asked),
                partial(push, *asked),
                partial(unchanged, connection, 1, 0),
                partial(beginning_of, peer, connection, 1, 64, writable=False),
            ):
                with pytest.raises(LinkError, match="closed"):
                    call()
            connection.close()
            connection.abort()

    def test_close_leaves_nothing(self, peer: Peer) -> None:
        """A close frees descriptors, mappings and threads."""
        peer.connect().close()  # the first use loads what stays
        before = residue_at_rest()
        for end in ("close", "abort", "close"):
            connection = peer.connect()
            read_beginning(peer, connection, np.zeros(4096, np.uint8))
            getattr(connection, end)()
            del connection
        assert settled(before) == before

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_the_end_of_a_connection_under_a_copy(self, peer: Peer, end: str) -> None:
        """A running copy keeps its resources: closed it ends with its bytes, aborted with an error."""
        peer.connect().close()
        before = residue_at_rest()
        peer.poke(1, np.full(64, 5, np.uint8))
        connection, received = peer.connect(), np.zeros(64, np.uint8)
        with held(partial(read_beginning, peer, connection, received)) as outcome:
            getattr(connection, end)()
            with pytest.raises(LinkError, match="closed"):
                unchanged(connection, 1, 0)
        error = outcome.exception()
        assert error is None if end == "close" else isinstance(error, TransferAborted)
        # Over lanes an abort stops the bytes.
        if end == "close" or not connection.capabilities.remote_guards:
            assert (received == 5).all()
        assert settled(before) == before

    def test_a_forgotten_close_is_a_warning(self, peer: Peer) -> None:
        """Dropping an open connection warns, and frees everything."""
        peer.connect().close()
        before = residue_at_rest()
        with pytest.warns(ResourceWarning, match="unclosed"):
            open_and_forget(peer)
        assert settled(before) == before

    def test_a_forked_child_cannot_use_it_and_does_no_harm(self, peer: Peer, connection: Connection) -> None:
        """In a child every call raises ``StateError`` and close works; the parent goes on."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            with held(partial(read_beginning, peer, connection, np.zeros(64, np.uint8))) as read:  # a thread is inside
                pid = os.fork()
                if pid == 0:
                    os._exit(child_of_fork(connection))
            read.result()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        if not connection.capabilities.remote_guards:
            slot, generation = peer.guard()
            assert unchanged(connection, slot, generation)
        read_beginning(peer, connection, np.zeros(64, np.uint8))

    def test_repr_shows_the_state(self, peer: Peer, connection: Connection) -> None:
        read_beginning(peer, connection, np.zeros(64, np.uint8))
        assert repr(connection) == f"<{type(connection).__name__} open: 0 in use, 64 bytes read, 0 written>"
        connection.close()
        assert "closed" in repr(connection)


class ProcessConformance(TransportConformance):
    """Tests with a peer in another process, which can be killed. Provide :meth:`start`."""

    process: PeerProcess
    lost: ClassVar[tuple[type[LLMException], ...]] = (PeerLost,)
    """Errors of transfers after the peer's process was killed."""

    @staticmethod
    def start() -> PeerProcess:
        """Return a peer in its own process."""
        raise NotImplementedError

    @classmethod
    def setup_class(cls) -> None:
        cls.process = cls.start()

    @classmethod
    def teardown_class(cls) -> None:
        cls.process.close()

    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return self.process.serving(writable=writable)

    def test_a_killed_peer_is_lost(self) -> None:
        """Nothing is reported done; mapped memory stays readable."""
        data = np.arange(64, dtype=np.uint8)
        with self.start() as process, process.serving(writable=True), process.connect() as connection:
            mapped = connection.capabilities.shared_regions and not connection.capabilities.remote_guards
            remote = beginning_of(process, connection, 1, 64, writable=True)
            push(one_row(64), tensors_over(data), remote, Deadline(BUDGET_MS))
            read_beginning(process, connection, np.zeros(64, np.uint8))
            assert not connection.peer_ended()
            process.kill()
            text = None if connection.capabilities.remote_guards else f"process {process.pid} has ended"
            assert connection.peer_ended() or text is None
            received = np.zeros(64, np.uint8)
            with nullcontext() if mapped else pytest.raises(self.lost, match=text):
                pull(one_row(64), tensors_over(received), remote, Deadline(BUDGET_MS))
            assert np.array_equal(received, data if mapped else np.zeros(64, np.uint8))
            with pytest.raises(self.lost, match=text):
                push(one_row(64), tensors_over(data), remote, Deadline(BUDGET_MS))
            assert connection.usage()[:2] == (128 if mapped else 64, 64)


class ServedConformance(ProcessConformance):
    """Tests with an owner that takes part in every transfer, and checks its guards."""

    def test_the_owner_checks_its_guards(self, peer: Peer, connection: Connection) -> None:
        """An advanced guard fails the transfer, and nothing moves."""
        slot, generation = peer.guard()
        peer.hold(slot, generation)
        data = np.ones(64, np.uint8)
        remote = beginning_of(peer, connection, 1, 64, writable=True)
        push(one_row(64), tensors_over(data), remote, Deadline(BUDGET_MS))
        peer.advance(slot)
        for verb in (pull, push):
            with pytest.raises(TransferFailed, match="guard has changed"):
                verb(one_row(64), tensors_over(data * 2), remote, Deadline(BUDGET_MS))
        assert (peer.peek(1)[:64] == 1).all()

    def test_abort_wakes_a_transfer_that_waits(self) -> None:
        with self.start() as process, process.serving(writable=True), process.connect() as connection:
            remote, into = beginning_of(process, connection, 1, 64, writable=False), np.ones(64, np.uint8)
            os.kill(process.pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])

            def abort_once_it_is_used() -> None:
                Deadline(BUDGET_MS).poll(lambda: "1 in use" in repr(connection))
                connection.abort()

            aborter = threading.Thread(target=abort_once_it_is_used)
            aborter.start()
            try:
                with pytest.raises(TransferAborted):
                    pull(one_row(64), tensors_over(into), remote, Deadline(BUDGET_MS))
            finally:
                os.kill(process.pid, signal.SIGCONT)
                aborter.join()
