"""What a peer may do with a cache, asked of all three servers: resolves, data lanes, checksums; and who may ask.

``access_matrix.txt`` was measured on the code before there was an ``AccessPolicy``. Each cell is one answer:

- ``pin``, ``keep``: resolved, with a pin or without one; ``@`` says that the memory is named by address
- ``yes``: a data lane or a checksum is served
- ``yes``: a question is answered; ``none``: LLM_FEATURE_NOT_ENABLED, it has no handler
- ``no``: refused with LLM_PARAM_INVALID; ``gone``: LLM_KV_CACHE_NOT_EXIST, there is no such cache, key or pin

A read by key (``key`` over a lane) that cannot be pinned is ``gone``, whatever the reason: a resolve says what it is.

Nothing writes the table: a cell that changes is a security rule that changes, and is changed here by hand.
"""

import itertools
import json
import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode, Placement
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.local_caches import LocalCaches
from llm_datadist._cache.registry import FIRST_PEER_CHOSEN_PIN, key_of
from llm_datadist._deadline import Deadline
from llm_datadist._links.link import Link, PeerCacheView
from llm_datadist._links.messages import Consumed, Failed, Guarded, Question, Release, Resolve, Resolved, Verify
from llm_datadist._links.versions import FEATURES
from llm_datadist._memory.device import HostDevice
from llm_datadist._native import LentBlocks, Plan
from llm_datadist._policy import PeerPolicy
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.checksum import ChecksumTarget
from llm_datadist._transfer.questions import Questions
from llm_datadist._transfer.resolution import Handle, KeyHandle, encode_handle
from llm_datadist._transfer.target import Target
from llm_datadist._transport.moves import MoveRequest
from llm_datadist.config import Options
from llm_datadist.errors import ParamError
from llm_datadist.types.question import PeerQuestion

_BOTH: Final = (False, True)
_REFUSALS: Final = {LLMStatusCode.LLM_PARAM_INVALID: "no", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: "gone"}
_RIGHTS: Final = ("link", "pull", "push", "locate", "consume", "ask")
#: Columns of the questions: rules of the peer's entry, or of the policy without one.
_ASKERS: Final[dict[str, dict[str, Any] | None]] = {
    "no-policy": None,
    "ask": {"ask": True},
    "all-but-ask": {right: True for right in _RIGHTS if right != "ask"},
    "nothing": {},
    "others-ask": {"ask": False},  # the others may
}


class Asker(Link):
    """A link that keeps what it is told to send."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.caches = PeerCacheView()
        able = SimpleNamespace(shared_regions=True, remote_guards=False)
        ours = SimpleNamespace(capabilities=able)
        self.connection: Any = SimpleNamespace(capabilities=able, for_ours=lambda **_: ours)
        self.peer: Any = SimpleNamespace(cluster_id=2, incarnation=bytes(16))
        self.origin: Any = SimpleNamespace(behind="pid 1")
        self.spoken: Any = SimpleNamespace(features=FEATURES)
        self.peer_reported = 0

    def tell(self, message: Any, reports: object = None) -> None:
        self.told.put(message)


class Bench:
    """One target with one cache of one kind."""

    def __init__(self, kind: str, rca: bool, shared: bool, undo: ExitStack, peers: PeerPolicy | None = None) -> None:
        given = {"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": f"{rca:d}"}
        given["llm.MemPoolConfig"] = '{"memory_size": 1048576, "page_shift": 12}'
        self.store = LocalCaches(Options.parse(given, LLMRole.DECODER), HostDevice(), HostDevice(), b"\0" * 16)
        undo.callback(self.store.close)
        policy = AccessPolicy(self.store, peers)
        self.target = Target(self.store, policy)
        self.checksums = ChecksumTarget(self.store, policy, None)
        undo.callback(self.checksums.close)
        self.key: Any = BlocksCacheKey(1, 0) if kind.startswith("blocks") else CacheKey(1, req_id=7)
        word, *registered = kind.split("-")
        bound = [] if word in ("mix", "none") else [(self.key, 0)]
        cache_kind = {"blocks": CacheKind.BLOCKS, "mix": CacheKind.MIX}.get(word, CacheKind.CACHE)
        geometry = Geometry.of(CacheDesc(1, [4, 4096], DataType.DT_UINT8, Placement.DEVICE), cache_kind)
        if registered:
            self.memory = np.zeros(geometry.tensor_bytes, np.uint8)
            self.entry = self.store.register(geometry, [self.memory.ctypes.data], bound, remote_accessible=True)
        else:
            self.entry = self.store.allocate(geometry, bound, Deadline(1000))
        self.entry.remote_accessible = shared
        if kind == "none":
            self.store.deallocate(self.entry.cache_id)

    def resolve(self, link: Asker, push: bool, by_key: bool) -> str:
        key = key_of(self.key) if by_key else None
        self.target.on_resolve(link, Resolve(1, push, key, 0 if by_key else self.entry.cache_id, 0, 60_000))
        answer = link.told.get()
        if isinstance(answer, Failed):
            return _REFUSALS[LLMStatusCode(answer.code)]
        by_address = not any(answer.regions) and self.entry.owned
        assert isinstance(answer, Resolved)
        return ("pin" if answer.pin else "keep") + ("@" if by_address else "")

    def lane(self, link: Asker, push: bool, pin: int | None) -> str:
        """Ask over a lane, by key where there is no ``pin``."""
        plan = Plan(0, 0, 1, np.array([[0, 0, 8]], np.uint64), ordered=False, nbytes=8)
        if pin is None:
            key = key_of(self.key)
            assert key is not None
            handle = encode_handle(KeyHandle(key, self.entry.geometry, FIRST_PEER_CHOSEN_PIN, 60_000, 0))
        else:
            handle = encode_handle(Handle(self.entry.cache_id, pin, self._guards()))
        request = MoveRequest(handle, self.entry.geometry.stride, plan, push)
        try:
            self.reply = self.target.on_move(link, request)
        except LLMException as error:
            return _REFUSALS[error.status_code]
        return "yes"

    def checksum(self, link: Asker, push: bool, pin: int) -> str:
        runs, extent = np.array([[0, 8]], "<u8").tobytes(), self.entry.geometry.tensor_bytes
        wanted = (self._guards(), push, extent, 0, 1, runs, False, b"\0" * 16, 60_000)
        self.checksums.on_verify(link, Verify(1, self.entry.cache_id, pin, *wanted))
        answer = link.told.get(timeout=30)
        return _REFUSALS[LLMStatusCode(answer.code)] if isinstance(answer, Failed) else "yes"

    def _guards(self) -> list[Guarded]:
        return [Guarded(self.entry.guard.slot, self.entry.guard.generation)]


def _columns(verb: str) -> list[tuple[bool, bool, str]]:
    last = {"resolve": ("key", "id"), "lane": ("-", "pin", "other", "key")}.get(verb, ("-", "pin", "other"))
    return list(itertools.product(_BOTH, _BOTH, last))


def _cells(verb: str, push: bool, kind: str, shared: bool) -> Iterator[str]:
    for rca, located, last in _columns(verb):
        with ExitStack() as undo:
            bench, link, other = Bench(kind, rca, shared, undo), Asker(), Asker()
            if located:
                link.caches.located.add(bench.entry.cache_id)
            if verb == "resolve":
                yield bench.resolve(link, push, last == "key")
                continue
            if last == "key":
                yield bench.lane(link, push, None)
                continue
            pin = 0 if last == "-" else 9
            if kind != "none" and last != "-":
                asker, until = link if last == "pin" else other, time.monotonic() + 60
                pin = bench.store.registry.pin(asker, until, cache_id=bench.entry.cache_id).pin_id
            yield (bench.lane if verb == "lane" else bench.checksum)(link, push, pin)


def _asked(rules: dict[str, Any] | None, *, served: bool) -> str:
    peers = None
    if rules is not None:
        others = {"*": {"ask": True}} if "ask" in rules and not rules["ask"] else {}
        peers = PeerPolicy.parse("llm.PeerPolicy", json.dumps({"2": rules} | others))
    questions, link = Questions(AccessPolicy(cast("Any", None), peers)), Asker()
    if served:
        questions.serve("name", lambda question: b"")
    questions.on_question(link, Question(1, "name", b"", 100))
    told = link.told.get()
    if isinstance(told, Failed):
        return "none" if told.code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED else "no"
    return "yes"


def test_every_server_answers_as_the_table_says() -> None:
    """One line for each verb, kind of cache and remote_accessible."""
    lines, kinds = [], ("row", "row-registered", "blocks", "blocks-registered", "mix-registered", "none")
    for verb in ("resolve", "lane", "checksum"):
        names = [f"{'rca' if rca else '-'}/{'located' if near else '-'}/{last}" for rca, near, last in _columns(verb)]
        rows = [(verb, iter(names))]
        for push, kind, shared in itertools.product(_BOTH, kinds, (True, False)):
            head = f"{verb} {'push' if push else 'pull'} {kind} {'shared' if shared else 'not-shared'}"
            rows.append((head, _cells(verb, push, kind, shared)))
        lines += [f"{head:<43}" + " ".join(f"{each:<17}" for each in cells) for head, cells in rows]
        lines.append("")
    asking = [("ask", iter(_ASKERS))]
    for served in (True, False):
        cells = [_asked(rules, served=served) for rules in _ASKERS.values()]
        asking.append((f"ask {'handler' if served else 'no-handler'}", iter(cells)))
    lines += [f"{head:<43}" + " ".join(f"{each:<17}" for each in cells) for head, cells in asking]
    lines.append("")
    table = Path(__file__).with_name("access_matrix.txt").read_text()
    assert [line.rstrip() for line in lines[:-1]] == table.splitlines()


def _policy(**rules: Any) -> PeerPolicy:
    return PeerPolicy.parse("llm.PeerPolicy", json.dumps({"2": rules}))


@pytest.mark.parametrize(
    ("rules", "answers"),
    [
        ({"pull": True, "push": True}, "keep keep keep keep yes yes yes yes"),
        ({"pull": True}, "keep keep no no yes no yes no"),
        ({"push": True}, "no no keep keep no yes no no"),  # a digest of a few bytes tells what they are
        ({"locate": True, "consume": True, "link": True}, "no no no no no no no no"),
        ({"pull": True, "push": True, "models": [0, 3]}, "keep keep keep keep yes yes yes yes"),
        ({"pull": True, "push": True, "models": [3]}, "no no no no no no no no"),
        ({"pull": True, "push": True, "models": []}, "no no no no no no no no"),
    ],
)
def test_a_peer_policy_takes_rights_away_at_every_server(rules: dict[str, Any], answers: str) -> None:
    """Raw requests: no other check of ours is in front of these."""
    with ExitStack() as undo:
        bench, link = Bench("blocks", True, True, undo, _policy(**rules)), Asker()
        found = [bench.resolve(link, push, by_key) for push in _BOTH for by_key in _BOTH]
        found += [bench.lane(link, push, 0) for push in _BOTH]
        found += [bench.checksum(link, push, 0) for push in _BOTH]
    assert " ".join(found) == answers


@pytest.mark.parametrize("served", ["", "all"])
def test_a_cache_under_grants_only_is_named_and_its_bytes_need_an_active_grant_of_it_at_every_server(
    served: str,
) -> None:
    """Over NIXL too, whose requests ask as those over lanes do. A peer that does not know such caches gets nothing."""
    with ExitStack() as undo:
        bench, link = Bench("blocks", True, True, undo), Asker()
        if not served:
            link.spoken = SimpleNamespace(features=[each for each in FEATURES if each != "granted-only"])
        lent: dict[tuple[int, int], LentBlocks] = {}
        bench.entry.storage = replace(bench.entry.storage, lent=lent)
        found = [bench.resolve(link, push, by_key) for push in _BOTH for by_key in _BOTH]
        found += [each(link, push, 0) for each in (bench.lane, bench.checksum) for push in _BOTH]
        assert " ".join(found) == ("keep keep no no no no no no" if served else "no no no no no no no no")
        lent[bench.entry.guard.slot, bench.entry.guard.generation] = LentBlocks([0], 4096)  # as if of a grant
        found = [each(link, push, 0) for each in (bench.lane, bench.checksum) for push in _BOTH]
        assert " ".join(found) == ("yes no yes no" if served else "no no no no")
        assert not served or bench.reply.lent is not None


def test_a_peer_without_ask_is_told_the_option_and_not_whether_there_is_a_handler() -> None:
    texts = set()
    for served in _BOTH:
        questions, link = Questions(AccessPolicy(cast("Any", None), _policy(link=True, pull=True, push=True))), Asker()
        if served:
            questions.serve("name", lambda question: b"")
        questions.on_question(link, Question(1, "name", b"", 100))
        texts.add((told := link.told.get()).text)
        assert (told.id, told.code) == (1, LLMStatusCode.LLM_PARAM_INVALID)
    assert texts == {"llm.PeerPolicy of the owner does not allow cluster 2 to ask"}


@pytest.mark.parametrize(
    ("rules", "tenant", "rights"),
    [
        (None, "", ["pull", "push", "locate", "consume"]),
        ({"ask": True}, "", []),
        ({"ask": True, "pull": True, "tenant": "a"}, "a", ["pull"]),
        ({"ask": True, "push": True, "consume": True, "locate": True}, "", ["push", "locate", "consume"]),
    ],
)
def test_a_question_has_the_tenant_and_the_rights_of_its_peers_entry(
    rules: dict[str, Any] | None, tenant: str, rights: list[str]
) -> None:
    asked: list[PeerQuestion] = []
    questions = Questions(AccessPolicy(cast("Any", None), None if rules is None else _policy(**rules)))
    questions.serve("name", asked.append)
    questions.on_question(Asker(), Question(1, "name", b"", 100))
    (question,) = asked
    assert (question.tenant, question.origin) == (tenant, "pid 1")
    assert [right for right in ("pull", "push", "locate", "consume") if question.may(right)] == rights
    with pytest.raises(ParamError, match="right: 'link' is not one of pull, push, locate, consume"):
        question.may("link")
    question.answer(b"")


def test_a_pin_stands_for_the_key_by_which_it_was_resolved() -> None:
    """Another peer may consume the key meanwhile; then the cache has no key of the peer's models any more."""
    with ExitStack() as undo:
        bench, link = Bench("row", False, True, undo, _policy(pull=True, consume=True, models=[0])), Asker()
        pin = bench.store.registry.pin(link, time.monotonic() + 60, key=key_of(bench.key)).pin_id
        bench.store.remove_key(bench.key)
        assert (bench.lane(link, False, pin), bench.checksum(link, False, pin)) == ("yes", "yes")
        assert bench.resolve(link, False, by_key=False) == "no"


@pytest.mark.parametrize("limited", _BOTH)
def test_the_owner_is_asked_again_for_each_read_of_a_peer_of_some_models(limited: bool) -> None:
    """The guards of a cache that is named by its id do not tell that it has no key of these models any more."""
    with ExitStack() as undo:
        rules = {"models": [0]} if limited else {}
        bench, link = Bench("row-registered", True, True, undo, _policy(pull=True, **rules)), Asker()
        assert bench.lane(link, False, 0) == "yes"
        assert bench.reply.cacheable is not limited
        bench.store.remove_key(bench.key)
        assert bench.lane(link, False, 0) == ("no" if limited else "yes")


@pytest.mark.parametrize(
    ("rules", "consumed"),
    [
        ({"pull": True, "push": True}, False),
        ({"pull": True, "push": True, "consume": True}, True),
        ({"pull": True, "push": True, "consume": True, "models": [3]}, False),
        ({"consume": True}, False),
    ],
)
@pytest.mark.parametrize("rca", _BOTH)
def test_what_ends_a_transfer_consumes_no_key_of_a_peer_that_may_not(
    rules: dict[str, Any], consumed: bool, rca: bool
) -> None:
    with ExitStack() as undo:
        bench, link = Bench("row", rca, True, undo, _policy(**rules)), Asker()
        by_key = bench.resolve(link, False, by_key=True)
        assert (by_key == "pin") is (consumed or (rca and "pull" in rules and "models" not in rules))
        if rca:
            bench.target.on_consumed(link, Consumed(bench.entry.cache_id, 0, 0, 1))
        elif by_key == "pin":
            bench.target.on_release(link, Release(1, 0, 1))
        else:
            assert bench.lane(link, False, None) in ("gone", "no")
            if "consume" not in rules:  # as of a push to a row that was located
                pin = bench.store.registry.pin(link, time.monotonic() + 60, key=key_of(bench.key)).pin_id
                bench.target.on_release(link, Release(pin, 0, 1))
        assert (not bench.entry.bindings) is consumed
        for number in (1, 2):
            bench.target.on_release(link, Release(number, 0, 0))
