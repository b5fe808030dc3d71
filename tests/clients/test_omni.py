"""omni-infer with dynamic and with static links, and omni-npu."""

import itertools
import json
from ipaddress import IPv4Address
from typing import Any, Final, NamedTuple

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist import LLMStatusCode as Code
from tests.clients.kv import Kind, holds, kv, options, play
from tests.support.kinds import ChildEnd, Processes, World
from tests.support.linking import info, links
from tests.support.moves import moved, picture, same_bytes, wait_until
from tests.support.ranks import host

#: K, V and rope of a manager: the position is the model id.
KINDS: Final = (Kind(4, 40, (160,), DataType.DT_BF16),) * 3
BLOCKS: Final = [5, 6, 7, 30, 2], [0, 1, 11, 10, 39]
#: ip (32 bits), port (16), tensor parallel size (16): all 64 bits are in use.
PROMPT, DECODER = (int(IPv4Address(ip)) << 32 | 26000 << 16 | 8 for ip in ("203.0.113.7", "198.51.100.9"))


#: An empty local_comm_res stands for CacheManager.
DYNAMIC: Any = {"enable_remote_cache_accessible": True, "local_comm_res": "", "sync_kv_timeout": 5000}


def dynamic(end: ChildEnd, cluster_id: int, seed: int, port: int = 0, kinds: Any = KINDS) -> int:
    """Start an end: only prompts listen, decoders give no key."""
    decoder = cluster_id == DECODER
    listen = {} if decoder else {"listen_ip_info": f"127.0.0.1:{port}"}
    given = options(**DYNAMIC, **listen)
    found: int = play((end, "start", "DECODER" if decoder else "PROMPT", cluster_id, given, kinds, seed, not decoder))
    return found


def force_unlink(end: ChildEnd, *cluster_ids: int) -> None:
    """By id alone; also of what is dead or was never linked."""
    play((end, "unlink_clusters", [info(each, local=None) for each in cluster_ids], 5000, True))


def pulled_again(end: ChildEnd, port: int) -> None:
    """What the client does after a failure: force-unlink, link again and pull once more."""
    force_unlink(end, PROMPT)
    play((end, "link_clusters", [info(PROMPT, port)], 5000))
    assert play((end, "pull", PROMPT, *BLOCKS)) is Code.LLM_SUCCESS


@pytest.fixture
def two(ends: tuple[ChildEnd, ChildEnd]) -> tuple[ChildEnd, ChildEnd, int]:
    """A prompt (seed 10) and a decoder (seed 20), not linked, and the prompt's port."""
    port = dynamic(ends[0], PROMPT, 10)
    dynamic(ends[1], DECODER, 20)
    return *ends, port


@pytest.mark.covers("omni-infer, dynamic")
def test_after_a_failure_unlink_by_force_link_again_and_one_more_pull(two: tuple[ChildEnd, ChildEnd, int]) -> None:
    prompt, decoder, port = two
    assert min(PROMPT, DECODER) > 2**63
    play((decoder, "link_clusters", [info(PROMPT, port)], 5000))
    for _ in range(2):
        assert play((decoder, "pull", PROMPT, *BLOCKS)) is Code.LLM_SUCCESS
    # The prompt is asleep in the middle of its topology change; it keeps the old entity of the link all the time.
    assert play((prompt, "unregister"), (decoder, "pull", PROMPT, *BLOCKS)) is Code.LLM_KV_CACHE_NOT_EXIST
    assert decoder.do(links) == {PROMPT: "ready"}
    holds(decoder, KINDS, 20, (10, *BLOCKS))
    play((prompt, "register", KINDS, 30, True))
    pulled_again(decoder, port)
    holds(decoder, KINDS, 20, (30, *BLOCKS))
    wait_until(lambda: prompt.do(links) == {DECODER: "ready"})
    # The prompt has dropped its side by force: a pull fails, unless it comes first; the next is on a new link.
    force_unlink(prompt, DECODER)
    play((decoder, "pull", PROMPT, *BLOCKS))
    pulled_again(decoder, port)
    holds(decoder, KINDS, 20, (30, *BLOCKS))


@pytest.mark.covers("omni-infer, dynamic")
def test_force_unlink_by_bare_id_is_a_success(processes: Processes, two: tuple[ChildEnd, ChildEnd, int]) -> None:
    prompt, decoder, port = two
    for ids in ([PROMPT, 2**64 - 1, 0], [PROMPT, 12345]):
        force_unlink(decoder, *ids)
        pulled_again(decoder, port)
    # A new process with the same id: a failed pull finds it out, or its new timestamp.
    for seed in (40, 50):
        processes.kill(prompt)
        prompt = processes.child(f"prompt of {seed}")
        dynamic(prompt, PROMPT, seed, port)
        if seed == 40:
            assert play((decoder, "pull", PROMPT, *BLOCKS)) is not Code.LLM_SUCCESS
        pulled_again(decoder, port)
        holds(decoder, KINDS, 20, (seed, *BLOCKS))
        assert decoder.do(links) == {PROMPT: "ready"}
    processes.kill(prompt)
    for _ in range(2):
        force_unlink(decoder, PROMPT)
        assert decoder.do(links) == {}
    with pytest.raises(AssertionError, match="LLM_LINK_FAILED"):
        play((decoder, "link_clusters", [info(PROMPT, port)], 5000))
    holds(decoder, KINDS, 20, (50, *BLOCKS))


@pytest.mark.covers("omni-npu")
def test_sleep_mode_the_prompts_object_is_initialised_again(two: tuple[ChildEnd, ChildEnd, int]) -> None:
    prompt, decoder, port = two
    given = options(**DYNAMIC, listen_ip_info="127.0.0.1:0")
    for nap in range(3):
        play((decoder, "link_clusters", [info(PROMPT, port)], 5000), (decoder, "pull", PROMPT, *BLOCKS))
        holds(decoder, KINDS, 20 + nap, (10 + 100 * nap, *BLOCKS))
        play((decoder, "unlink_clusters", [info(PROMPT, port)], 5000), (decoder, "unregister"), (prompt, "finalize"))
        assert decoder.do(picture).caches.registered == 0
        with pytest.raises(AssertionError, match="LLM_LINK_FAILED"):
            play((decoder, "link_clusters", [info(PROMPT, port)], 5000))
        play((prompt, "init", given), (prompt, "register", KINDS, 110 + 100 * nap, True))
        port = prompt.do(_port)
        play((decoder, "register", KINDS, 21 + nap, False))


def _port(world: World) -> int:
    assert world.dd.listen_port is not None
    return world.dd.listen_port


def register_parts(world: World, parts: list[tuple[int, int]]) -> None:
    """Keyless caches over parts of the tensors of model 0."""
    world.memory["parts"] = [
        world.cm.register_blocks_cache(
            CacheDesc(last - first, [40, 160], DataType.DT_BF16),
            [tensor.ctypes.data for tensor in kv(world)[0][first:last]],
        )
        for first, last in parts
    ]


def pull_part(world: World, part: int, cluster_id: int) -> None:
    world.cm.pull_blocks(BlocksCacheKey(cluster_id, 0), world.memory["parts"][part], *BLOCKS)


def unregister_parts(world: World) -> None:
    for cache in world.memory["parts"]:
        world.cm.unregister_cache(cache.cache_id)


@pytest.mark.covers("omni-npu")
def test_overlapping_keyless_caches_over_parts_of_the_tensors_registered_after_linking(processes: Processes) -> None:
    parts = [(0, 2), (2, 4), (1, 3), (0, 4)]  # two topologies and the whole: every address is in three caches
    decoder = processes.child("decoder")
    dynamic(decoder, DECODER, 20)
    for stage, (first, last) in enumerate(parts):  # each has its own layers only
        kinds = [kind._replace(tensors=last - first) for kind in KINDS]
        port = dynamic(processes.child(f"stage {stage}"), PROMPT + stage, 50 + 10 * stage, kinds=kinds)
        play((decoder, "link_clusters", [info(PROMPT + stage, port)], 5000))
    decoder.do(register_parts, parts)
    expected = [kind.held(20 + model_id) for model_id, kind in enumerate(KINDS)]
    for stage, (first, last) in enumerate(parts):
        decoder.do(pull_part, stage, PROMPT + stage)
        source = KINDS[0]._replace(tensors=last - first).held(50 + 10 * stage)
        tensors = [(first + t, t) for t in range(last - first)]
        expected[0] = moved(expected[0], source, zip(BLOCKS[1], BLOCKS[0], strict=True), tensors)
        same_bytes(decoder.do(kv)[0], expected[0])
    decoder.do(unregister_parts)  # another topology; the caches of all layers stay
    assert decoder.do(picture).caches.registered == len(KINDS)
    decoder.do(register_parts, [(3, 4)])
    decoder.do(unregister_parts)
    for found, wanted in zip(decoder.do(kv), expected, strict=True):
        same_bytes(found, wanted)


class Rank(NamedTuple):
    """One process, or one die of it: its cluster id, its address, its rank in its group, the seed of its memory."""

    cluster_id: int
    host_ip: str
    rank: int
    seed: int


def joining(prompt: Rank, decoder: Rank) -> tuple[str, dict[int, int], str]:
    """Return the arguments of link(): a server for each end, also where both are on one host."""
    servers = [
        {
            "server_id": each.host_ip,
            "device": [{"device_id": str(each.rank), "device_ip": each.host_ip, "rank_id": str(rank_id)}],
            "host_ip": each.host_ip,
        }
        for rank_id, each in enumerate((prompt, decoder))
    ]
    table = {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}
    name = f"{prompt.host_ip}-{prompt.cluster_id}-{decoder.host_ip}-{decoder.cluster_id}-p{prompt.rank}-d{decoder.rank}"
    return name, {prompt.cluster_id: 0, decoder.cluster_id: 1}, json.dumps(table)


@pytest.mark.covers("omni-infer, static", "what all have in common")
def test_34_pairs_begun_at_once_all_become_ready_and_two_ranks_serve_one_decoder(processes: Processes) -> None:
    """34 prompts in two processes and two decoders; none listens."""
    prompts = [Rank(2**63 + number, host(number % 2), number, 100 * number) for number in range(34)]
    decoders = [Rank(2**64 - 2 - number, host(number), number, 5 + number) for number in range(2)]
    serving, pulling = ([processes.child(f"{name} {at}") for at in range(2)] for name in ("prompts", "decoder"))
    mode = {"enable_switch_role": True, "enable_cache_manager": True, "enable_remote_cache_accessible": True}
    given = options(**mode, sync_kv_timeout=20_000)
    everyone = [("PROMPT", rank, serving[rank.rank % 2]) for rank in prompts]
    everyone += [("DECODER", rank, pulling[rank.rank]) for rank in decoders]
    for role, rank, end in everyone:
        play((end, "start", role, rank.cluster_id, given, KINDS, rank.seed, role == "PROMPT"))
    ids: dict[tuple[Rank, Rank], int] = {}
    for role, rank, end in everyone:
        for other in decoders if role == "PROMPT" else prompts:
            arguments = joining(rank, other) if role == "PROMPT" else joining(other, rank)
            ids[rank, other] = play((end, "use", rank.cluster_id), (end, "link", *arguments))
    for (rank, _), comm_id in ids.items():
        end = next(end for _, each, end in everyone if each is rank)
        play((end, "use", rank.cluster_id), (end, "ready", comm_id))
    for role, rank, end in everyone:
        others = decoders if role == "PROMPT" else prompts
        play((end, "use", rank.cluster_id))
        assert end.do(links) == {other.cluster_id: "ready" for other in others}
    pulls: list[list[Any]] = [[], []]
    halves = [(0, 0, [2, 3, 4, 5, 38]), (0, 1, BLOCKS[1])]  # two prompt ranks for one decoder: each has half
    for at, number, dst in [*itertools.product((0, 1), (0, 17, 33), [BLOCKS[1]]), *halves]:
        play((pulling[at], "pull", prompts[number].cluster_id, BLOCKS[0], dst))
        pulls[at].append((100 * number, BLOCKS[0], dst))
        holds(pulling[at], KINDS, 5 + at, *pulls[at])
    for _, rank, end in everyone[:34]:
        play((end, "use", rank.cluster_id))
        holds(end, KINDS, rank.seed)
    for _, rank, end in everyone:
        play((end, "use", rank.cluster_id), (end, "finalize"))
