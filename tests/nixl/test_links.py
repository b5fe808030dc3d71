"""Links over nixl as users make them: who may, what is said of them, and what comes when NIXL fails."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._transport.nixl import agent, bindings, messages, transport
from llm_datadist._transport.nixl.transport import NixlConnection
from llm_datadist._transport.nixl.worker import NixlWorker
from llm_datadist.errors import DeadlineExceeded, LLMException, TransferFailed
from tests.support.ends import ChildEnd, End
from tests.support.linking import SUCCESS, bytes_move_both_ways, explain, info, link, links_of, unlink
from tests.support.moves import Spec, Use, call, forget, make, moved, same_bytes, show, wait_until
from tests.support.pairs import Pair
from tests.support.users import USER, become
from tests.support.world import World

OVER_NIXL = {"llm.Transport": "nixl"}
KEY = BlocksCacheKey(1, 0)
PULL = ("pull_blocks", KEY, Use("kv"), [1, 6], [0, 3])
MOVED = [(0, 1), (3, 6)]


def start(pair: Pair, prompt: dict[str, str], decoder: dict[str, str], **settings: Any) -> None:
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=prompt, **settings)
    pair.decoder.start("DECODER", 2, extra=decoder, **settings)


def caches(pair: Pair) -> tuple[Any, Any]:
    """Return the contents of a new cache of blocks at each end: what a pull finds, and what it overwrites."""
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=KEY), 1)
    return source, pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def linked_over(end: End, peer: int) -> str:
    name: str = end.do(explain, peer).transport
    return name


# Done at an end


def patch(world: World) -> pytest.MonkeyPatch:
    kept: pytest.MonkeyPatch = world.memory.setdefault("patch", pytest.MonkeyPatch())
    return kept


def undo(world: World) -> None:
    world.memory.pop("patch").undo()
    forget_fabric()


def forget_fabric() -> None:
    agent.usable.cache_clear()
    agent.fabric.cache_clear()


def set_ucx(world: World, value: str) -> None:
    patch(world).setenv("UCX_TLS", value)
    forget_fabric()


def fake_rdma(world: World) -> None:
    """Let this end count as one with RDMA alone."""
    set_ucx(world, "rc")
    patch(world).setattr(transport, "fabric", lambda: "rdma")
    patch(world).setattr(transport, "usable", lambda fabric: "")


@contextmanager
def harmed(end: End, harm: Callable[[World], None]) -> Iterator[None]:
    end.do(harm)
    try:
        yield
    finally:
        end.do(undo)


def lose_nixl(world: World) -> None:
    """Behave as where NIXL is not installed."""
    patch(world).setattr(agent, "installed", lambda: False)
    forget_fabric()


def spoil_metadata(world: World) -> None:
    """Tell peers metadata as of another version of NIXL."""
    whole = agent.Agent.address

    def spoilt(self: agent.Agent, known: str) -> messages.Address:
        address = whole(self, "")
        return messages.Address(address.name, address.version, b"not metadata", "0.0.1")

    patch(world).setattr(agent.Agent, "address", spoilt)


def end_receiver(world: World) -> None:
    link_of(world, 2).connection.shared.server.pull_receiver.end()


def fail_transfers(world: World) -> None:
    """Let every transfer that this end starts fail inside NIXL."""

    def failing(self: agent.Agent, *_: object) -> None:
        raise bindings.NixlFailed("NIXL_ERR_BACKEND")

    patch(world).setattr(agent.Agent, "move", failing)


def hurry_owner(world: World) -> None:
    """Let the time of each request be over at the owner first, while its bytes move."""
    accept = NixlWorker.accept

    def hurried(self: NixlWorker, ask: Any, reply: Any) -> Any:
        return accept(self, msgspec.structs.replace(ask, budget_ms=50), reply)

    def waiting(self: agent.Agent, *arguments: Any) -> None:
        wait_until(lambda: not arguments[4]())  # which raises once it is to stop

    patch(world).setattr(NixlWorker, "accept", hurried)
    patch(world).setattr(agent.Agent, "move", waiting)


def load_nixl(world: World) -> None:
    """Load what another user may not be allowed to read."""
    assert (agent.usable("tcp"), bindings.package_version() != "?") == ("", True)


def link_of(world: World, peer: int) -> Any:
    return links_of(world).peek(peer)


def progress_seconds(world: World) -> float:
    (one,) = world.dd.statistics().links
    seconds: float = one.progress_seconds
    return seconds


# Choice


def test_forced_nixl_moves_bytes_both_ways_and_says_what_ucx_uses(tcp_pair: Pair) -> None:
    start(tcp_pair, OVER_NIXL, OVER_NIXL)
    tcp_pair.link()
    for end, peer in ((tcp_pair.prompt, 2), (tcp_pair.decoder, 1)):
        said = end.do(explain, peer)
        assert (said.transport, said.private_transport) == ("nixl", "nixl")
        assert "UCX uses tcp" in said.reason
    bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)
    before = tcp_pair.decoder.do(progress_seconds)
    assert before > 0.0
    bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)
    assert tcp_pair.decoder.do(progress_seconds) > before


def test_a_peer_cannot_choose_nixl_for_an_end_that_does_not_and_auto_takes_what_is_better(tcp_pair: Pair) -> None:
    """A peer that UCX has connected reaches all memory, and its metadata end the process."""
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    failed = LLMStatusCode.LLM_LINK_FAILED
    for mine, theirs in ((OVER_NIXL, {}), ({}, OVER_NIXL)):
        start(tcp_pair, theirs, mine)
        assert decoder.do(link, [info(1, prompt.port)]) == (failed, [failed])
        prompt.stop()
        decoder.stop()
    start(tcp_pair, {}, {})
    tcp_pair.link()
    assert {linked_over(prompt, 2), linked_over(decoder, 1)} == {"shm"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("admitted", [True, False])
def test_nixl_lets_in_another_user_only_where_both_ends_admit_it(four: list[ChildEnd], admitted: bool) -> None:
    """What UCX has connected reaches all memory."""
    owner, other = four[:2]
    other.do(load_nixl)
    other.do(become, USER)
    users = {owner: str(USER), other: "0"} if admitted else {owner: "7", other: "0"}
    for end, (role, number) in ((owner, ("PROMPT", 1)), (other, ("DECODER", 2))):
        end.start(role, number, listen_ip_info="127.0.0.1:0", extra=OVER_NIXL | {"llm.SameHostUsers": users[end]})
    failed = LLMStatusCode.LLM_LINK_FAILED
    if admitted:
        assert other.do(link, [info(1, owner.port)]) == SUCCESS
        bytes_move_both_ways(owner, other)
    else:
        for end, peer in ((other, info(1, owner.port)), (owner, info(2, other.port))):
            assert end.do(link, [peer]) == (failed, [failed])


def test_auto_takes_tcp_where_there_is_no_rdma_and_no_shared_memory(tcp_pair: Pair) -> None:
    """A policy by models keeps pools from being mapped, as another host would; only one end has it."""
    policy = json.dumps({"2": {"link": True, "pull": True, "models": [0]}})
    start(tcp_pair, {"llm.PeerPolicy": policy, "llm.Insecure": "1"}, {})
    tcp_pair.link()
    for end, peer in ((tcp_pair.prompt, 2), (tcp_pair.decoder, 1)):
        said = end.do(explain, peer)
        assert said.transport == "tcp"
        assert "not nixl: " in said.reason


def test_a_peer_without_nixl_is_refused_and_both_ends_say_why(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    failed = LLMStatusCode.LLM_LINK_FAILED
    with harmed(prompt, lose_nixl):
        with pytest.raises(LLMException, match="pip install") as caught:
            prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=OVER_NIXL)
        assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        start(tcp_pair, {}, OVER_NIXL)
        assert decoder.do(link, [info(1, prompt.port)]) == (failed, [failed])


@pytest.mark.parametrize("secret", [True, False], ids=["credentials", "policy"])
def test_nixl_is_refused_where_it_would_break_a_promise(tcp_pair: Pair, tmp_path: Path, secret: bool) -> None:
    """Its bytes are plain, and what UCX has connected reaches all memory."""
    secrets = tmp_path / "secrets"
    secrets.write_text("key1 " + "ab" * 32 + "\n")
    secrets.chmod(0o600)
    promise = {"llm.AuthSecretFile": str(secrets)} if secret else {"llm.PeerPolicy": "{}", "llm.Insecure": "1"}
    with pytest.raises(LLMException, match="unencrypted" if secret else "could not be kept"):
        tcp_pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=OVER_NIXL | promise)
    if secret:
        allowed = OVER_NIXL | promise | {"llm.NixlPlaintext": "1"}
        start(tcp_pair, allowed, allowed)
        tcp_pair.link()
        assert linked_over(tcp_pair.decoder, 1) == "nixl"
        bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)


@pytest.mark.parametrize(
    ("transports", "reason"),
    [(each, "shared memory") for each in ("all", "^ib", "tcp,cma", r"tcp,\posix", "")] + [("cuda_copy", "lacks tcp")],
)
def test_ucx_is_not_let_into_shared_memory(tcp_pair: Pair, transports: str, reason: str) -> None:
    with harmed(tcp_pair.prompt, partial(set_ucx, value=transports)), pytest.raises(LLMException, match=reason):
        tcp_pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=OVER_NIXL)


def test_bytes_move_with_any_transports_between_hosts_that_include_tcp(tcp_pair: Pair) -> None:
    with harmed(tcp_pair.prompt, partial(set_ucx, value="rc,ud_x,tcp,cuda_copy,cuda_ipc")):
        start(tcp_pair, OVER_NIXL, OVER_NIXL)
        tcp_pair.link()
        bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)
        assert "UCX uses rc,ud_x,tcp" in tcp_pair.prompt.do(explain, 2).reason


@pytest.mark.parametrize("transports", ["tcp", "rc,tcp", "ud_x", "cuda_copy"])
def test_other_transports_do_not_count_as_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transports: str
) -> None:
    """NIXL lets UCX_TLS win over what it is told."""
    monkeypatch.setenv("UCX_TLS", transports)
    (tmp_path / "device").touch()
    monkeypatch.setattr(agent, "_RDMA_DEVICES", tmp_path)
    forget_fabric()
    try:
        assert agent.usable("rdma") == f"UCX cannot use rdma: UCX_TLS={transports} is not RDMA alone"
        assert agent.fabric() == "tcp"
    finally:
        forget_fabric()
    monkeypatch.setenv("UCX_TLS", "rc_x,srd,dc,cuda_copy")
    assert bindings.ucx_transports("rdma") == "rc_x,srd,dc,cuda_copy"


def test_rdma_alone_refuses_a_peer_without_it(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    failed = LLMStatusCode.LLM_LINK_FAILED
    with harmed(prompt, fake_rdma):
        start(tcp_pair, OVER_NIXL, OVER_NIXL)
        assert decoder.do(link, [info(1, prompt.port)]) == (failed, [failed])


# Failures


def test_metadata_of_another_version_fail_the_transfer_and_the_link_goes_on(tcp_pair: Pair) -> None:
    start(tcp_pair, OVER_NIXL, OVER_NIXL, enable_remote_cache_accessible=True)
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    with harmed(prompt, spoil_metadata):
        tcp_pair.link()
        source, target = caches(tcp_pair)
        with pytest.raises(TransferFailed):
            decoder.do(call, "push_blocks", *PULL[1:])
        same_bytes(prompt.do(show, "kv"), source)
        decoder.do(call, *PULL)  # which needs nothing of the prompt's receiver
        same_bytes(decoder.do(show, "kv"), target := moved(target, source, MOVED))
    prompt.do(end_receiver)
    decoder.do(call, "push_blocks", *PULL[1:])
    same_bytes(prompt.do(show, "kv"), moved(source, target, MOVED))


@pytest.mark.parametrize("fallback", [True, False])
def test_what_nixl_fails_goes_over_tcp_where_that_is_allowed_and_is_said(tcp_pair: Pair, fallback: bool) -> None:
    extra = OVER_NIXL | ({"llm.NixlFallback": "1"} if fallback else {})
    start(tcp_pair, OVER_NIXL, extra)
    tcp_pair.link()
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    source, target = caches(tcp_pair)
    with harmed(prompt, fail_transfers):  # it is the owner that writes
        if fallback:
            decoder.do(call, *PULL)
            same_bytes(decoder.do(show, "kv"), moved(target, source, MOVED))
            assert "by tcp, because NIXL failed: at the peer: NIXL_ERR_BACKEND" in decoder.do(explain, 1).reason
        else:
            with pytest.raises(TransferFailed):
                decoder.do(call, *PULL)
            assert "because" not in decoder.do(explain, 1).reason
    decoder.do(call, *PULL)
    same_bytes(decoder.do(show, "kv"), moved(target, source, MOVED))
    # A link that is made anew begins with NIXL again.
    assert decoder.do(unlink, [info(1, 1)]) == SUCCESS
    tcp_pair.link()
    decoder.do(call, *PULL)
    assert "because" not in decoder.do(explain, 1).reason


def test_a_timeout_that_the_owner_notices_costs_one_call_and_not_the_link(tcp_pair: Pair) -> None:
    start(tcp_pair, OVER_NIXL, OVER_NIXL | {"llm.NixlFallback": "1", "llm.SyncKvCacheWaitTime": "60000"})
    tcp_pair.link()
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    source, target = caches(tcp_pair)
    with harmed(prompt, hurry_owner), pytest.raises(DeadlineExceeded):
        decoder.do(call, *PULL)
    decoder.do(call, *PULL)
    same_bytes(decoder.do(show, "kv"), moved(target, source, MOVED))
    assert "because" not in decoder.do(explain, 1).reason


def test_memory_that_was_registered_is_forgotten_by_the_agents(tcp_pair: Pair) -> None:
    start(tcp_pair, OVER_NIXL, OVER_NIXL)
    tcp_pair.link()
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    decoder.do(make, "kv", Spec(blocks=True, memory="private"), 2)
    for seed in (1, 5):
        source = prompt.do(make, "kv", Spec(blocks=True, blocks_key=KEY, memory="private"), seed)
        before = decoder.do(show, "kv")
        decoder.do(call, *PULL)
        same_bytes(decoder.do(show, "kv"), moved(before, source, MOVED))
        assert prompt.do(_registered, 2)
        prompt.do(forget, "kv")
        assert not prompt.do(_registered, 2)


def _registered(world: World, peer: int) -> bool:
    connection: NixlConnection = link_of(world, peer).connection.shared
    slots = connection.server.push_sender, connection.server.pull_receiver
    return any(slot.agent is not None and bool(slot.agent.others) for slot in slots)


def test_the_programs_logging_and_output_stay_as_they_were(tmp_path: Path) -> None:
    """NIXL's package configures logging when it is imported, which closes every handler; UCX writes to the output."""
    script = """
import logging, sys
logging.basicConfig(filename=sys.argv[1], filemode="w", level="INFO")
from llm_datadist._transport.nixl.agent import fabric, usable
assert usable(fabric()) == ""
logging.warning("still here")
"""
    environment = {key: value for key, value in os.environ.items() if key != "UCX_LOG_FILE"} | {"UCX_LOG_LEVEL": "info"}
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60, env=environment)
    assert (done.stdout, b"UCX" in done.stderr) == (b"", True)
    assert "still here" in (tmp_path / "log").read_text()


# Exits

EXITS = """
import faulthandler, json, os, sys, threading
faulthandler.dump_traceback_later(45, exit=True)  # one that hangs says where
import numpy as np
from llm_datadist import *
from llm_datadist.views import tensor_views

def end(role, cluster, listen):
    config = LLMConfig()
    config.device_id, config.enable_cache_manager = 0, True
    config.mem_pool_cfg = json.dumps({"memory_size": 4 << 20, "page_shift": 12})
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    made = LLMDataDist(role, cluster)
    made.init(config.generate_options() | {"llm.Transport": "nixl", "llm.SyncKvCacheWaitTime": "30000"})
    return made

prompt, decoder = end(LLMRole.PROMPT, 1, True), end(LLMRole.DECODER, 2, False)
info = LLMClusterInfo()
info.remote_cluster_id = 1
info.append_local_ip_info("127.0.0.1", 0)
info.append_remote_ip_info("127.0.0.1", prompt.listen_port)
assert decoder.link_clusters([info], 10000)[0] == LLMStatusCode.LLM_SUCCESS
desc = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
source = prompt.cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(1, 0))
target = decoder.cache_manager.allocate_blocks_cache(desc)
for view in tensor_views(source):
    view[:] = 7
way = sys.argv[1]
decoder.cache_manager.pull_blocks(BlocksCacheKey(1, 0), target, list(range(8)), list(range(8)))
assert all((view == 7).all() for view in tensor_views(target))
if way in ("finalized", "prompt first"):
    for each in (decoder, prompt) if way == "finalized" else (prompt, decoder):
        each.finalize()
if way == "while it pulls":
    def pull():
        while True:
            decoder.cache_manager.pull_blocks(BlocksCacheKey(1, 0), target, list(range(8)), list(range(8)))
    threading.Thread(target=pull, daemon=True).start()
if way == "sys.exit":
    sys.exit(0)
"""
WAYS = ("finalized", "prompt first", "forgotten", "sys.exit", "while it pulls")


@pytest.mark.parametrize("way", WAYS)
def test_processes_end_cleanly(way: str) -> None:
    """Ten processes for each way to end; what NIXL's own destructors do at exit must not crash any."""
    for _ in range(5):
        command = [sys.executable, "-c", EXITS, way]
        two = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
        said = [each.communicate(timeout=60)[1] for each in two]
        assert [each.returncode for each in two] == [0, 0], said
