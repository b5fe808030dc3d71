"""A forked child has copies of its parent's handles: it can give, renew or end nothing, and writes no shared memory."""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import BlocksCacheKey
from llm_datadist.types.grant import Grant
from llm_datadist.views import tensor_views
from tests.api.test_grants import grant, pull
from tests.support.moves import BLOCKS, Spec, make, moved, picture, same_bytes, show
from tests.support.world import make_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "Cache.grant", "Grant: active claimed end release released renew revoke to_bytes", "errors.StateError"
)

PAGED: Final = Spec(blocks=True, blocks_key=BLOCKS)
OTHER: Final = BlocksCacheKey(1, 7)
TOKEN: Final = b"forked reader 16"


def grant_beside_an_own_instance(world: World) -> Grant:
    world.dd.init(make_config())
    return world.caches["kv"].grant([3], 0.01)


#: What a child tries with what it has a copy of; ``claimed`` is the grant at its reader.
AT_OWNER: Final[dict[str, Callable[[World], object]]] = {
    "grant": lambda world: world.caches["kv"].grant([3], 0.01),
    "grant, after init of its own": grant_beside_an_own_instance,
    "revoke": lambda world: world.memory["grant"].revoke(),
    "renew": lambda world: world.memory["grant"].renew(0.001),
    "claimed": lambda world: world.memory["grant"].claimed(),
    "released": lambda world: world.memory["grant"].released(),
    "active": lambda world: world.memory["grant"].active,
    "end": lambda world: world.memory["grant"].end,
}


def in_child(world: World, call: Callable[[World], object]) -> tuple[str, str]:
    """Fork in this process, whose threads go on; return the type and the text of what the child's call raises."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        try:
            outcome: Any = ["returned", repr(call(world))]
        except BaseException as error:  # noqa: BLE001 (it is judged by the parent)
            outcome = [type(error).__name__, str(error)]
        os.write(writing, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        kind, text = json.load(answer)
    assert os.waitpid(child, 0)[1] == 0
    return kind, text


def at_owner(world: World, name: str) -> tuple[str, str]:
    return in_child(world, AT_OWNER[name])


def release_in_child(world: World) -> tuple[str, str]:
    return in_child(world, release)


def offer(world: World) -> None:
    world.memory["grant"] = world.caches["kv"].grant([1, 2], 600.0, token=TOKEN)


def claim(world: World) -> None:
    world.memory["claimed"] = world.cm.claim_grant(1, TOKEN)


def pull_claimed(world: World) -> None:
    world.cm.pull_blocks(BLOCKS, world.caches["kv"], [2], [6], grant=world.memory["claimed"])


def release(world: World) -> None:
    world.memory["claimed"].release()


def state(world: World) -> tuple[bool, bool, str]:
    held: Grant = world.memory["grant"]
    return held.active, held.claimed(), held.end


@pytest.mark.parametrize("name", AT_OWNER)
def test_a_forked_child_of_the_owner_gives_renews_and_ends_no_grant(shm_pair: Pair, name: str) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    src, dst = prompt.do(make, "kv", PAGED, 1), decoder.do(make, "kv", Spec(blocks=True), 2)
    data, before = prompt.do(grant, [1, 2]), prompt.do(picture)
    kind, text = prompt.do(at_owner, name)
    assert (kind, "fork" in text, text.startswith(name.partition(",")[0])) == ("StateError", True, True), text
    assert prompt.do(picture) == before  # which checks the guards in the shared table, too
    prompt.do(make, "later", Spec(blocks=True, blocks_key=OTHER), 3)  # in the slot that a child would have taken
    decoder.do(pull, data, [1], [4])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(4, 1)]))
    prompt.do(revoke)
    assert prompt.do(picture).grants.revoked == 1


def revoke(world: World) -> None:
    world.memory["grant"].revoke()


def test_a_forked_child_of_the_reader_releases_nothing(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    src, dst = prompt.do(make, "kv", PAGED, 1), decoder.do(make, "kv", Spec(blocks=True), 2)
    prompt.do(offer)
    decoder.do(claim)
    kind, text = decoder.do(release_in_child)
    assert (kind, "fork" in text, text.startswith("release")) == ("StateError", True, True), text
    assert prompt.do(state) == (True, True, "")
    decoder.do(pull_claimed)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(6, 2)]))
    decoder.do(release)


def test_a_grant_that_a_forked_child_has_is_a_copy_as_in_any_message(shm_pair: Pair) -> None:
    shm_pair.start(linked=False)
    shm_pair.prompt.do(make, "kv", PAGED, 1)
    data = shm_pair.prompt.do(grant, [1, 2])
    assert shm_pair.prompt.do(copied) == ("returned", repr((data.hex(), [1, 2])))


def copied(world: World) -> tuple[str, str]:
    def look(world: World) -> tuple[str, list[int]]:
        held: Grant = world.memory["grant"]
        assert tensor_views(world.caches["kv"])[0].any()
        return held.to_bytes().hex(), sorted(Grant.from_bytes(held.to_bytes()).blocks)

    return in_child(world, look)
