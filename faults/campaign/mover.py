"""A thread of a worker that pulls, pushes and copies, and judges every byte of what it pulled into after each call."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np

import llm_datadist as dist
from faults.campaign.interrupted import Awaiting, Linker
from faults.campaign.journal import Cancelled, Interrupted, Scene
from faults.campaign.memory import Destination, Found, Kind, Stamp, Words, close_all, difference, pattern, stamp_of
from faults.campaign.producer import blocks_key, prefix_of, pusher_of, request_of
from faults.campaign.schedule import MOVERS
from llm_datadist.cache_manager import CacheManager
from llm_datadist.errors import CacheNotFound, ChecksumMismatch, LLMException
from llm_datadist.types.grant import Grant
from tests.support.layers import Always
from tests.support.probe import Probe

_OWN_SLOT = 40  # and 44 for what is written anew, see Destination
_SOURCE_SLOT = 48
#: How many of the calls, out of those that could, go where something was a while ago.
_OLD = 0.25
_REMEMBERED = 24
#: Of one transfer: each has ``sync_kv_timeout`` for itself.
LAYERS: Final = 2
_SLACK_SECONDS: Final = 15.0


@dataclass(frozen=True)
class _Own:
    blocks: Destination
    rows: Destination
    host: Destination
    letters: Destination
    long_letters: Destination


@dataclass(frozen=True)
class _Into:
    dst: Destination
    tensors: Sequence[int]
    rows: Sequence[int]


class Mover:
    """One thread, with destinations of its own. ``number`` counts the movers of its worker."""

    def __init__(self, scene: Scene, rng: Random, number: int) -> None:
        self._scene, self._rng, self._number = scene, rng, number
        self._peers = scene.epoch.peers(scene.worker)
        self._turn = 0
        self._remembered: deque[Found] = deque(maxlen=_REMEMBERED)
        #: (worker, life, slot, generation, row) of keys pulled whole -> the link over which they went.
        self._consumed: dict[tuple[int, ...], Any] = {}
        #: What an earlier life of this worker may have pulled before it was killed: nobody is left who knows.
        self._inherited = scene.directory.generations()
        self._own: _Own | None = None
        self._jobs = [job for job in self._all_jobs() if job[0]]
        self._awaiting: Awaiting | None = None  # the main thread has none

    def run(self) -> None:
        scene, self._awaiting = self._scene, Awaiting(self._rng)
        while not scene.stop.is_set():
            self.step()
            if self._rng.random() < 0.3:
                scene.stop.wait(self._rng.choice((0.0, 0.001, 0.01)))
        self._awaiting.close()

    def step(self) -> None:
        if self._scene.resting:
            self._scene.stop.wait(0.01)
            return
        if self._own is None:
            self._own = self._made()
        if self._own is None:
            self._scene.stop.wait(0.05)
            return
        _, job, kinds = self._rng.choices(self._jobs, [weight for weight, *_ in self._jobs])[0]
        if not kinds:
            job(self._own)
        elif (found := self._pick(*kinds)) is not None:
            job(self._own, found)

    def _all_jobs(self) -> list[tuple[int, Callable[..., object], tuple[Kind, ...]]]:
        """Return what there is to do: its weight, and of which caches of a peer it needs one."""
        rca, harmed = self._scene.epoch.rca, self._scene.epoch.harmed
        return [
            (8, self._pull_blocks, (Kind.BLOCKS, Kind.REBOUND)),
            (4, self._pull_row, (Kind.ROWS,)),
            (3, self._copy_inside, ()),
            (1, self._begin_anew, ()),
            (2, self._pull_granted, (Kind.GRANTED,)),
            (2, lambda own: _drop(self._scene, own.blocks.cache), ()),
            (6 * rca, self._push_blocks, (Kind.INBOX,)),
            (4 * rca, self._push_row, (Kind.INROWS,)),
            (8 * (not rca), self._pull_keyed, (Kind.KEYED,)),
            (3 * (not rca), self._pull_prefix, (Kind.PREFIX,)),
            # An address that is changed on its way is written to: nothing between two ends can find that out.
            (2 * (not harmed), self._send, ()),
        ]

    def free(self) -> bool:
        own, self._own = self._own, None
        return own is None or close_all([own.blocks, own.rows, own.host, own.letters, own.long_letters])

    # --- destinations ----------------------------------------------------------------------------------------------

    def _made(self) -> _Own | None:
        scene, shape = self._scene, self._scene.epoch.shape
        self._turn += 1
        made: list[Destination] = []
        try:
            for index, long in enumerate((False, True, False, False, True)):
                host = index == 2
                kind = "allocated" if host else self._rng.choice(("allocated", "inside", "private"))
                placement = dist.Placement.HOST if host else dist.Placement.DEVICE
                stamp = Stamp(scene.worker, scene.life, _OWN_SLOT + self._number, 8 * self._turn + index)
                each = shape.long if long else shape
                made.append(Destination(scene, each, stamp, kind, long=long, placement=placement))
        except LLMException:
            close_all(made)
            return None
        return _Own(*made)

    def _begin_anew(self, own: _Own) -> None:
        if self._rng.random() < 0.3 and not self.free():
            self._scene.journal.note("destinations kept by others")

    def _pick(self, *kinds: Kind) -> Found | None:
        """Return a cache of a peer, at times one that has ended: who knows where it was must not get there."""
        old = [found for found in self._remembered if found.kind in kinds]
        if old and self._rng.random() < _OLD:
            return self._rng.choice(old)
        found = self._scene.directory.pick(self._rng, self._peers, *kinds)
        if found is not None:
            self._remembered.append(found)
        return found

    def _copy_inside(self, own: _Own) -> None:
        scene, rng = self._scene, self._rng
        what = rng.choice(("copy_blocks", "swap_blocks", "copy_cache"))
        source = target = own.rows if what == "copy_cache" else own.blocks
        if what == "swap_blocks":
            source, target = rng.sample((own.blocks, own.host), 2)
            from_, to = (rng.sample(range(each.shape.rows), 3) for each in (source, target))
            pairs = dict(zip(from_, to, strict=True))
            outcome = scene.call(what, 0.0, scene.cm.swap_blocks, source.cache, target.cache, pairs)
        elif what == "copy_blocks":
            one, *to = rng.sample(range(source.shape.rows), 3)
            from_ = [one, one]
            outcome = scene.call(what, scene.budget, scene.cm.copy_blocks, source.cache, {one: to})
        else:
            row, *to = rng.sample(range(source.shape.rows), 2)
            from_ = [row]
            outcome = scene.call(what, scene.budget, scene.cm.copy_cache, source.cache, source.cache, to[0], row)
        new = source.expected[:, from_] if outcome is None else None
        target.settle(what, range(target.shape.tensors), to, new)

    # --- pulls -----------------------------------------------------------------------------------------------------

    def _pull_blocks(self, own: _Own, found: Found) -> None:
        count = self._rng.choice((1, 2, 5, found.shape.rows))
        sources = self._rng.sample(range(found.shape.rows), count)
        targets = self._rng.sample(range(found.shape.rows), count)
        from_, to, ranges = self._layers(found.shape.tensors)
        call = partial(self._scene.cm.pull_blocks, blocks_key(found), own.blocks.cache, sources, targets, **ranges)
        wanted = partial(pattern, tensors=from_, rows=sources, words=found.shape.words)
        self._pull("pull_blocks", call, found, _Into(own.blocks, to, targets), wanted)

    def _pull_granted(self, own: _Own, found: Found) -> None:
        if not found.extra:
            return
        rows = self._rng.sample(range(found.shape.rows), self._rng.choice((1, 2, 5)))
        tensors, grant = range(found.shape.tensors), Grant.from_bytes(found.extra)
        call = partial(self._scene.cm.pull_blocks, blocks_key(found), own.blocks.cache, rows, rows, grant=grant)
        wanted = partial(pattern, tensors=tensors, rows=rows, words=found.shape.words)
        self._pull("pull_blocks granted", call, found, _Into(own.blocks, tensors, rows), wanted)

    def _layers(self, tensors: int) -> tuple[range, range, dict[str, Any]]:
        """Return tensors there, tensors here, and the layer ranges that say so."""
        layers = tensors // 2
        if self._rng.random() < 0.7:
            return range(tensors), range(tensors), {}
        count = self._rng.randint(1, layers)
        there, here = self._rng.randint(0, layers - count), self._rng.randint(0, layers - count)
        src, dst = range(there, there + count), range(here, here + count)
        ranges = {"src_layer_range": src, "dst_layer_range": dst}
        return range(2 * there, 2 * src.stop), range(2 * here, 2 * dst.stop), ranges

    def _pull_row(self, own: _Own, found: Found) -> None:
        row = self._rng.randrange(found.shape.rows)
        self._row(own, found, dist.CacheKeyByIdAndIndex(found.cluster_id, found.cache_id, row), row)

    def _row(self, own: _Own, found: Found, key: Any, row: int) -> Any:
        tensors = range(found.shape.tensors)
        wanted = partial(pattern, tensors=tensors, rows=(row,), words=found.shape.words)
        if self._rng.random() < 0.5:
            target = self._rng.randrange(found.shape.rows)
            call = partial(self._scene.cm.pull_cache, key, own.rows.cache, target)
            return self._pull("pull_cache", call, found, _Into(own.rows, tensors, (target,)), wanted)
        pieces = found.shape.words // own.blocks.shape.words
        targets = self._rng.sample(range(own.blocks.shape.rows), pieces)
        call = partial(self._scene.cm.pull_blocks, key, own.blocks.cache, [], targets)

        def in_pieces(stamp: Stamp) -> Words:
            return wanted(stamp).reshape(len(tensors), pieces, -1)

        return self._pull("pull_blocks of a row", call, found, _Into(own.blocks, tensors, targets), in_pieces)

    def _pull(self, what: str, call: partial[Any], found: Found, into: _Into, wanted: Callable[[Stamp], Words]) -> Any:
        """Pull and judge every byte; return what came of it. ``wanted``: what a cache of that stamp brings."""
        scene, dst, tensors, rows = self._scene, into.dst, into.tensors, into.rows
        started = time.monotonic_ns()
        outcome = self._call(what, call)
        self._judge_error(what, outcome)
        about = f"{what} of {found} into tensors {list(tensors)} rows {list(rows)}"
        if outcome is None and scene.directory.life(found.worker) == found.incarnation:
            first = int(dst.views[tensors[0]][rows[0], 0])
            generation = self._generation(found, first)
            if dst.settle(about, tensors, rows, wanted(found.at(generation))):
                self._judge_time(about, found, generation, started)
        else:
            if outcome is None:
                scene.journal.note("pulls around a kill, judged outside only")
            dst.settle(about, tensors, rows, None)
        return outcome

    def _call(self, what: str, call: partial[Any]) -> Any:
        form = (what, call) if self._awaiting is None else self._awaiting.form(what, call)
        return self._scene.call(form[0], self._scene.budget, form[1])

    def _generation(self, found: Found, word: int) -> int:
        """Return which generation was pulled, as far as it may be."""
        stamp = stamp_of(word)
        newest = self._scene.directory.newest(found) + 1
        fits = found.kind is Kind.REBOUND and found.generation <= stamp.generation <= newest
        return stamp.generation if fits and found.at(stamp.generation).base == stamp.base else found.generation

    def _judge_time(self, about: str, found: Found, generation: int, started: int) -> None:
        ended = self._scene.directory.moment(found, generation, "ended")
        if ended and ended < started:
            text = f"{about}: generation {generation} had ended {(started - ended) / 1e6:.1f} ms before"
            self._scene.journal.violation("wrong bytes", text)

    def _judge_error(self, what: str, outcome: Any) -> None:
        if isinstance(outcome, ChecksumMismatch):
            if self._scene.epoch.harmed:
                self._scene.journal.note("harm found by checksums")
            else:
                self._scene.journal.violation("false mismatches", f"{what}: {outcome}")

    # --- keys, each consumed once ----------------------------------------------------------------------------------

    def _pull_keyed(self, own: _Own, found: Found) -> None:
        """Each row of a keyed cache belongs to one mover, so that a second success is one too many."""
        takers = MOVERS * len(self._scene.epoch.peers(found.worker))
        me = self._taker(found.worker)
        mine = [row for row in range(found.shape.rows) if (row + found.generation) % takers == me]
        if not mine:
            return
        row = self._rng.choice(mine)
        identity = (found.worker, found.incarnation, found.slot, found.generation, row)
        link = self._link(found)
        by_id = self._rng.random() < 0.2
        key = dist.CacheKeyByIdAndIndex(found.cluster_id, found.cache_id, row) if by_id else request_of(found, row)
        outcome, journal = self._row(own, found, key, row), self._scene.journal
        known = identity in self._consumed
        lost = isinstance(outcome, CacheNotFound) and not known and identity[:4] not in self._inherited
        if outcome is None:
            stable = link is not None and self._link(found) is link
            # By its id a row can be pulled for as long as there is the cache.
            if known and not by_id and stable and self._consumed[identity] is link:
                journal.violation("keys", f"{identity} was pulled whole twice over one link {link!r}")
            self._consumed[identity] = link if stable else None
        elif isinstance(outcome, (Interrupted, Cancelled)):
            self._consumed.setdefault(identity, None)  # it may have been about to return
        elif lost and self._should_be_there(found):
            journal.violation("keys", f"{identity} has gone, and nobody pulled or removed it: {outcome}")

    def _pull_prefix(self, own: _Own, found: Found) -> None:
        row = self._rng.randrange(found.shape.rows)
        outcome = self._row(own, found, prefix_of(found, row), row)
        if isinstance(outcome, CacheNotFound) and self._should_be_there(found):
            self._scene.journal.violation("keys", f"prefix key {row} of {found} has gone: {outcome}")

    def _should_be_there(self, found: Found) -> bool:
        directory = self._scene.directory
        there = directory.life(found.worker) == found.incarnation and directory.newest(found) == found.generation
        return there and not directory.moment(found, found.generation, "ending") and not self._scene.epoch.harmed

    def _taker(self, owner: int) -> int:
        return self._scene.epoch.peers(owner).index(self._scene.worker) * MOVERS + self._number

    def _link(self, found: Found) -> Any:
        with suppress(LLMException):
            return Probe(self._scene.dd).link(found.cluster_id)
        return None

    # --- pushes ----------------------------------------------------------------------------------------------------

    def _push_blocks(self, own: _Own, found: Found) -> None:
        stamp, letters = self._letter(own.letters), own.letters
        rows = self._own_rows(found)
        sources = self._rng.sample(range(letters.shape.rows), len(rows))
        from_, to, ranges = self._layers(found.shape.tensors)
        key: Any = blocks_key(found)
        if self._rng.random() < 0.3:
            key = dist.CacheKeyByIdAndIndex(found.cluster_id, found.cache_id, 0)
        call = partial(self._scene.cm.push_blocks, key, letters.cache, sources, rows, **ranges)
        if self._push("push_blocks", call, found, letters):
            back = self._rng.sample(range(own.blocks.shape.rows), len(rows))
            wanted = pattern(stamp, from_, sources, found.shape.words)
            self._look_at_letters(found, _Into(own.blocks, to, back), rows, wanted)

    def _send(self, own: _Own) -> None:
        kind = Kind.INBOX if self._scene.epoch.rca else Kind.MAILBOX
        # Never where something was: an address says nothing of whose memory it is now.
        found = self._scene.directory.pick(self._rng, self._peers, kind)
        if found is None:
            return
        stamp, rows = self._letter(own.letters), self._own_rows(found)
        sources = self._rng.sample(range(own.letters.shape.rows), len(rows))
        first = self._rng.randrange(found.shape.tensors // 2)
        layers = range(first, min(first + LAYERS, found.shape.tensors // 2))
        call = partial(_send, self._scene, found, own.letters, sources, rows, layers)
        if self._push("transfer_cache_async", call, found, own.letters):
            back = self._rng.sample(range(own.blocks.shape.rows), len(rows))
            tensors = range(2 * layers.start, 2 * layers.stop)
            wanted = pattern(stamp, tensors, sources, found.shape.words)
            self._look_at_letters(found, _Into(own.blocks, tensors, back), rows, wanted)

    def _look_at_letters(self, found: Found, into: _Into, rows: list[int], wanted: Words) -> None:
        """Pull back what was pushed, and layers that were not: these may hold anything."""
        scene, dst, back = self._scene, into.dst, into.rows
        started = time.monotonic_ns()
        pull = partial(scene.cm.pull_blocks, blocks_key(found), dst.cache, rows, list(back))
        outcome = scene.call("pull_blocks back", scene.budget, pull)
        self._judge_error("pull_blocks back", outcome)
        everything = range(found.shape.tensors)
        found_now = [view[list(back)].copy() for view in dst.views]
        dst.settle(f"pull back of {found} into rows {back}", everything, back, None)
        if outcome is not None or scene.directory.life(found.worker) != found.incarnation:
            return
        self._judge_time("pull back", found, found.generation, started)
        for place, tensor in enumerate(into.tensors):
            if not (found_now[tensor] == wanted[place]).all():
                text = difference(found_now[tensor][None], wanted[place][None])
                scene.journal.violation("wrong bytes", f"pushed into {found} tensor {tensor} rows {rows}: {text}")
                return
        scene.journal.verified(wanted.nbytes)

    def _push_row(self, own: _Own, found: Found) -> None:
        letters, stamp = own.long_letters, self._letter(own.long_letters)
        row, source = self._rng.choice(self._own_rows(found)), self._rng.randrange(letters.shape.rows)
        key = dist.CacheKeyByIdAndIndex(found.cluster_id, found.cache_id, row)
        call = partial(self._scene.cm.push_cache, key, letters.cache, source)
        if self._push("push_cache", call, found, letters):
            back = self._rng.randrange(own.rows.shape.rows)
            tensors = range(found.shape.tensors)
            pull = partial(self._scene.cm.pull_cache, key, own.rows.cache, back)
            wanted = pattern(stamp, tensors, (source,), found.shape.words)
            self._pull("pull_cache back", pull, found, _Into(own.rows, tensors, (back,)), lambda _: wanted)

    def _letter(self, letters: Destination) -> Stamp:
        self._turn += 1
        stamp = Stamp(self._scene.worker, self._scene.life, _SOURCE_SLOT + self._number, self._turn % (1 << 20))
        letters.fill(stamp)
        return stamp

    def _own_rows(self, found: Found) -> list[int]:
        pushers = MOVERS * len(self._scene.epoch.peers(found.worker))
        me = self._taker(found.worker)
        return [row for row in range(found.shape.rows) if pusher_of(row, found.generation, pushers) == me]

    def _push(self, what: str, call: partial[Any], found: Found, letters: Destination) -> bool:
        scene = self._scene
        started = time.monotonic_ns()
        outcome = self._call(what, call)
        self._judge_error(what, outcome)
        letters.settle(f"{what}: its source", (), (), None)
        if outcome is not None or scene.directory.life(found.worker) != found.incarnation:
            return False
        self._judge_time(f"{what} into {found}", found, found.generation, started)
        return not scene.directory.moment(found, found.generation, "ending")


def _send(scene: Scene, found: Found, letters: Destination, sources: list[int], rows: list[int], layers: range) -> None:
    """Send layers, and wait until the transfer has ended; raise what came of it."""
    config: Any
    if scene.epoch.rca:
        config = dist.TransferWithCacheKeyConfig(blocks_key(found), layers, layers)
    else:
        addresses = np.frombuffer(found.extra, "<u8")[2 * layers.start : 2 * layers.stop]
        config = dist.TransferConfig(found.cluster_id, addresses.tolist(), layers)
    task = scene.cm.transfer_cache_async(letters.cache, Always(), [config], sources, rows)
    # Nothing of it may go on: what is sent is written anew afterwards.
    code = task.synchronize(int((LAYERS * scene.budget + _SLACK_SECONDS) * 1e3))
    if code is not dist.LLMStatusCode.LLM_SUCCESS:
        raise task.errors[0] or LLMException("a transfer that failed has no error", status_code=code)


class _Litter:
    """A grant and a cache, in a cycle, so that the collector frees them."""

    def __init__(self, cm: CacheManager, grant: Grant, cache: dist.Cache) -> None:
        self._me = self
        self._cm, self._grant, self._cache = cm, grant, cache

    def __del__(self) -> None:
        with suppress(LLMException):  # finalized before
            self._grant.revoke()
            self._cm.deallocate_blocks_cache(self._cache)


def _drop(scene: Scene, granted: dist.Cache) -> None:
    grant = scene.call("grant", 0.0, granted.grant, [0], 60.0)
    if isinstance(grant, BaseException):
        return
    desc = dist.CacheDesc(1, [1, 64], dist.DataType.DT_INT8)
    cache = scene.call("allocate", scene.budget, scene.cm.allocate_blocks_cache, desc)
    if isinstance(cache, BaseException):
        grant.revoke()
        return
    _Litter(scene.cm, grant, cache)
    scene.journal.note("left to finalizers")


class Roamer:
    """What the main thread does: it moves bytes, links and unlinks."""

    def __init__(self, mover: Mover, linker: Linker, rng: Random) -> None:
        self.mover, self._linker, self._rng = mover, linker, rng

    def run(self, seconds: float, stop: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not stop():
            if self._rng.random() < 0.02:
                self._linker.look_after(self._linker.any_peer())
            self.mover.step()
