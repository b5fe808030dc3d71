"""Layers of one destination go to one place: a peer that is initialised anew midway, a key that moves, memory of a pool
that is reused, never make a transfer whole that is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, TransferConfig
from tests.faults.gates import Gate
from tests.support.gates import open_there, shut_there
from tests.support.layers import FAILED, OK, addresses, begin, finish, keyed, raw, ready, received, send, wait_asked
from tests.support.linking import alone
from tests.support.memory import pool
from tests.support.moves import Spec, forget, make, picture, same_bytes, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.world import World

KEY = BlocksCacheKey(1, 0)
BLOCKS = Spec(6, 4, 48, blocks=True, blocks_key=KEY)
SOURCE = Spec(6, 4, 48, blocks=True)


def first_layer_sent(pair: Pair, config: Any) -> None:
    """Send layer 0 of "kv" of the decoder, and stand before layer 1."""
    pair.decoder.do(begin, "kv", [config])
    pair.decoder.do(ready, 0)
    pair.decoder.do(wait_asked, 1)


def refused_midway(decoder: End, text: str) -> None:
    decoder.do(ready, 1, 2)
    result = decoder.do(finish)
    assert (result.results, result.first) == ([FAILED], FAILED), result
    assert text in result.errors[0]
    assert "send all of it again" in result.errors[0]


@pytest.mark.parametrize("by", ["key", "id"])
def test_a_peer_that_is_initialised_anew_does_not_get_the_rest(pair: Pair, by: str) -> None:
    pair.start(rca=True)
    pair.prompt.do(make, "kv", BLOCKS, 1)
    pair.decoder.do(make, "kv", SOURCE, 2)
    config = keyed(pair.prompt, "kv", range(3), dst_row=None if by == "key" else 0)
    first_layer_sent(pair, config)
    before = again(pair, rca=True)
    assert pair.prompt.do(cache_id_of, "kv") == 1, "the same name means the new one"
    refused_midway(pair.decoder, "initialised anew")
    same_bytes(received(pair.prompt), before)
    assert pair.decoder.do(send, "kv", [config]).first is OK


def again(pair: Pair, *, rca: bool = False, transport: str | None = None) -> Any:
    """Finalize the prompt, initialise it again with a cache like the one before, link; return the cache's bytes."""
    pair.prompt.stop()
    alone(pair.decoder)
    settings = {"enable_remote_cache_accessible": True} if rca else {}
    extra = {"llm.Transport": transport or pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **settings)
    before = pair.prompt.do(make, "kv", BLOCKS, 7)
    pair.link()
    return before


def cache_id_of(world: World, name: str) -> int:
    return world.caches[name].cache_id


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_by_address_a_peer_that_is_initialised_anew_does_not_get_the_rest(shm_pair: Pair, transport: str) -> None:
    """Its memory lies where it lay: it is memory of the user."""
    shm_pair.start(extra={"llm.Transport": transport})
    shm_pair.prompt.do(allocate_and_register, 1)
    shm_pair.decoder.do(make, "kv", SOURCE, 2)
    config = raw(shm_pair.prompt, "kv")
    first_layer_sent(shm_pair, config)
    shm_pair.prompt.do(stop_but_keep)
    alone(shm_pair.decoder)
    extra = {"llm.Transport": transport}
    shm_pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    shm_pair.prompt.do(register_kept)
    shm_pair.link()
    before = received(shm_pair.prompt)
    # Another transfer has been told where its addresses lie: the leave to write is there.
    assert shm_pair.decoder.do(send, "kv", [TransferConfig(1, config.dst_addrs[:2], range(1))]).first is OK
    shm_pair.prompt.do(fill_again)
    refused_midway(shm_pair.decoder, "initialised anew")
    same_bytes(received(shm_pair.prompt), before)


def allocate_and_register(world: World, seed: int) -> None:
    make(world, "kv", Spec(6, 4, 48, memory="private"), seed)


def stop_but_keep(world: World) -> None:
    """Finalize; the user's memory lives on."""
    kept = world.memory["kv"]
    world.stop()
    world.memory["kept"] = kept


def register_kept(world: World) -> None:
    arrays = world.memory.pop("kept")
    world.memory["kv"] = arrays
    world.memory["was"] = [array.copy() for array in arrays]
    world.caches["kv"] = world.cm.register_cache(Spec(6, 4, 48).desc, [array.ctypes.data for array in arrays])


def fill_again(world: World) -> None:
    for array, was in zip(world.memory["kv"], world.memory["was"], strict=True):
        array[:] = was


def test_a_key_that_moves_to_another_cache_does_not_take_the_rest_along(pair: Pair) -> None:
    pair.start(rca=True)
    pair.prompt.do(make, "kv", BLOCKS, 1)
    pair.decoder.do(make, "kv", SOURCE, 2)
    config = keyed(pair.prompt, "kv", range(3))
    first_layer_sent(pair, config)
    pair.prompt.do(forget, "kv")
    before = pair.prompt.do(make, "kv", BLOCKS, 7)
    refused_midway(pair.decoder, "bound anew")
    same_bytes(received(pair.prompt), before)
    assert pair.decoder.do(send, "kv", [config]).first is OK


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("was", ["pool", "inside"])
def test_r07_by_address_memory_of_a_pool_that_is_reused_is_not_written(
    shm_pair: Pair, transport: str, was: str
) -> None:
    """The addresses are those of another cache now, of another request."""
    shm_pair.start(extra={"llm.Transport": transport})
    shm_pair.prompt.do(make, "kv", Spec(6, 4, 48, memory=was), 1)
    shm_pair.decoder.do(make, "kv", SOURCE, 2)
    config = raw(shm_pair.prompt, "kv")
    first_layer_sent(shm_pair, config)
    where = shm_pair.prompt.do(addresses, "kv")
    shm_pair.prompt.do(give_back, "kv")
    wait_until(lambda: shm_pair.prompt.do(pool).used_bytes == 0)  # the pin of the first layer may still be on its way
    before = shm_pair.prompt.do(make, "kv", Spec(6, 4, 48), 7)
    assert shm_pair.prompt.do(addresses, "kv") == where
    refused_midway(shm_pair.decoder, "allocated anew")
    same_bytes(received(shm_pair.prompt), before)
    assert shm_pair.decoder.do(send, "kv", [config]).first is OK, "a transfer that begins now may go there"


def give_back(world: World, name: str) -> None:
    """Give a cache back, and what it was registered in."""
    under = world.caches.get(f"memory of {name}")
    forget(world, name)
    if under is not None:
        world.cm.deallocate_blocks_cache(under)


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_r07_by_address_what_the_sender_may_still_write_is_not_given_to_anybody(
    shm_pair: Pair, tmp_path: Path, blocks: bool
) -> None:
    """The sender stands before its copy, over cma and without remote cache access, when the owner frees the cache."""
    shm_pair.start(extra={"llm.Transport": "auto"})
    shm_pair.prompt.do(make, "kv", Spec(6, 4, 48, blocks=blocks), 1)
    shm_pair.decoder.do(make, "kv", SOURCE, 2)
    where = shm_pair.prompt.do(addresses, "kv")
    shm_pair.decoder.do(shut_there, "before write", tmp_path, 1)
    shm_pair.decoder.do(begin, "kv", [raw(shm_pair.prompt, "kv")])
    shm_pair.decoder.do(ready, 0, 1, 2)
    Gate(tmp_path).wait()
    shm_pair.prompt.do(forget, "kv")
    kept = shm_pair.prompt.do(picture)
    assert (kept.quarantined_bytes > 0, kept.pins > 0) == (blocks, not blocks)
    before = shm_pair.prompt.do(make, "kv", Spec(6, 4, 48), 7)
    assert not set(where) & set(shm_pair.prompt.do(addresses, "kv"))
    Gate(tmp_path).open()
    assert shm_pair.decoder.do(finish).first is not OK
    shm_pair.decoder.do(open_there)
    same_bytes(received(shm_pair.prompt), before)
    wait_until(lambda: shm_pair.prompt.do(picture).quarantined_bytes == 0)
    wait_until(lambda: shm_pair.prompt.do(picture).pins == 0)
