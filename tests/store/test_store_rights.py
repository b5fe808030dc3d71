"""Who can do what with a prefix store: each cell of the tables in docs/store.md is tried."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from llm_datadist import CacheKeyByIdAndIndex, LLMException
from llm_datadist.datadist import life_of
from llm_datadist.errors import CacheMismatch, LinkError, ParamError
from llm_datadist.store import StoreClient, StoreOptions, StoreServer, messages, namespace
from llm_datadist.store.identity import shown
from llm_datadist.types.grant import Grant
from llm_datadist.views import tensor_views
from tests.store import engines as e
from tests.support.authority import secret_file
from tests.support.ends import ChildEnd
from tests.support.linking import explain, links_of
from tests.support.moves import make
from tests.support.probe import deadline
from tests.support.source import ROOT
from tests.support.users import USER, become
from tests.support.world import World

pytest.importorskip("cryptography", reason="secrets need the extra [auth]")
pytestmark = pytest.mark.covers("store.*")

#: What a peer may be able to do, in the order of the page.
ALL: Final = ("look up", "load", "hold", "list", "read", "save", "suspect", "clear", "displace")
PAGE: Final = (ROOT / "docs" / "store.md").read_text()
MINE: Final = e.keys_of(1)[0]
OTHERS: Final = e.keys_of(2)[0]
SECRET: Final = b"secret of all that may use this store"
#: Cache id, slot, guard of the cache, incarnation of the store.
Place = tuple[int, int, tuple[int, int], bytes]
VICTIM: Final = 5
ACTOR: Final = 6
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


def table(first: str) -> dict[str, list[str]]:
    """Return the cells of the page's table whose first column has this name, by the first cell of each row."""
    _, found, rest = PAGE.partition(f"| {first} |")
    assert found
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: row[1:] for row in cells}


def said(cell: str) -> list[str]:
    """Return what a cell says that its peer can do."""
    words = {"everything": list(ALL), "nothing": []}
    return words[cell] if cell in words else sorted(cell.split(", "), key=ALL.index)


# --- what runs in the store, its clients and the peer that tries ------------------------------------------------------
def place(world: World, tenant: str) -> Place:
    """Return where the victim's key is."""
    server: StoreServer = world.memory["server"]
    space = server._spaces[tenant, e.NS]  # noqa: SLF001 (of this test's store)
    guard = life_of(server.datadist).require_engine("test").caches.registry.lookup(space.cache.cache_id).guard
    slot = int(space.slots.run(msgspec.msgpack.encode([MINE]))[0])
    return space.cache.cache_id, slot, (guard.slot, guard.generation), bytes.fromhex(server.datadist.incarnation)


def index(world: World, tenant: str) -> dict[bytes, list[bytes]]:
    server: StoreServer = world.memory["server"]
    return server.index(tenant)


def loads(world: World) -> int:
    return sum(space.loads for space in e.statistics(world).namespaces)


def cleared(world: World, tenant: str) -> int:
    return sum(space.cleared for space in e.statistics(world).namespaces if space.tenant == tenant)


def corrupt(world: World, tenant: str) -> None:
    """Flip a bit of the victim's slot in the store."""
    server: StoreServer = world.memory["server"]
    space = server._spaces[tenant, e.NS]  # noqa: SLF001 (of this test's store)
    tensor_views(space.cache)[0][int(space.slots.run(msgspec.msgpack.encode([MINE]))[0])].reshape(-1).view(np.uint8)[
        0
    ] ^= 1


@contextmanager
def suppressed(kind: type[LLMException]) -> Iterator[None]:
    """Ignore refusals by the store's policy, or for want of a grant, and no other error."""
    with suppress(kind):
        try:
            yield
        except kind as error:
            if "llm.PeerPolicy" not in str(error) and "is read under grants only" not in str(error):
                raise AssertionError(str(error)) from error
            raise


def own_client(world: World, port: int, name: bytes) -> StoreClient:
    options = StoreOptions(store_id=1, lookup_ms=5000, pause_seconds=0.0)
    return StoreClient(world.dd, f"127.0.0.1:{port}", name, options)


def connects(world: World, port: int, host: str = "127.0.0.1") -> str:
    """Link to the store and make a client of the victim's namespace; return why not, if so."""
    try:
        links_of(world).link(1, (host, port), deadline(20_000))
    except (LinkError, ParamError) as error:
        return f"{type(error).__name__}: {error}"
    world.memory["client"] = client = own_client(world, port, e.NS)
    assert client.connect(20)
    return ""


def looks_up(world: World) -> bool:
    world.memory["hit"] = hit = world.memory["client"].lookup([MINE])
    return len(hit) == 1


def loads_it(world: World) -> bool:
    world.memory["client"].load(world.memory["hit"], world.caches["kv"], [3])
    return holds_bytes(world, 3)


def holds_bytes(world: World, block: int) -> bool:
    views = tensor_views(world.caches["kv"])
    return all(
        bytes(view[block].reshape(-1).view(np.uint8)) == e.content(e.NS, MINE, tensor).tobytes()
        for tensor, view in enumerate(views)
    )


def lists(world: World) -> bool:
    found: list[bytes] = []
    with suppressed(CacheMismatch):
        found = [key for event in world.memory["client"].events().events for key in event.keys]
    return MINE in found


def reads(world: World, place: Place) -> bool:
    """Pull the victim's slot by the id of the store's cache, under a grant that nobody gave.

    A hostile client skips its own checks. It learns the guard of a cache by asking for the cache.
    """
    cache_id, slot, guard, incarnation = place
    forged = Grant(1, incarnation, cache_id, guard, secrets.token_bytes(16), [slot])
    with suppressed(CacheMismatch):
        world.cm.pull_blocks(CacheKeyByIdAndIndex(1, cache_id, 0), world.caches["kv"], [slot], [5], grant=forged)
    return holds_bytes(world, 5)


def saves(world: World, name: bytes, key: bytes, port: int) -> None:
    """Save a key in a namespace, which a refusal of the store leaves as it is."""
    e.put(world, [key], [0], name)
    with own_client(world, port, name) as client:
        assert client.connect(20)
        with suppressed(CacheMismatch):
            client.save([key], world.caches["kv"], [0])


def suspects(world: World, slot: int) -> None:
    body = messages.Suspect(e.NS, [slot]).encode()
    with suppressed(CacheMismatch):
        world.dd.ask(1, messages.SUSPECT, body, 20_000)


def clears(world: World) -> None:
    """Empty the victim's namespace, if the store lets the peer."""
    with suppressed(CacheMismatch):
        world.dd.ask(1, messages.CLEAR, messages.Clear([shown(e.NS)]).encode(), 20_000)


def other_name(number: int) -> bytes:
    return namespace(
        fingerprint=b"%d" % number, tp_size=1, tp_rank=0, hash_algorithm="sha256_cbor", hash_seed="0", salt="other"
    )


def abilities(store: ChildEnd, actor: ChildEnd, of: str, by: str) -> list[str]:
    """Let a linked actor of tenant ``by`` try everything against the key of tenant ``of``; return what it could."""
    can: dict[str, bool] = {}
    there = store.do(place, of)
    can["read"] = actor.do(reads, there)
    can["look up"] = actor.do(looks_up)
    can["hold"] = store.do(loads) > 0
    can["load"] = can["look up"] and actor.do(loads_it)
    can["list"] = actor.do(lists)
    actor.do(saves, e.NS, OTHERS, store.port)
    can["save"] = OTHERS in store.do(index, of)[e.NS]
    store.do(corrupt, of)
    actor.do(suspects, there[1])
    can["suspect"] = MINE not in store.do(index, of)[e.NS]
    before = store.do(cleared, of)
    actor.do(clears)
    can["clear"] = store.do(cleared, of) > before
    for number in range(5):
        actor.do(saves, other_name(number), OTHERS, store.port)
    can["displace"] = e.NS not in store.do(index, of)
    if by != of:
        assert not can["look up"]
    return [each for each in ALL if can[each]]


# --- a store, its victim, and an actor --------------------------------------------------------------------------------
@contextmanager
def scene(
    given: dict[str, str], held: dict[str, str], actor: dict[str, str], user: int = 0, listen: str = "127.0.0.1"
) -> Iterator[tuple[ChildEnd, ChildEnd, str]]:
    """Start a store with a key of the victim, and an actor; yield both, and why the actor is not linked."""
    with e.family_of() as family:
        store = family.child("store")
        store.cluster_id = 1
        store.port = store.do(open_store, {"llm.Insecure": "0"} | held | given, listen)
        victim = started(family, VICTIM, held)
        assert victim.do(connects, store.port) == ""
        assert victim.do(e.save, [MINE], [0]) == 1
        victim.do(e.close_ours)
        victim.do(World.stop)
        other = started(family, ACTOR, actor, user)
        host = "127.0.0.1" if listen == "127.0.0.1" else own_address()
        yield store, other, other.do(connects, store.port, host)
        other.do(e.close_ours)
        other.do(World.stop)


def open_store(world: World, options: dict[str, str], listen: str) -> int:
    StoreServer._KEPT_SECONDS = 0.0  # noqa: SLF001 (a minute is no time of a test)
    world.memory["server"] = server = StoreServer(
        4 * e.SPACE, f"{listen}:0", cluster_id=1, namespaces=4, options=options
    )
    world.dd = server.datadist
    return server.port


def started(family: e.StoreFamily, number: int, options: dict[str, str], user: int = 0) -> ChildEnd:
    end = family.child(f"cluster {number}")
    if user:
        end.do(become, user)
    end.start("MIX", number, extra={"llm.Insecure": "0"} | options)
    end.do(make, "kv", e.SPEC, number)
    return end


def own_address() -> str:
    """Return an address of this host for other hosts; skips the test without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address for other hosts")
        return str(probe.getsockname()[0])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which every user may look."""
    with tempfile.TemporaryDirectory(prefix="store-rights-") as name:
        path = Path(name)
        path.chmod(0o711)
        yield path


def policy(entry: dict[str, Any], tenant: str = "") -> dict[str, str]:
    """Return a policy in which the victim may do everything."""
    full = dict.fromkeys(("link", "ask", "pull", "push"), True) | ({"tenant": tenant} if tenant else {})
    return {"llm.PeerPolicy": json.dumps({str(VICTIM): full, str(ACTOR): {"link": True} | entry})}


def within_reach(actor: ChildEnd, able: list[str]) -> list[str]:
    """Leave out reading the pool where it is not mapped: over tcp slots are read under grants only."""
    over_tcp = able and actor.do(explain, 1).transport == "tcp"
    return [each for each in able if each != "read" or not over_tcp]


# --- the tables -------------------------------------------------------------------------------------------------------
WITHOUT, WITH, POLICY = range(3)
WHERE: Final = ["no credentials", "credentials", "policy"]


def settings(column: int, folder: Path, entry: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a store has beside secrets, and those of everybody who has them."""
    secrets = {} if column == WITHOUT else secret_file(folder / "secrets", a=SECRET)
    return policy(entry) if column == POLICY else {}, secrets


@pytest.mark.parametrize("column", [WITHOUT, WITH, POLICY], ids=WHERE)
@pytest.mark.parametrize("user", [0, pytest.param(USER, marks=root_only)], ids=["same user", "other user"])
def test_a_process_without_credentials_can_do_what_the_page_says(folder: Path, user: int, column: int) -> None:
    given, secrets = settings(column, folder, {"ask": True, "pull": True, "push": True})
    with scene(given, secrets, {}, user) as (store, actor, why):
        expected = said(table("peer")["other user" if user else "same user"][column])
        assert ("AuthFailed" in why) is (not expected), why
        if user and column == WITHOUT:
            assert all(each in why for each in ("llm.SameHostUsers", "llm.Insecure", "--secrets")), why
        assert ([] if why else abilities(store, actor, "", "")) == expected


@root_only
@pytest.mark.parametrize("column", [WITHOUT, WITH, POLICY], ids=WHERE)
def test_a_process_of_an_admitted_user_can_do_what_the_page_says(folder: Path, column: int) -> None:
    given, secrets = settings(column, folder, {"ask": True, "pull": True, "push": True})
    with scene(given | {"llm.SameHostUsers": str(USER)}, secrets, {}, USER) as (store, actor, why):
        expected = said(table("peer")["user in `llm.SameHostUsers`"][column])
        assert ("AuthFailed" in why) is (not expected), why
        assert ([] if why else abilities(store, actor, "", "")) == within_reach(actor, expected)


@pytest.mark.parametrize("column", [WITHOUT, WITH, POLICY], ids=WHERE)
def test_the_network_without_credentials_can_do_nothing(folder: Path, column: int) -> None:
    assert said(table("peer")["network"][column]) == []
    given, secrets = settings(column, folder, {"ask": True, "pull": True, "push": True})
    if column == WITHOUT:
        with pytest.raises(ParamError, match="is beyond this host, where links need authentication"):
            StoreServer(1 << 20, "0.0.0.0:0", options={"llm.Insecure": "0"})
        return
    with scene(given, secrets, {"llm.Insecure": "1"}, listen="0.0.0.0") as (_, _, why):
        assert "asks for authentication" in why


@pytest.mark.parametrize("column", [WITHOUT, WITH], ids=WHERE[:2])
@pytest.mark.parametrize("row", ["linked peer", "tenant"])
def test_every_linked_peer_can_do_everything_without_a_policy(folder: Path, row: str, column: int) -> None:
    given, secrets = settings(column, folder, {})
    with scene(given, secrets, secrets) as (store, actor, why):
        assert why == ""
        assert abilities(store, actor, "", "") == said(table("peer")[row][column])


@root_only
def test_a_peer_of_another_user_with_the_credentials_is_a_linked_peer_over_tcp(folder: Path) -> None:
    ours, theirs = (secret_file(folder / name, a=SECRET) for name in ("ours", "theirs"))
    os.chown(folder / "theirs", USER, USER)
    with scene({}, ours, theirs, USER) as (store, actor, why):
        assert (why, actor.do(explain, 1).transport) == ("", "tcp")
        assert abilities(store, actor, "", "") == within_reach(actor, list(ALL))


@root_only
def test_a_store_that_is_insecure_links_every_user(folder: Path) -> None:
    with scene({"llm.Insecure": "1"}, {}, {}, USER) as (store, actor, why):
        assert why == ""
        assert abilities(store, actor, "", "") == within_reach(actor, list(ALL))


@pytest.mark.parametrize("entry", list(table("entry")))
def test_a_peer_with_an_entry_can_do_what_the_page_says(folder: Path, entry: str) -> None:
    rights = re.findall(r"`(\w+)`", entry)
    tenants = ("a", "b") if "another `tenant`" in entry else ("", "")
    allowed: dict[str, Any] = {right: True for right in rights if right != "tenant"}
    if tenants[0]:
        allowed |= dict.fromkeys(("ask", "pull", "push"), True) | {"tenant": tenants[1]}
    if "models" in allowed:
        allowed["models"] = [0]
    secrets = secret_file(folder / "secrets", a=SECRET)
    with scene(policy(allowed, tenants[0]), secrets, secrets) as (store, actor, why):
        assert why == ""
        assert abilities(store, actor, *tenants) == said(table("entry")[entry][0])


def test_tenants_have_the_same_namespace_side_by_side(folder: Path) -> None:
    """Both find what they saved, and neither what the other saved."""
    secrets = secret_file(folder / "secrets", a=SECRET)
    rights = {"ask": True, "pull": True, "push": True, "tenant": "b"}
    with scene(policy(rights, "a"), secrets, secrets) as (store, actor, why):
        assert why == ""
        actor.do(saves, e.NS, OTHERS, store.port)
        assert [store.do(index, tenant).get(e.NS) for tenant in ("a", "b", "")] == [[MINE], [OTHERS], None]


def test_who_can_do_what_names_every_cell() -> None:
    cells = [cell for cells in table("peer").values() for cell in cells]
    assert list(table("peer")) == [
        "same user",
        "other user",
        "user in `llm.SameHostUsers`",
        "network",
        "linked peer",
        "tenant",
    ]
    assert [table("peer")[row][POLICY] for row in ("linked peer", "tenant")] == ["by its entry"] * 2
    for cell in [*cells, *(cells[0] for cells in table("entry").values())]:
        assert cell == "by its entry" or said(cell) is not None
