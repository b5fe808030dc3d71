"""A forked child and the objects of its parent: each public class refuses there, or is plain values."""

import ast
import dataclasses
import enum
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any, Final

import msgspec
import pytest

import llm_datadist
from llm_datadist import (
    CacheDesc,
    DataType,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    NotInitialized,
    TransferConfig,
    cpp_api,
    store,
)
from llm_datadist._memory.device import HostDevice
from llm_datadist._native.public_call import OfProcess, PublicCall
from llm_datadist.cache_manager import CacheManager
from llm_datadist.store import Hit, StoreClient, StoreOptions, StoreServer
from llm_datadist.types.grant import Grant
from llm_datadist.types.question import PeerQuestion
from tests.support.ends import Call, ChildEnd
from tests.support.grants import in_child
from tests.support.kinds import World
from tests.support.layers import Always
from tests.support.linking import SUCCESS, info
from tests.support.moves import wait_until
from tests.support.world import make_config, small_pool

pytestmark = pytest.mark.covers("store.*", "PeerQuestion: answer refuse", "Grant", "CacheTask")

#: Classes that a child may use, and why.
PLAIN: Final = {
    "LLMDataDist": "a child may init it; before, its calls are NotInitialized",
    "LlmDataDist": "as LLMDataDist",
    "LLMConfig": "options",
    "LLMClusterInfo": "addresses",
    "CacheDesc": "a geometry",
    "Tensor": "an array",
    "TensorDesc": "a geometry",
    "KvCache": "a geometry and addresses; the manager refuses",
    "Hit": "a copy, of which a release has no effect",
    "LayerSynchronizer": "of the user",
    "TransferConfig": "a destination",
    "TransferWithCacheKeyConfig": "a destination",
    "Status": "a status",
    "PeerLink": "its calls are those of its LLMDataDist",
}
_WITH: Final = ("__exit__",)
#: Members of other classes that read values, and why the last does not need a check.
VALUES: Final = {
    *(f"Grant.{name}" for name in ("blocks", "to_bytes")),
    "PeerQuestion.answer_by",  # runs the user's function, then answers by answer or refuse
    *(f"{kind}.{name}" for kind in ("StoreClient", "StoreServer") for name in _WITH),  # the end of the block closes
}
ROUNDS: Final = 12


def is_value(kind: type) -> bool:
    """Return True for classes without state of their own."""
    kinds = (BaseException, enum.Enum, msgspec.Struct, tuple)
    return issubclass(kind, kinds) or dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False)


def calls_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods and properties that users may call on an object."""
    for base in kind.__mro__:
        for name, member in vars(base).items() if base.__module__.startswith("llm_datadist") else ():
            if (name[0] != "_" or name in _WITH) and isinstance(member, (FunctionType, property, PublicCall)):
                yield name, member


def met() -> set[type]:
    """Return the public classes, and those that annotations of their calls name."""
    every: dict[str, set[type]] = {}
    for each in _subclasses(object):
        if each.__module__.startswith("llm_datadist"):
            every.setdefault(each.__name__, set()).add(each)
    roots = [*(getattr(m, name) for m in (llm_datadist, store, cpp_api) for name in m.__all__), CacheManager, Grant]
    found: set[type] = set()
    new = {each for each in roots if isinstance(each, type) and each.__module__.startswith("llm_datadist")}
    while new:
        found |= new
        said = " ".join(_annotations(each) for each in new)
        new = {each for word in re.findall(r"\w+", said) for each in every.get(word, ())} - found
    return {each for each in found if each.__name__[0] != "_"}


def _annotations(kind: type) -> str:
    functions = (member.fget if isinstance(member, property) else member for _, member in calls_of(kind))
    return " ".join(str(each) for function in functions for each in function.__annotations__.values())


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in type.__subclasses__(kind):
        yield each
        if each is not type:
            yield from _subclasses(each)


def test_each_public_class_refuses_in_a_forked_child_or_is_a_value() -> None:
    kinds = {each for each in met() if not is_value(each)}
    assert {"PeerQuestion", "CacheTask", "StoreServer", "Cache"} <= {each.__name__ for each in kinds}
    owned = {each for each in kinds if issubclass(each, OfProcess)}
    assert {each.__name__ for each in kinds - owned} == PLAIN.keys()
    bare = {
        f"{kind.__name__}.{name}"
        for kind in owned
        for name, member in calls_of(kind)
        if getattr(member.fget if isinstance(member, property) else member, "owned", False) is False
    }
    assert bare == VALUES


# --- the same, by forks -----------------------------------------------------------------------------------------------
def build(world: World) -> None:
    """Make one object of each class; threads use their instances until :func:`end`."""
    pool, desc = small_pool(4), CacheDesc(2, [16, 1024], DataType.DT_INT8)
    server, old, other = (
        StoreServer(1 << 20, cluster_id=9),
        LLMDataDist(LLMRole.DECODER, 3),
        LLMDataDist(LLMRole.MIX, 2),
    )
    world.start("MIX", 1, make_config(listen_ip_info="127.0.0.1:0", **pool), None)
    other.init(make_config(**pool))
    old.init(make_config(enable_cache_manager=False))
    assert other.link_clusters([info(1, world.dd.listen_port)]) == SUCCESS
    cache, theirs = world.cm.allocate_blocks_cache(desc), other.cache_manager.allocate_blocks_cache(desc)
    client = StoreClient(world.dd, f"127.0.0.1:{server.port}", bytes(32), StoreOptions(store_id=9, lookup_ms=5000))
    assert client.connect(20)
    assert client.save([b"key"], cache, [0]) == 1
    kept: list[PeerQuestion] = []
    world.dd.answer_questions("keep", kept.append)
    world.dd.answer_questions("echo", lambda question: question.body)
    asking = Call(other.ask, 1, "keep", b"", 60_000)
    wait_until(lambda: bool(kept))
    config = TransferConfig(2, theirs.tensor_addrs, range(1))
    task = world.cm.transfer_cache_async(cache, Always(), [config])
    claimed = world.cm.claim_grant(2, theirs.grant([3], 600).token)
    objects = [server, client, *kept, cache, cache.grant([1], 600), claimed, world.cm, old.kv_cache_manager, task]
    stop = threading.Event()
    world.memory |= {"objects": objects, "others": (other, old), "asking": asking, "stop": stop, "hit": None}

    def busy(number: int) -> None:
        while not stop.is_set():
            assert other.ask(1, "echo", b"body", 20_000) == b"body"
            client.release(client.lookup([b"key"]))
            client.save([b"%d" % number], cache, [number])
            server.statistics()
            cache.grant([number], 600).revoke()

    world.memory["busy"] = [Call(busy, number) for number in range(1, 4)]


def refusals(world: World) -> dict[str, set[str]]:
    """Call everything that the classes of :func:`build` have, each time in a new child; return what came of it."""
    found: dict[str, set[str]] = {}
    for _ in range(ROUNDS):
        for each in world.memory["objects"]:
            kind, text = in_child(world, lambda _, each=each: try_all(each))  # type: ignore[misc]
            assert kind == "returned", text
            for name, outcome in ast.literal_eval(text).items():
                found.setdefault(name, set()).add(outcome.replace(str(os.getpid()), "PID"))
    return found


def try_all(each: object) -> dict[str, str]:
    """Make each call without arguments, which are looked at later; a call that hangs ends the child."""
    signal.alarm(20)
    kind, outcome = type(each), {}
    for name, _ in calls_of(kind):
        try:
            said = getattr(each, name)
            outcome[f"{kind.__name__}.{name}"] = f"returned {said() if callable(said) else said!r}"
        except Exception as error:  # noqa: BLE001 (it is judged by the test)
            outcome[f"{kind.__name__}.{name}"] = f"{type(error).__name__}: {error}"
    return outcome


def end(world: World) -> tuple[bytes, int]:
    """Stop the threads; return the peer's answer, and how many keys the store finds."""
    world.memory["stop"].set()
    for each in world.memory["busy"]:
        each.result()
    server, client, question = world.memory["objects"][:3]
    question.answer(b"of the parent")
    answer, found = world.memory["asking"].result(), len(client.lookup([b"key"]))
    client.close()
    for each in world.memory["others"]:
        each.finalize()
    server.check_integrity()
    server.close()
    world.memory.clear()
    return answer, found


@pytest.fixture
def forker() -> Iterator[ChildEnd]:
    child = ChildEnd("forker")
    yield child
    child.kill()


def test_each_call_is_refused_in_a_child_forked_while_threads_of_the_parent_send(forker: ChildEnd) -> None:
    forker.do(build)
    found = forker.do(refusals)
    wrong = {name: said for name, said in found.items() if name not in VALUES and said != {refused(name)}}
    assert wrong == {}
    for kind in ("StoreClient", "StoreServer"):
        assert found[f"{kind}.__exit__"] == {refused(f"{kind}.close")}
    owned = {each for each in met() if issubclass(each, OfProcess) and not is_value(each)} - {OfProcess}
    assert {name.partition(".")[0] for name in found} == {each.__name__ for each in owned}
    assert forker.do(end) == (b"of the parent", 1)


def refused(name: str) -> str:
    kind, _, call = name.partition(".")
    return f"StateError: {call}: {kind}: it belongs to process PID, of which this one is a fork; call it there"


def test_a_hit_of_the_parent_is_a_copy_in_a_child(forker: ChildEnd) -> None:
    assert forker.do(taken) == [("returned", "(False, 0)"), True]


def taken(world: World) -> list[object]:
    hit = Hit(bytes(32), held=True)
    return [in_child(world, lambda _: (hit.take(), len(Hit.from_bytes(hit.to_bytes())))), hit.take()]


class Waiting(HostDevice):
    """A device that stops ``init`` in this process, until it may go on."""

    def __init__(self) -> None:
        self.pid, self.waits, self.may = os.getpid(), threading.Event(), threading.Event()

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() == self.pid:
            self.waits.set()
            assert self.may.wait(60)
        return super().allocate(*args, **kwargs)


def test_a_child_forked_while_a_thread_is_in_init_inits_the_same_object(forker: ChildEnd) -> None:
    assert forker.do(fork_in_init) == [("returned", "1"), 1]


def fork_in_init(world: World) -> list[object]:
    device = Waiting()
    datadist = LLMDataDist(LLMRole.MIX, 1, device=device)

    def pools(_: World) -> int:
        signal.alarm(20)
        with pytest.raises(NotInitialized, match="this LLMDataDist is not initialized; call init first"):
            datadist.statistics()  # the parent's init has not ended
        datadist.init(make_config(**small_pool()))
        return len(datadist.statistics().pools)

    making = Call(datadist.init, make_config(**small_pool()))
    assert device.waits.wait(20)
    outcome = in_child(world, pools)
    device.may.set()
    making.result()
    found = len(datadist.statistics().pools)
    datadist.finalize()
    return [outcome, found]


def test_a_child_is_told_whose_the_instance_is_until_it_inits_it(forker: ChildEnd) -> None:
    fork = "it belongs to process PID, of which this one is a fork; call it there, or init one here"
    over = "is not initialized; call init first"
    assert forker.do(calls_in_child) == [
        f"statistics: {fork}",
        f"DeallocateCache: {fork}",
        f"statistics: this LLMDataDist {over}",
    ]


def calls_in_child(world: World) -> list[str]:
    world.start("MIX", 1, make_config(**small_pool()), None)
    other = cpp_api.LlmDataDist(2, cpp_api.LlmRole.kMix)
    assert other.Initialize({cpp_api.OPTION_DEVICE_ID: "0"}) is LLMStatusCode.LLM_SUCCESS

    def said(_: World) -> list[str]:
        texts = []
        for again in (False, True):
            if again:
                world.dd.init(make_config(**small_pool()))
                world.dd.finalize()
            with pytest.raises(NotInitialized) as caught:
                world.dd.statistics()
            texts.append(str(caught.value))
            if not again:
                other.DeallocateCache(1)
                texts.append(str(other.last_error))
        return texts

    kind, text = in_child(world, said)
    assert kind == "returned", text
    other.Finalize()
    world.dd.finalize()
    return [each.replace(str(os.getpid()), "PID") for each in ast.literal_eval(text)]


def test_a_lock_of_a_module_that_a_thread_holds_at_a_fork_is_free_in_the_child(forker: ChildEnd) -> None:
    assert forker.do(fork_with_locks_held) == ("returned", "[]")


def fork_with_locks_held(world: World) -> object:
    """Fork while every lock of the library's modules is held; return those that the child cannot take."""
    import llm_datadist._transport.nixl.agent  # noqa: F401  its lock is one of them; only instances with NIXL import it

    def locks() -> dict[str, Any]:
        modules = [each for name, each in sys.modules.copy().items() if name.startswith("llm_datadist")]
        kind = type(threading.Lock())
        return {f"{m.__name__}.{n}": v for m in modules for n, v in vars(m).items() if isinstance(v, kind)}

    with ExitStack() as held:
        for lock in locks().values():
            held.enter_context(lock)
        assert "llm_datadist._transport.nixl.agent._making" in locks()
        return in_child(world, lambda _: [name for name, lock in locks().items() if lock.locked()])
