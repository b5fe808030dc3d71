"""The store pulls under grants of the client that asks, and under no other."""

import pytest

from llm_datadist.errors import LLMException
from llm_datadist.store import messages
from llm_datadist.store.client import shape_of
from tests.store import engines as e
from tests.support.world import World

KEY = e.keys_of(1)[0]


def lend(world: World, block: int) -> bytes:
    """Return a grant for the store, as a save gives it."""
    grant = world.memory["lent"] = world.caches["kv"].grant([block], None, peer=1)
    return grant.to_bytes()


def end_loan(world: World) -> None:
    world.memory.pop("lent").revoke()


def ask_to_save(world: World, block: int, grant: bytes) -> int:
    body = messages.Save([e.NS], 0, e.generation(world), shape_of(world.caches["kv"]), [KEY], [block], grant).encode()
    return messages.decode(messages.Done, world.dd.ask(1, messages.SAVE, body), "the store").count


def test_a_client_cannot_have_the_store_pull_what_another_client_lends_it() -> None:
    with e.family_of() as family:
        store = family.store()
        owner, thief = family.engine(store), family.engine(store)
        owner.do(e.put, [KEY], [3])
        grant = owner.do(lend, 3)
        with pytest.raises(LLMException, match=f"sent a grant of cluster {owner.cluster_id}"):
            thief.do(ask_to_save, 3, grant)
        assert thief.do(e.look_up, [KEY]) == 0
        assert owner.do(ask_to_save, 3, grant) == 1
        assert thief.do(e.hits, [KEY]) == 1
        owner.do(end_loan)


def test_a_client_cannot_have_the_store_pull_blocks_that_it_has_not_lent() -> None:
    with e.family_of() as family:
        store = family.store()
        client = family.engine(store)
        grant = client.do(lend, 3)
        with pytest.raises(LLMException, match="grant"):
            client.do(ask_to_save, 4, grant)
        client.do(end_loan)
        with pytest.raises(LLMException, match="revoked"):
            client.do(ask_to_save, 3, grant)
        assert not any(store.do(e.index).values())
        assert store.do(e.statistics).namespaces[0].filling == 0
