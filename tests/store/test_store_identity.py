"""A client's store is the process that answers at the client's address, and no other one that says so."""

import secrets
from typing import Any

import numpy as np
import pytest

from llm_datadist.errors import LLMException, ParamError
from llm_datadist.store import NO_EVENTS, Hit, StoreClient, StoreOptions, messages
from llm_datadist.store.client import shape_of
from llm_datadist.types.grant import Grant
from tests.store import engines as e
from tests.store.engines import NS, StoreFamily, family_of, keys_of
from tests.support.kinds import ChildEnd, World
from tests.support.linking import free_port, info, link
from tests.support.moves import make, show, wait_until

pytestmark = pytest.mark.covers("store.*")

STORE = 1
TOKEN = b"not the lookup's"


def listening(family: StoreFamily, name: str, number: int) -> ChildEnd:
    end = family.child(name)
    end.start("MIX", number, listen_ip_info="127.0.0.1:0")
    end.do(make, "kv", e.SPEC, number)
    return end


def nothing(question: Any) -> bytes:
    """Answer a lookup of no namespace that is there."""
    asked = messages.decode(messages.Lookup, question.body, "x")
    return messages.Run([], [bytes(16) for _ in asked.namespaces]).encode()


def answer_lookups(world: World, grant: bytes | None = None) -> None:
    """Be a store that has every key; answer with a grant of its own, or with the given one."""
    world.memory["asked"], cache = [], world.caches["kv"]

    def look_up(question: Any) -> bytes:
        asked = messages.decode(messages.Lookup, question.body, "x")
        if not asked.keys:
            return nothing(question)
        world.memory["asked"].append(len(asked.keys))
        slots = [0] * len(asked.keys)
        own = grant or cache.grant([0], None, token=asked.tokens[0], peer=question.cluster_id).to_bytes()
        lent = Grant.from_bytes(own)
        digests = world.cm.digest_blocks(cache, slots, bytes(16))
        places = np.array(slots, "<i8").tobytes(), digests.astype("<u8").tobytes()
        owner = lent.cluster_id, lent.incarnation, lent.token
        found = messages.Found(lent.cache_id, lent.guard, *places, bytes(16), shape_of(cache), owner)
        return messages.Run([found], [bytes(16)]).encode()

    world.dd.answer_questions(messages.LOOKUP, look_up)


def asked(world: World) -> int:
    return len(world.memory["asked"])


def dial(world: World, port: int, cluster: int) -> str:
    return str(link(world, [info(cluster, port)])[0].name)


def test_a_process_that_dials_a_client_under_the_stores_id_is_not_its_store() -> None:
    with family_of() as family:
        port = free_port()
        engine = listening(family, "engine", 4)
        assert not engine.do(e.begin_client, port, NS)
        fake = listening(family, "fake", STORE)
        fake.do(answer_lookups)
        fake.do(dial, engine.port, 4)
        assert engine.do(e.look_up, keys_of(1)) == 0
        real = family.store(port=port)
        assert engine.do(connected)
        fake.do(dial, engine.port, 4)  # beside the real one
        assert engine.do(e.save, keys_of(2), [3]) == 1
        assert engine.do(e.hits, keys_of(2)) == 1
        assert engine.do(e.look_up, keys_of(1)) == 0
        assert (fake.do(asked), real.do(e.index)) == (0, {NS: keys_of(2)})


def connected(world: World) -> bool:
    return bool(world.memory["client"].connect(20))


def test_the_first_save_in_a_store_that_listened_before_it_answered_is_stored() -> None:
    """Regression: the store's first refusal counted as an answer, and a save was one of no generation."""
    with family_of() as family:
        early = listening(family, "early", STORE)
        engine = family.engine(early)
        early.do(answer_saves, secrets.token_bytes(16))
        assert engine.do(e.save, keys_of(1), [3]) == 1


def answer_saves(world: World, generation: bytes) -> None:
    """Be a store that stores each key of its generation."""

    def save(question: Any) -> bytes:
        asked = messages.decode(messages.Save, question.body, "x")
        return messages.Done(len(asked.keys) * (asked.generation == generation), 0, generation).encode()

    world.dd.answer_questions(messages.LOOKUP, lambda _: messages.Run([], [generation]).encode())
    world.dd.answer_questions(messages.SAVE, save)


def test_an_answer_that_names_a_third_cluster_is_of_the_store_and_a_forged_hit_is_refused() -> None:
    with family_of() as family:
        third, fake = listening(family, "third", 7), listening(family, "fake", STORE)
        engine = family.engine(fake)
        assert engine.do(dial, third.port, 7) == "LLM_SUCCESS"
        foreign = third.do(lend_to, engine.cluster_id)
        before = engine.do(show, "kv")
        fake.do(answer_lookups, foreign)
        assert engine.do(e.look_up, keys_of(1)) == 1
        assert engine.do(cluster_of_hit) == STORE
        engine.do(e.release)
        with pytest.raises(ParamError, match=r"of cluster 7.*has a grant not of the store at"):
            engine.do(load_forged, foreign)
        for was, now in zip(before, engine.do(show, "kv"), strict=True):
            assert (was == now).all()
        assert third.do(is_active)


def cluster_of_hit(world: World) -> int:
    """Return the cluster of a hit, whose token is not what the answer says either."""
    (grant,) = world.memory["hit"].grants
    assert grant.token != TOKEN
    return int(grant.cluster_id)


def lend_to(world: World, peer: int) -> bytes:
    world.memory["lent"] = grant = world.caches["kv"].grant([0], None, peer=peer, token=TOKEN)
    return grant.to_bytes()


def is_active(world: World) -> bool:
    return bool(world.memory["lent"].active)


def load_forged(world: World, grant: bytes) -> None:
    """Load a copy of a hit that a third cluster's grant was put into."""
    own = Grant.from_bytes(grant)
    owner, rest = (own.cluster_id, own.incarnation, own.token), (bytes(16), bytes(16), shape_of(world.caches["kv"]))
    found = messages.Found(own.cache_id, own.guard, bytes(8), *rest, owner)
    forged = Hit.from_bytes(messages.HitCopy(NS, [found]).encode())
    world.memory["client"].load(forged, world.caches["kv"], [0])


def late_answers(world: World) -> None:
    """Be a store that answers no lookup of keys."""
    asked = world.memory["asked"] = []

    def leave(question: Any) -> bytes | None:
        if not messages.decode(messages.Lookup, question.body, "x").keys:
            return nothing(question)
        asked.append(question)
        return None

    world.dd.answer_questions(messages.LOOKUP, leave)


def look_up_often(world: World, port: int, count: int) -> int:
    options = StoreOptions(store_id=STORE, lookup_ms=20, pause_seconds=3600.0)
    with StoreClient(world.dd, f"127.0.0.1:{port}", NS, options) as client:
        assert client.connect(20)
        return sum(len(client.lookup(keys_of(1))) for _ in range(count))


def test_a_client_leaves_a_store_alone_after_five_late_answers_in_a_row_not_after_one() -> None:
    with family_of() as family:
        store = listening(family, "store", STORE)
        store.do(late_answers)
        engine = family.engine(store)
        assert engine.do(look_up_often, store.port, 10) == 0
        wait_until(lambda: store.do(asked) == 5)


def odd_calls(world: World) -> list[str]:
    """Make odd calls; return those that raise nothing, or something untyped."""
    client, nan, inf = world.memory["client"], float("nan"), float("inf")
    calls: dict[str, Any] = {
        **{f"connect({each})": lambda each=each: client.connect(each) for each in ("x", nan, inf, -1, None, 10**400)},
        **{f"events({each})": lambda each=each: client.events(each) for each in (0, -1, "x", None)},
        **{
            f"pause_seconds={each}": lambda each=each: StoreOptions(pause_seconds=each)
            for each in (nan, inf, -1, 10**400, "1")
        },
        **{
            f"StoreClient({each})": lambda each=each: StoreClient(each, "127.0.0.1:1", NS)
            for each in (None, 5, world.cm)
        },
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except (TypeError, LLMException):
            continue
        except Exception as error:  # noqa: BLE001 (what the test looks for)
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(name)
    assert client.events(NO_EVENTS).follows
    return wrong


def test_odd_arguments_of_a_client_raise_typed_errors() -> None:
    with family_of() as family:
        engine = family.engine(family.store())
        assert engine.do(odd_calls) == []
