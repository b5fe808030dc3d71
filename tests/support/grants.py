"""What the tests of grants send to an end: giving, claiming and pulling by name, also in a forked child."""

import json
import os
import warnings
from collections.abc import Callable
from typing import Any, Final

from llm_datadist.metrics import GrantStatistics
from llm_datadist.types.grant import Grant
from tests.support.moves import BLOCKS
from tests.support.world import World, make_config

LONG: Final = 600.0


def grant(world: World, blocks: list[int], ttl: float = LONG, of: str = "kv", token: bytes | None = None) -> bytes:
    """Grant blocks of a cache; return the grant as bytes. The end keeps it as "grant", and by its token."""
    world.memory["grant"] = granted = world.caches[of].grant(blocks, ttl, token=token)
    world.memory[granted.token.hex()] = granted
    return granted.to_bytes()


def claim(world: World, token: bytes, readers: int = 1, cluster_id: int = 1, wait: bool = True) -> None:
    """Claim a grant, which is kept as "claimed"."""
    world.memory["claimed"] = world.cm.claim_grant(cluster_id, token, readers, wait=wait)


def pull_claimed(world: World, src: list[int], dst: list[int]) -> None:
    world.cm.pull_blocks(BLOCKS, world.caches["kv"], src, dst, grant=world.memory["claimed"])


def pull(world: World, data: bytes, src: list[int], dst: list[int], key: Any = BLOCKS) -> None:
    world.cm.pull_blocks(key, world.caches["kv"], src, dst, grant=Grant.from_bytes(data))


def tell(world: World, name: str, verb: str, *args: Any) -> Any:
    """Call a method of a grant of this end, or look at it, by the name under which it is kept."""
    found = getattr(world.memory[name], verb)
    return found(*args) if callable(found) else found


def totals(world: World) -> GrantStatistics:
    return world.dd.statistics().grants


def _beside_an_own_instance(world: World) -> Grant:
    world.dd.init(make_config())
    return world.caches["kv"].grant([3], 0.01)


#: What a forked child tries with what it has a copy of; ``claimed`` is the grant at its reader.
AT_OWNER: Final[dict[str, Callable[[World], object]]] = {
    "grant": lambda world: world.caches["kv"].grant([3], 0.01),
    "grant, after init of its own": _beside_an_own_instance,
    "revoke": lambda world: tell(world, "grant", "revoke"),
    "renew": lambda world: tell(world, "grant", "renew", 0.001),
    **{verb: lambda world, verb=verb: tell(world, "grant", verb) for verb in ("claimed", "released", "active", "end")},  # type: ignore[misc]
}


def at_owner(world: World, name: str) -> tuple[str, str]:
    return in_child(world, AT_OWNER[name])


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
