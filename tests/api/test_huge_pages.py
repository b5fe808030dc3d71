"""Pools of huge pages (`"huge_pages": true`): the same transfers, and `init` fails where the host gives none."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.errors import LLMException, OutOfMemory, ParamError
from tests.support.ends import ChildEnd
from tests.support.huge import HUGE, given, mapped_huge, without_huge_pages
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show
from tests.support.seccomp import fail, known
from tests.support.world import make_config

if TYPE_CHECKING:
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("llm.MemPoolConfig", "llm.HostMemPoolConfig")
POOL = json.dumps({"memory_size": 4 * HUGE, "page_shift": 12, "huge_pages": True})
SMALL = json.dumps({"memory_size": 4 * HUGE, "page_shift": 12})
#: Blocks that cross the border of two huge pages.
SPEC = Spec(3, 8, 200_000, blocks=True, blocks_key=BLOCKS)
PAIRS = [(1, 6), (4, 0), (7, 7)]


def huge(world: World) -> tuple[int, int]:
    return mapped_huge("device"), mapped_huge("host")


@pytest.mark.skipif(not given(), reason="this host gives no huge pages to shared memory")
@pytest.mark.parametrize("prefault", ["0", "1"])
def test_blocks_come_and_go_and_peers_map_the_pool_as_huge_pages(pair: Pair, prefault: str) -> None:
    extra = {"llm.PoolPrefault": prefault}
    settings: dict[str, Any] = {"mem_pool_cfg": POOL, "host_mem_pool_cfg": SMALL, "extra": extra}
    pair.start(rca=True, **settings)
    theirs, ours = pair.prompt.do(make, "kv", SPEC, 1), pair.decoder.do(make, "kv", SPEC, 2)
    numbers = [source for _, source in PAIRS], [there for there, _ in PAIRS]
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), *numbers)
    ours = moved(ours, theirs, PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), ours)
    pair.decoder.do(call, "push_blocks", BLOCKS, Use("kv"), *numbers)
    theirs = moved(theirs, ours, PAIRS)
    same_bytes(pair.prompt.do(show, "kv"), theirs)
    own = 4 * HUGE if pair.transport != "inproc" else 8 * HUGE  # two pools in one process
    for end in (pair.prompt, pair.decoder):
        device, host = end.do(huge)
        assert host == 0
        assert device >= own
    if pair.transport == "shm":
        assert pair.decoder.do(huge)[0] > own  # what it has touched of the peer's


def start_in_vain(world: World, options: dict[str, str]) -> tuple[LLMStatusCode, str]:
    without_huge_pages()
    with pytest.raises(ParamError, match="huge_pages") as refused:
        world.start("DECODER", 2, options)
    world.dd.init(make_config())  # nothing is left of the first: it can be initialised still
    return refused.value.status_code, str(refused.value)


@pytest.mark.parametrize("option", ["mem_pool_cfg", "host_mem_pool_cfg"])
def test_init_fails_where_the_host_gives_none_and_leaves_nothing(option: str) -> None:
    end = ChildEnd("without huge pages")  # of its own: the setting stays with the process
    code, text = end.do(start_in_vain, make_config(**{option: POOL}))
    end.stop()
    end.close()
    assert code is LLMStatusCode.LLM_PARAM_INVALID
    assert ("'device'" if option == "mem_pool_cfg" else "'host'") in text


def start_where_collapsing_fails(world: World, options: dict[str, str], code: int) -> tuple[type, str]:
    fail("madvise", code, third=25)  # MADV_COLLAPSE
    with pytest.raises(LLMException, match="huge") as failed:
        world.start("DECODER", 2, options)
    world.dd.init(make_config())
    return failed.type, str(failed.value)


@pytest.mark.skipif(not given() or not known(), reason="no huge pages here, or a machine whose calls are not known")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EINVAL, ParamError),
        (errno.EPERM, ParamError),
        (errno.ENOMEM, OutOfMemory),
        (errno.EMFILE, LLMException),
        (errno.EIO, LLMException),
    ],
)
def test_each_failure_of_the_kernel_has_a_type_and_is_named(code: int, expected: type) -> None:
    end = ChildEnd("failing madvise")
    raised, text = end.do(start_where_collapsing_fails, make_config(mem_pool_cfg=POOL), code)
    end.stop()
    end.close()
    assert raised is expected
    assert f"[Errno {code}]" in text
