"""Finalizers of the user: the collector calls them at any line of the library, in any thread; they give things back."""

from __future__ import annotations

import secrets
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import llm_datadist
from llm_datadist import BlocksCacheKey, CacheKey, LLMDataDist, LLMRole, TransferWithCacheKeyConfig
from llm_datadist.errors import StateError
from tests.support.ends import LocalEnd
from tests.support.grants import LONG, grant, tell
from tests.support.layers import Always
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import Spec, make, wait_until
from tests.support.world import make_config, small_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from llm_datadist.types.grant import Grant
    from tests.support.kinds import ChildEnd, World

pytestmark = pytest.mark.covers("Cache.grant", "Grant: active revoke release")

_PACKAGE: Final = str(Path(llm_datadist.__file__).parent)
_CONTROL: Final = "llm-datadist-control"
_SERVED: Final = BlocksCacheKey(1, 0)
_HELD: Final = CacheKey(2, 77)
ROUNDS: Final = 30


class Things:
    """One of each thing that can be given back, and giving them back."""

    def __init__(self, world: World, there: ChildEnd) -> None:
        self._world = world
        self._there = there
        self._token = secrets.token_bytes(16)
        self.grant: Grant = world.caches["kv"].grant([0], LONG)
        there.do(grant, [1], LONG, "served", self._token)
        self.claimed = world.cm.claim_grant(1, self._token)
        self.keyed = world.cm.allocate_cache(Spec(tensors=1, rows=1).desc, [_HELD])
        self.blocks = world.cm.allocate_blocks_cache(Spec(tensors=1, blocks=True).desc)
        self.other: LLMDataDist | None = None

    def give_back(self) -> None:
        """What the ``__del__`` of a user does."""
        self.grant.revoke()
        self.claimed.release()
        self._world.cm.deallocate_blocks_cache(self.blocks)
        self._world.cm.deallocate_cache(self.keyed)
        self._world.cm.remove_cache_key(_HELD)
        if self.other is not None:
            self.other.finalize()

    def check_gone(self) -> None:
        assert not self.grant.active
        assert self.grant.end == "revoked"
        assert self.keyed.tensor_addrs == self.blocks.tensor_addrs == []
        assert self.other is None or self.other._engine is None
        wait_until(lambda: self._there.do(tell, self._token.hex(), "released"))


def another() -> LLMDataDist:
    """Return an end of this process, not linked."""
    other = LLMDataDist(LLMRole.PROMPT, 9)
    other.init(make_config(**small_pool()))
    return other


class AtLine:
    """Calls a function at the n-th line of the library that a call runs in this thread, as the collector might."""

    def __init__(self, wanted: int, function: Callable[[], None]) -> None:
        self._wanted = wanted
        self._function = function
        self.seen = 0

    def __call__(self, call: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(None)
        if self.seen < self._wanted:  # a call that waits has fewer lines at times
            self._function()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self._wanted:
                self._function()
        return self._trace


@dataclass
class Verb:
    call: Callable[[World, ChildEnd], Any]
    after: Callable[[World, ChildEnd, Any], object] = lambda world, there, result: None


def _send_layers(world: World, _: ChildEnd) -> None:
    config = TransferWithCacheKeyConfig(_SERVED, range(1), range(1))
    assert world.cm.transfer_cache_async(world.caches["kv"], Always(), [config], [0], [0]).synchronize() == SUCCESS[0]


VERBS: Final[dict[str, Verb]] = {
    "grant": Verb(lambda w, _: w.caches["kv"].grant([1], LONG), lambda w, _, grant: grant.revoke()),
    "allocate and bind": Verb(
        lambda w, _: w.cm.allocate_cache(Spec(rows=2).desc, [CacheKey(2, 1), CacheKey(2, 2)]),
        lambda w, _, cache: _forget(w, cache),
    ),
    "register": Verb(
        lambda w, _: w.cm.register_blocks_cache(w.caches["kv"].cache_desc, list(w.caches["kv"].tensor_addrs)),
        lambda w, _, cache: w.cm.unregister_cache(cache.cache_id),
    ),
    "deallocate": Verb(lambda w, _: w.cm.deallocate_cache(w.cm.allocate_cache(Spec(rows=2).desc))),
    "revoke": Verb(lambda w, _: w.caches["kv"].grant([1], LONG).revoke()),
    "pull_blocks": Verb(lambda w, _: w.cm.pull_blocks(_SERVED, w.caches["kv"], [0], [0])),
    "push_blocks": Verb(lambda w, _: w.cm.push_blocks(_SERVED, w.caches["kv"], [0], [0])),
    "copy_blocks": Verb(lambda w, _: w.cm.copy_blocks(w.caches["kv"], {0: [1]})),
    "transfer_cache_async": Verb(_send_layers),
    "statistics": Verb(lambda w, _: (w.dd.statistics(), repr(w.dd))),
}


def _forget(world: World, cache: Any) -> None:
    world.cm.deallocate_cache(cache)
    for request in (1, 2):
        world.cm.remove_cache_key(CacheKey(2, request))


@pytest.fixture
def ends(children: tuple[ChildEnd, ChildEnd]) -> Iterator[tuple[LocalEnd, ChildEnd]]:
    here, there = LocalEnd("here"), children[0]
    try:
        for end, role, cluster_id in ((there, "PROMPT", 1), (here, "DECODER", 2)):
            end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
        there.do(make, "served", Spec(tensors=2, blocks=True, blocks_key=_SERVED), 3)
        here.do(make, "kv", Spec(tensors=2, blocks=True), 5)
        assert here.do(link, [info(1, there.port)]) == SUCCESS
        yield here, there
    finally:
        here.stop()
        there.stop()


@pytest.mark.parametrize("name", VERBS)
def test_what_a_finalizer_gives_back_at_any_line_is_gone_after_it(ends: tuple[LocalEnd, ChildEnd], name: str) -> None:
    (here, there), verb = ends, VERBS[name]
    world = here.world
    counted = AtLine(0, lambda: None)

    def once(at: AtLine) -> None:
        results: list[Any] = []
        at(lambda: results.append(verb.call(world, there)))
        verb.after(world, there, results[0])

    once(counted)
    once(counted := AtLine(0, lambda: None))  # the second time: more is kept
    used = [pool.used_bytes for pool in world.dd.statistics().pools]
    for point in range(1, counted.seen + 1):
        things = Things(world, there)
        things.other = another() if point % 8 == 0 else None
        once(AtLine(point, things.give_back))
        things.check_gone()
        world.dd.check_integrity()
    assert [pool.used_bytes for pool in world.dd.statistics().pools] == used
    assert counted.seen > 20


@pytest.mark.parametrize("call", ["init", "finalize"])
def test_what_a_finalizer_gives_back_in_init_and_finalize_is_gone(ends: tuple[LocalEnd, ChildEnd], call: str) -> None:
    (here, there), made, options = ends, another(), make_config(**small_pool())

    def once(at: AtLine) -> None:
        if call == "finalize":
            made.init(options)
            at(made.finalize)
        else:
            at(lambda: made.init(options))

    made.finalize()
    once(counted := AtLine(0, lambda: None))
    made.finalize()
    for point in range(1, counted.seen + 1, 11):
        things = Things(here.world, there)
        things.other = made
        once(AtLine(point, things.give_back))
        things.check_gone()


def test_inside_of_another_call_a_revoke_is_put_off_and_what_returns_a_promise_is_refused(end: LocalEnd) -> None:
    end.start("PROMPT", 1)
    make(end.world, "kv", Spec(blocks=True), 1)
    cache, seen = end.world.caches["kv"], []
    grant = cache.grant([0], LONG)

    def revoke() -> None:
        grant.revoke()
        seen.append(grant.active)

    AtLine(5, revoke)(lambda: cache.grant([1], LONG))
    assert seen == [True]
    assert grant.end == "revoked"
    refused: dict[str, Any] = {
        "unregister_cache": lambda: end.world.cm.unregister_cache(7),
        "unlink_clusters": lambda: end.world.dd.unlink_clusters([info(1, 1)], 100),
        "unlink": lambda: end.world.dd.unlink(7),
    }
    for name, call in refused.items():
        texts: list[str] = []

        def attempt(call: Callable[[], object] = call, texts: list[str] = texts) -> None:
            with pytest.raises(StateError) as caught:
                call()
            texts.append(str(caught.value))

        AtLine(5, attempt)(lambda: cache.grant([1], LONG))
        assert texts == [
            f"{name}: called by a finalizer or a callback inside of another call of this library: it would have to "
            "wait for that; call it after that one, or from another thread"
        ]


class InControlThread:
    """Calls functions in the control thread, each at a line of the library further on, as the collector might."""

    def __init__(self) -> None:
        self.functions: list[Callable[[], None]] = []
        self.done = 0
        self._skip = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if threading.current_thread().name != _CONTROL or not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line" and self.functions:
            self._skip -= 1
            if self._skip < 0:
                self.done += 1
                self._skip = 7 * self.done
                self.functions.pop()()
        return self


def test_what_a_finalizer_gives_back_in_the_control_thread_is_gone_soon(children: tuple[ChildEnd, ChildEnd]) -> None:
    trace, errors = InControlThread(), []
    threading.settrace(trace)
    here, there = LocalEnd("here"), children[0]
    try:
        for end, role, cluster_id in ((there, "PROMPT", 1), (here, "DECODER", 2)):
            end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
        threading.settrace(None)
        there.do(make, "served", Spec(tensors=2, blocks=True, blocks_key=_SERVED), 3)
        here.do(make, "kv", Spec(tensors=2, blocks=True, blocks_key=BlocksCacheKey(2, 0)), 5)
        assert here.do(link, [info(1, there.port)]) == SUCCESS

        def finalize() -> None:
            with pytest.raises(StateError, match="control thread") as caught:
                here.world.dd.finalize()
            errors.append(caught.value)

        for _ in range(ROUNDS):
            things = Things(here.world, there)
            trace.functions = [finalize, things.give_back]
            while trace.functions:
                token = here.world.caches["kv"].grant([1], LONG).token
                there.do(_claim_and_release, token)
            wait_until(lambda things=things: not things.grant.active)  # type: ignore[misc]
            wait_until(lambda things=things: not things.keyed.tensor_addrs)  # type: ignore[misc]
            things.check_gone()
        assert len(errors) == ROUNDS
        here.world.dd.check_integrity()
    finally:
        threading.settrace(None)
        trace.functions = []
        here.stop()
        there.stop()


def _claim_and_release(world: World, token: bytes) -> None:
    world.cm.claim_grant(2, token).release()
