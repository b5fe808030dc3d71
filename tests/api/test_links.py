"""link_clusters and unlink_clusters between two ends and many (interface §3.4, B2.1, B2.2), also over IPv6, and
switch_role (interface §3.6). The caps of the original are not enforced (interface R19)."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from faults.gated import gated_call
from faults.gates import Gate
from faults.strangers import Stranger, full_port, silent_port
from llm_datadist import CacheKey, LLMClusterInfo, LLMRole, LLMStatusCode, cpp_api, errors
from llm_datadist.cpp_api import arguments as cpp_arguments
from llm_datadist.errors import LinkError, LinkRefused, LLMException, NotLinked, ParamError, PeerLost, StateError
from tests.support import linking, moves, ranks
from tests.support.authority import secret_file
from tests.support.ends import Call, begin_there, result_there
from tests.support.kinds import Bytes, End, LocalEnd, Pair
from tests.support.linking import OK, SUCCESS, bytes_move_both_ways, info, link, links, reachable, switch, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, refused, same_bytes, show, wait_until
from tests.support.ranks import Meeting, drop, host, join, new_name, table
from tests.support.refusals import RULE, TYPE, Table, refuse
from tests.support.refusals import Spec as Argument
from tests.support.world import World, make_config, residue_of, small_pool

pytestmark = pytest.mark.covers(
    "CacheKey.cluster_id",
    "CacheKeyByIdAndIndex.cluster_id",
    "LLMConfig: local_comm_res transfer_backend",
    "LLMDataDist: cluster_id explain link_clusters unlink_clusters switch_role",
    "LLMStatusCode: LLM_ALREADY_LINK LLM_LINK_FAILED LLM_SUSPECT_REMOTE_ERROR",
    "llm: LocalCommRes TransferBackend",
)

ALREADY, FAILED = LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_LINK_FAILED
TIMEOUT, INVALID = LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_PARAM_INVALID
REASONS = {
    "inproc": "the peer is in this process",
    "shm": "is on this host, 2 regions mapped",
    "tcp": "data lanes, as llm.Transport asks",
}


def there(peer: End) -> list[LLMClusterInfo]:
    """Return what names the other end of a pair."""
    return [info(peer.cluster_id, peer.port)]


def test_r28_i01_one_call_makes_one_link_that_both_ends_can_use_and_a_second_changes_nothing(pair: Pair) -> None:
    linking.start_both(pair.prompt, pair.decoder, pair.transport)
    ends = (pair.prompt, pair.decoder)
    before = [end.do(picture) for end in ends]
    assert pair.decoder.do(link, [info(3, pair.prompt.port)]) == (FAILED, [FAILED]), "it announces another id"
    assert [end.do(picture) for end in ends] == before
    assert pair.decoder.do(link, [info(None, pair.prompt.port)]) == SUCCESS, "an id that is not set is learned"
    bytes_move_both_ways(*ends)
    before = [end.do(picture) for end in ends]
    for here, peer in (ends, ends[::-1]):
        told = here.do(linking.explain, peer.cluster_id)
        assert (told.remote_cluster_id, told.state, told.transport) == (peer.cluster_id, "ready", pair.transport)
        assert REASONS[pair.transport] in told.reason
        for wanted in (peer.cluster_id, None):
            assert here.do(link, [info(wanted, peer.port)]) == (ALREADY, [ALREADY])
    assert [end.do(picture) for end in ends] == before
    bytes_move_both_ways(*ends)


def test_several_clusters_partial_success_and_the_last_failure_overall(shm_pair: Pair) -> None:
    shm_pair.start(linked=False)
    decoder = shm_pair.decoder
    with silent_port() as silent:
        good, refused_, mute = info(1, shm_pair.prompt.port), info(8, linking.free_port()), info(9, silent)
        # A cluster twice in one call makes one link.
        overall, codes = decoder.do(link, [refused_, good, good, mute], 1500)
        assert (overall, codes[0], sorted(codes[1:3]), codes[3]) == (TIMEOUT, FAILED, [OK, ALREADY], TIMEOUT)
        assert decoder.do(links) == {1: "ready"}
        assert decoder.do(link, [mute, refused_, good], 500) == (ALREADY, [TIMEOUT, FAILED, ALREADY])
        odd = [info(10), refused_, info(7, silent, silent)]
        assert decoder.do(link, odd, 500) == (INVALID, [INVALID, FAILED, INVALID])
    bytes_move_both_ways(shm_pair.prompt, decoder)


def failure_of(world: World, cluster: LLMClusterInfo) -> tuple[Any, ...]:
    """Link to a cluster in vain; return what a program learns of it."""
    overall, (status,) = world.dd.link_clusters([cluster], 3000)
    assert overall is status is FAILED
    with pytest.raises(NotLinked) as caught:
        world.dd.explain(cluster.remote_cluster_id or 0)
    again = caught.value.__cause__
    assert (type(again), str(again)) == (type(status.error), str(status.error))
    return status.error, str(caught.value)


def test_a_program_can_read_why_a_link_failed(end: LocalEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = (secret_file(tmp_path / name, a=name.encode() * 8) for name in ("ours", "them"))
    end.start("DECODER", 2, extra=ours | {"llm.Transport": "tcp"})
    with ExitStack() as leaving:

        def listener(**extra: str) -> int | None:
            world = World("prompt")
            leaving.callback(world.stop)
            return world.start("PROMPT", 1, make_config(listen_ip_info="127.0.0.1:0", extra=extra))

        plain = {"llm.Transport": "tcp"}
        for port, wanted, kind, text in (
            (linking.free_port(), 1, LinkRefused, "Connection refused"),
            (listener(**plain, **ours), 3, LinkRefused, "remote_cluster_id=3"),
            (listener(**plain, **theirs), 1, errors.AuthFailed, "not authenticated"),
            (listener(**{"llm.Transport": "shm"}, **ours), 1, LinkRefused, "llm.Transport"),
        ):
            caplog.clear()
            error, told = end.do(failure_of, info(wanted, port))
            assert type(error) is kind
            assert text in str(error)
            assert error.__traceback__ is None, "it keeps nothing alive"
            said = rf"cluster {wanted} is not linked; link_clusters failed \d+\.\d s ago: {kind.__name__}: "
            assert re.match(said + re.escape(str(error)), told), told
            assert f"link cluster {wanted}: {FAILED}: {kind.__name__}: {error}" in caplog.messages
        good = listener(**plain, **ours)
        overall, codes = end.do(link, [info(1, good), info(8, linking.free_port())])
        assert (overall, [type(code.error) for code in codes]) == (FAILED, [type(None), LinkRefused])
        assert end.do(linking.explain, 1).state == "ready"
        assert end.do(unlink, [info(1, good)]) == SUCCESS
        linking.not_linked(end, 1, "; the link ended ", " s ago: unlinked; link_clusters makes the link")


def test_the_error_of_a_status_is_the_one_of_the_last_call_of_this_thread(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    ports = [linking.free_port() for _ in range(3)]
    both = threading.Barrier(2)

    def reason(port: int) -> str:
        """Both threads fail before either of them asks; both get the same member."""
        overall, codes = end.do(link, [info(9, port)])
        both.wait(10)
        assert overall is codes[0] is FAILED
        return str(FAILED.error)

    def names(text: str) -> list[bool]:
        return [f":{port}: cannot connect" in text for port in ports]

    assert end.do(link, [info(8, ports[0]), info(9, ports[1])]) == (FAILED, [FAILED, FAILED])
    several = FAILED.error
    assert type(several) is LinkError
    assert (several.status_code, names(str(several))) == (FAILED, [True, True, False])
    with ThreadPoolExecutor(2) as pool:
        told = [names(text) for text in pool.map(reason, ports[1:])]
    assert told == [[False, True, False], [False, False, True]]
    assert FAILED.error is several, "other threads have failed since"
    assert end.do(unlink, [info(5, 1)]) == SUCCESS
    assert FAILED.error is None, "it belonged to an earlier call"


def test_a_local_ip_is_needed_unless_local_comm_res_is_given_and_not_empty(local_pair: Pair) -> None:
    prompt, decoder = local_pair.prompt, local_pair.decoder
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", local_comm_res="")
    for settings in ({}, {"local_comm_res": ""}):
        decoder.start("DECODER", 2, **settings)
        clusters = [info(7, prompt.port), info(1, prompt.port, local=None)]
        refused([decoder], [], ParamError, ["clusters[1]", "local_ip_info_list is empty"], link, clusters)
        decoder.stop()
    decoder.start("DECODER", 2, local_comm_res='{"version": "1.2"}')
    assert decoder.do(link, [info(1, prompt.port, local=None)]) == SUCCESS
    bytes_move_both_ways(prompt, decoder)


def test_the_name_of_a_host_is_looked_up_in_a_thread_in_time(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, decoder = local_pair.start(linked=False, extra={"llm.Insecure": "0"})
    real, answer = socket.getaddrinfo, threading.Event()
    #: Nobody listens at the first two; the last is beyond this host, where nothing may be dialled without credentials.
    known = {"prefill.test": ("::1", "127.0.0.2", "127.0.0.1"), "far.test": ("127.0.0.1", "192.0.2.1")}

    def look_up(host: str, port: int, **kind: Any) -> Any:
        assert threading.current_thread().name == "llm-datadist-resolve"
        if host == "slow.test":
            answer.wait()
        if host.endswith(".test") and host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [each for ip in known.get(host, (host,)) for each in real(ip, port, **kind)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        for name, status, kind, text in (
            ("unknown.test", FAILED, LinkRefused, "cannot resolve 'unknown.test': Name or service not known"),
            ("far.test", INVALID, ParamError, "192.0.2.1 is beyond this host"),
            ("slow.test", TIMEOUT, errors.DeadlineExceeded, "looking up 'slow.test': no answer within 500 ms"),
        ):
            overall, (code,) = decoder.do(link, [info(1, prompt.port, ip=name)], 500)
            assert (overall, code, type(code.error)) == (status, status, kind)
            assert text in str(code.error)
        assert str(TIMEOUT.error).endswith("; give an address, or a larger timeout")
        for name in ("localhost", "prefill.test"):
            clusters = [info(9, prompt.port, ip="slow.test"), info(1, prompt.port, ip=name)]
            assert decoder.do(link, clusters, 2000) == (TIMEOUT, [TIMEOUT, OK])
            bytes_move_both_ways(prompt, decoder)
            assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
            linking.alone(prompt, decoder)
    finally:
        answer.set()


@contextmanager
def web_server() -> Iterator[int]:
    """A server that waits for the end of a request of HTTP: a greeting may have a line's end among its random bytes."""

    class Reader(StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in (b"\r\n", b""):
                pass

    with ThreadingTCPServer(("127.0.0.1", 0), Reader) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_an_empty_list_of_clusters_has_its_reason(end: LocalEnd, caplog: pytest.LogCaptureFixture) -> None:
    end.start("MIX", 1)
    text = "clusters is empty: at least one LLMClusterInfo is needed"
    for function, name in ((link, "link_clusters"), (unlink, "unlink_clusters")):
        errors.link_failures.set({})
        assert end.do(function, []) == (INVALID, [])
        assert (type(INVALID.error), str(INVALID.error)) == (ParamError, text)
        assert caplog.messages[-1] == f"{name}: {text}"


def test_a_link_out_of_time_says_what_is_known_of_the_address_and_which_argument_to_raise(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    with silent_port() as silent, full_port() as full, web_server() as web:
        known = {
            full: ("phase connect", "nothing answers at that address: an absent host, or a firewall"),
            silent: (
                "phase handshake",
                "something there accepts connections, and says nothing: another program, or a ",
            ),
            web: ("phase handshake", "another program, or a stopped peer"),
        }
        for port, texts in known.items():
            assert end.do(link, [info(1, port)], 300) == (TIMEOUT, [TIMEOUT])
            said = str(TIMEOUT.error)
            assert [text for text in texts if text not in said] == [], said
            assert said.endswith("; raise the argument timeout only for a slow peer or network")
            assert "sync_kv_timeout" not in said


def test_r19_more_than_16_clusters_in_one_call_and_the_mute_ones_cost_the_others_nothing(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    options = make_config(listen_ip_info="127.0.0.1:0", **small_pool())
    with ExitStack() as leaving, silent_port() as silent:
        clusters = []
        for cluster_id in range(100, 140):
            world = World(f"prompt {cluster_id}")
            leaving.callback(world.stop)
            clusters.append(info(cluster_id, world.start("PROMPT", cluster_id, options)))
        assert end.do(link, clusters, 30_000) == (OK, [OK] * 40)
        assert end.do(links) == dict.fromkeys(range(100, 140), "ready")
        assert end.do(unlink, clusters, 30_000) == (OK, [OK] * 40)
        assert end.do(links) == {}
        # Twenty come first: a call that worked through them sixteen at a time would have no time left.
        mute = [info(cluster_id, silent) for cluster_id in range(10, 30)]
        assert end.do(link, mute + clusters[:3], 2000) == (TIMEOUT, [TIMEOUT] * 20 + [OK] * 3)


def test_r19_more_links_than_512_cost_no_thread_each_and_move_data(shm_pair: Pair) -> None:
    shm_pair.start(extra={"llm.PeerTimeout": "600", "llm.MaxLinks": "2000"})  # strangers send no beats
    prompt = shm_pair.prompt
    threads = set(prompt.do(residue_of)["kernel threads"])
    with ExitStack() as leaving:
        for cluster_id in range(1000, 1520):
            leaving.enter_context(Stranger(prompt.port, cluster_id)).link()
        now = prompt.do(links)
        assert len(now) == 521
        assert set(now.values()) <= {"ready", "suspect"}  # a busy machine makes silence of their beats
        assert threads >= {*prompt.do(residue_of)["kernel threads"]}  # one that was leaving may have left
        bytes_move_both_ways(prompt, shm_pair.decoder)
    wait_until(lambda: prompt.do(links) == {2: "ready"})


@pytest.mark.parametrize(
    ("pair", "backend", "wanted", "threads"),
    [
        ("inproc", None, True, 1),
        ("inproc", "hixl", False, 1),
        ("shm", None, True, 4),
        ("shm", None, False, 1),
        ("shm", "hixl", True, 1),
        ("tcp", None, True, 1),
        ("tcp", None, True, 4),
        ("tcp", "hixl", False, 1),
    ],
    indirect=["pair"],
)
def test_both_ends_dial_at_once_many_times_and_end_with_one_link(
    pair: Pair, tmp_path: Path, backend: str | None, wanted: bool, threads: int
) -> None:
    """And with none after an unlink by either of them, or by both at once.

    Regression: both sides dialled at once, and each kept another connection.
    """
    linking.start_both(pair.prompt, pair.decoder, pair.transport, **({"transfer_backend": backend} if backend else {}))
    ends = (pair.prompt, pair.decoder)
    for number in range(12 if threads == 1 else 4):
        if number:
            start = tmp_path / f"go {number}"
            named = {here: info(peer.cluster_id if wanted else None, peer.port) for here, peer in (ends, ends[::-1])}
            dials = [Call(here.do, linking.link_when, start, peer, threads) for here, peer in named.items()]
            start.touch()
            told = [code for each in dials for code in each.result()]
        else:
            told = [here.do(link, there(peer))[0] for here, peer in (ends, ends[::-1])]
        # One call may be over before the other begins: then the link is there already, unless both ends are to link.
        assert {OK} <= set(told) <= ({OK} if backend else {OK, ALREADY})
        assert linking.linked(pair.prompt, pair.decoder)
        assert [here.do(link, there(peer))[0] for here, peer in (ends, ends[::-1])] == [ALREADY] * 2
        if number % 5 == 0 or threads > 1:
            bytes_move_both_ways(pair.prompt, pair.decoder)
        if at_once := number % 3 != 1:
            pair.prompt.do(begin_there, "unlink", unlink, there(pair.decoder))
        unlinker, peer = (pair.prompt, pair.decoder) if number % 2 else (pair.decoder, pair.prompt)
        assert unlinker.do(unlink, there(peer)) == SUCCESS
        assert not at_once or pair.prompt.do(result_there, "unlink") == SUCCESS
        linking.alone(pair.prompt, pair.decoder)


def caches(pair: Pair) -> tuple[Bytes, Bytes]:
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    return source, pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def test_i02_after_an_unlink_neither_end_is_linked_and_a_second_one_is_a_success(pair: Pair) -> None:
    linking.start_both(pair.prompt, pair.decoder, pair.transport)
    source, target = caches(pair)
    for end, number in ((pair.prompt, 2), (pair.decoder, 1)):
        linking.not_linked(end, number)
    before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
    for unlinker, peer in ((pair.prompt, pair.decoder), (pair.decoder, pair.prompt)):
        for force in (False, True):
            pair.link()
            for _ in range(3):
                assert unlinker.do(unlink, there(peer), 5000, force) == SUCCESS
                # The peer may still hold its end of a link that was given up by force.
                assert unlinker.do(link, there(peer)) == SUCCESS
                wait_until(lambda: linking.linked(pair.prompt, pair.decoder))
            assert unlinker.do(unlink, there(peer), 5000, force) == SUCCESS
            linking.not_linked(unlinker, peer.cluster_id)
            if not force:
                linking.not_linked(peer, unlinker.cluster_id)  # it has agreed: at once, not soon
            clusters = [info(77, peer.port, local=None), *there(peer) * 2]
            assert unlinker.do(unlink, clusters, 5000, force) == (OK, [OK] * 3)
            linking.alone(pair.prompt, pair.decoder)
    assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before
    same_bytes(pair.prompt.do(show, "kv"), source)
    same_bytes(pair.decoder.do(show, "kv"), target)


@contextmanager
def pull_under_way(pair: Pair, folder: Path) -> Iterator[None]:
    """The decoder pulls and stands still before its first byte; the end of the block lets it go on."""
    folder.mkdir()
    pull = ("pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
    pair.decoder.do(begin_there, "pull", gated_call, 1, "before copy", folder, *pull)
    try:
        Gate(folder).wait()
        yield
    finally:
        Gate(folder).open()


def test_an_unlink_waits_for_a_running_pull_or_keeps_the_link_at_both_ends(pair: Pair, tmp_path: Path) -> None:
    linking.start_both(pair.prompt, pair.decoder, pair.transport)
    source, _ = caches(pair)
    rows = [(pair.decoder, pair.prompt, False), (pair.decoder, pair.prompt, True), (pair.prompt, pair.decoder, False)]
    for number, (unlinker, peer, force) in enumerate(rows):
        pair.link()
        target = pair.decoder.do(moves.refill, "kv", number)
        with pull_under_way(pair, tmp_path / str(number)):
            if not force:
                assert unlinker.do(unlink, there(peer), 100) == (TIMEOUT, [TIMEOUT])
                wait_until(lambda: linking.linked(pair.prompt, pair.decoder))
                bytes_move_both_ways(pair.prompt, pair.decoder)
            unlinker.do(begin_there, "unlink", unlink, there(peer), 30_000, force)
            wait_until(lambda: pair.decoder.do(links) == {1: "draining"})
            assert unlinker.do(links) == {peer.cluster_id: "draining"}
            linking.not_linked(pair.decoder, 1)  # nothing new begins
        assert pair.decoder.do(result_there, "pull") is None
        assert unlinker.do(result_there, "unlink") == SUCCESS
        same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
        same_bytes(pair.prompt.do(show, "kv"), source)
        linking.alone(pair.prompt, pair.decoder)


def test_a_forced_unlink_ends_a_running_pull_with_a_typed_error(pair: Pair, tmp_path: Path) -> None:
    pair.start()
    source, _ = caches(pair)
    rows: list[tuple[End, int, int, type[LLMException], LLMStatusCode, str]] = [
        (pair.decoder, 1, 100, NotLinked, LLMStatusCode.LLM_NOT_YET_LINK, "given up"),
        (pair.prompt, 2, 5000, PeerLost, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, ""),
    ]
    for unlinker, peer, timeout, kind, status, part in rows:
        with pull_under_way(pair, tmp_path / str(peer)):
            assert unlinker.do(unlink, [info(peer)], timeout, True) == SUCCESS
            assert unlinker.do(links) == {}
            linking.alone(pair.prompt, pair.decoder)
        error = pair.decoder.do(result_there, "pull")
        assert isinstance(error, kind), error
        assert (error.status_code, error.peer, error.phase) == (status, 1, "copy")
        assert part in str(error)
        same_bytes(pair.prompt.do(show, "kv"), source)
        pair.link()
        bytes_move_both_ways(pair.prompt, pair.decoder)


def unlink_before_a_pin(world: World, peer: int) -> None:
    """Have another thread give the link up, by force, when the control thread is about to pin a cache for the peer."""
    registry = world.probe.engine.caches.registry
    pin = registry.pin

    def late(*args: Any, **kwargs: Any) -> Any:
        world.memory["pin"] = kwargs["pin_id"]
        assert Call(unlink, world, [info(peer)], 10_000, True).result() == SUCCESS
        return pin(*args, **kwargs)

    vars(registry)["pin"] = late


def last_pin(world: World) -> int:
    """Return the number that the peer gave its pin, or 0."""
    return int(world.memory["pin"])


def test_what_is_pinned_while_another_thread_ends_the_link_is_not_kept(pair: Pair) -> None:
    """By a Resolve, and, over tcp, by a read by key, which comes over a lane.

    Regression: memory stayed pinned for a link that had ended.
    """
    keys = CacheKey(1, 1), CacheKey(1, 2)
    prompt, decoder = pair.start(sync_kv_timeout=600_000)
    prompt.do(make, "rows", Spec(keys=keys), 1)
    decoder.do(make, "rows", Spec(), 2)
    decoder.do(call, "pull_cache", keys[0], Use("rows"), 5)
    wait_until(lambda: prompt.do(picture).pins == 0)
    prompt.do(unlink_before_a_pin, 2)
    with suppress(LLMException):  # its bytes may have been there first
        decoder.do(call, "pull_cache", keys[1], Use("rows"), 6)
    assert (prompt.do(last_pin) > 0) is (pair.transport == "tcp")
    linking.alone(prompt, decoder)
    wait_until(lambda: prompt.do(picture).pins == 0)


def pull_until_refused(world: World) -> int:
    """Pull until there is no link any more; return how many pulls succeeded."""
    count = 0
    with suppress(NotLinked):
        while True:
            call(world, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
            count += 1
    return count


def test_an_unlink_in_a_storm_of_pulls_cuts_none_of_them(pair: Pair) -> None:
    linking.start_both(pair.prompt, pair.decoder, pair.transport)
    source, _ = caches(pair)
    for number, (unlinker, peer) in enumerate([(pair.prompt, pair.decoder), (pair.decoder, pair.prompt)] * 3):
        pair.link()
        target = pair.decoder.do(moves.refill, "kv", number)
        for name in "abc":
            pair.decoder.do(begin_there, name, pull_until_refused)
        wait_until(lambda: sum(each.read_bytes for each in pair.decoder.do(picture).links) > 0)
        assert unlinker.do(unlink, there(peer)) == SUCCESS
        assert sum(pair.decoder.do(result_there, name) for name in "abc") > 0
        linking.alone(pair.prompt, pair.decoder)
        same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
    same_bytes(pair.prompt.do(show, "kv"), source)


@pytest.mark.skipif(not linking.has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("dialled", ["::1", "[::1]"])
@pytest.mark.parametrize("transport", ["inproc", "shm", "auto", "tcp"])
def test_two_ends_link_and_move_bytes_over_ipv6(request: pytest.FixtureRequest, transport: str, dialled: str) -> None:
    pair: Pair = request.getfixturevalue("local_pair" if transport == "inproc" else "shm_pair")
    extra = {"llm.Transport": transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="[::1]:0", extra=extra)
    pair.decoder.start("DECODER", 2, extra=extra, cluster_info='{"listen_ip_info": [{"ip": "::1", "port": 1}]}')
    peer = info(1, pair.prompt.port, ip=dialled, local="::1")
    assert peer.remote_ip_info_list == [("::1", pair.prompt.port)]
    assert f"[::1]:{pair.prompt.port}" in repr(peer)
    address = cpp_api.IpInfo(dialled, pair.prompt.port or 0)
    (as_in_cpp,) = cpp_arguments.cluster_infos([cpp_api.ClusterInfo(1, 0, [cpp_api.IpInfo("[::1]")], [address])])
    assert pair.decoder.do(link, [as_in_cpp]) == SUCCESS
    assert pair.decoder.do(unlink, [peer]) == SUCCESS
    assert pair.decoder.do(link, [peer]) == SUCCESS
    assert pair.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(pair.prompt, pair.decoder)
    if transport == "auto":  # shm for pools, cma beside it for memory of the process's own
        told = pair.decoder.do(linking.explain, 1)
        assert (told.transport, told.private_transport) == ("shm", "cma")


@pytest.mark.skipif(not linking.has_ipv6(), reason="this machine has no IPv6 loopback")
def test_members_of_a_rank_table_meet_over_ipv6_also_where_its_address_is_not_of_this_host(local_pair: Pair) -> None:
    ends = ranks.start_two(local_pair)
    for listens in ("::1", "fd00::1:2:3"):
        meeting = Meeting((1, 2), table=ranks.table(listens, "::1"))
        if listens == "::1":
            ids = meeting.join(*ends)
            assert ranks.settle(ends, ids) == [ranks.OK] * 2
            bytes_move_both_ways(*ends)
        else:
            ids = meeting.join(ends[0])  # listens at all addresses: it does not know how others reach it
        for end, comm_id in zip(ends, ids, strict=False):
            end.do(ranks.drop, comm_id)


LISTEN = "llm.listenIpInfo"
EXIST_LINK = LLMStatusCode.LLM_EXIST_LINK


def now(world: World) -> tuple[str, tuple[str, int] | None]:
    """Return the role and where it listens."""
    return repr(world.dd).split()[1], linking.links_of(world).listen_address


def at(port: int | None, ip: str = "127.0.0.1") -> dict[str, str]:
    return {LISTEN: f"{ip}:{port}"}


def test_the_listener_opens_moves_and_closes_and_ports_can_be_used_again_at_once(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    assert end.do(now) == ("DECODER", None)
    first, second = linking.free_port(), linking.free_port()
    for _ in range(3):
        assert end.do(switch, "PROMPT", at(first)) == first
        assert reachable(first)
        assert end.do(switch, "PROMPT", at(second)) == second
        assert (reachable(first), reachable(second)) == (False, True)
        assert end.do(switch, "DECODER") is None
        assert (reachable(first), reachable(second)) == (False, False)
    end.do(switch, "PROMPT", at(first))
    for ip in ("127.0.0.2", "0.0.0.0", "127.0.0.1"):  # the same port on another address
        assert end.do(switch, "PROMPT", at(first, ip)) == first
        assert end.do(now) == ("PROMPT", (ip, first))
        assert reachable(first, "127.0.0.2") == (ip != "127.0.0.1")
    port, before = end.do(switch, "PROMPT", at(0, "127.0.0.2")), end.do(linking.links_of).listener
    assert end.do(switch, "DECODER", at(0, "127.0.0.2")) == port
    assert end.do(switch, "PROMPT", at(port, "127.0.0.2")) == port
    assert end.do(linking.links_of).listener is before, "the same address is left alone, also one with a picked port"


def test_every_role_has_its_turn_and_survives_finalize_and_other_options_are_ignored(end: LocalEnd) -> None:
    end.start("MIX", 2)
    for role in ("MIX", "PROMPT", "PROMPT", "DECODER", "MIX"):
        assert end.do(switch, role) is None
        assert end.do(now)[0] == role
    ignored = {"device_id": 7, "enable_cache_manager": False, "sync_kv_timeout": 1}
    assert end.do(switch, "PROMPT", make_config(listen_ip_info="127.0.0.1:0", **ignored))
    engine = end.world.probe.engine
    assert (engine.options.sync_kv_timeout_ms, engine.options.cache_manager) == (10_000, True)
    end.do(switch, "DECODER")
    end.world.dd.finalize()
    assert "DECODER" in repr(end.world.dd)
    end.world.dd.init(make_config())
    assert end.do(now) == ("DECODER", None)


def test_an_address_that_cannot_be_bound_is_llm_failed_and_role_and_listener_stay(end: LocalEnd) -> None:
    port = linking.free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    # 0.0.0.0 needs the port on every address, and one of them is taken: the old listener is back.
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.9", port)):
        for ip, number in (("127.0.0.1", busy.getsockname()[1]), ("192.0.2.1", port), ("0.0.0.0", port)):
            with pytest.raises(LinkError) as caught:
                end.do(switch, "DECODER", at(number, ip))
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert f"{ip}:{number}" in str(caught.value)
            assert "the role stays PROMPT" in str(caught.value)
            assert end.do(now) == ("PROMPT", ("127.0.0.1", port))
            assert reachable(port)


def before_binding(monkeypatch: pytest.MonkeyPatch, port: int | None, act: Callable[[], Any]) -> list[Any]:
    """Act once when nothing listens at the port and another address is to be bound; return what came of it."""
    done: list[Any] = []

    def slow_bind(sock: socket.socket, address: Any) -> None:
        if not reachable(port):
            monkeypatch.setattr(socket.socket, "bind", really)
            done.append(act())
        really(sock, address)

    really = socket.socket.bind
    monkeypatch.setattr(socket.socket, "bind", slow_bind)
    return done


def test_when_neither_can_be_bound_the_error_says_so(end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    port = linking.free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    # Another process takes the old address the moment it is free.
    thief = before_binding(monkeypatch, port, lambda: socket.create_server(("127.0.0.1", port)))
    with pytest.raises(LinkError, match="no longer listens"):
        end.do(switch, "DECODER", at(port, "0.0.0.0"))
    thief[0].close()
    assert end.do(now) == ("PROMPT", None)
    assert end.do(switch, "DECODER", at(port)) == port


def test_i13_a_link_and_a_communicator_stand_in_the_way_whichever_end_made_it(shm_pair: Pair) -> None:
    shm_pair.start()
    wait_until(lambda: shm_pair.prompt.do(linking.links) == {2: "ready"})
    for end in (shm_pair.prompt, shm_pair.decoder):
        before = end.do(now)
        for options in (None, at(linking.free_port()), at(end.port or 0)):
            refused([end], [], StateError, ["unlinked first"], switch, "MIX", options, status=EXIST_LINK)
        assert end.do(now) == before
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
    linking.alone(shm_pair.prompt)
    assert shm_pair.prompt.do(switch, "PROMPT", at(shm_pair.prompt.port)) == shm_pair.prompt.port
    comm_id = shm_pair.prompt.do(join, new_name(), {1: 0, 2: 1}, table(host(0), host(0)))
    told = [f"communicator {comm_id}"]
    refused([shm_pair.prompt], [], StateError, told, switch, "PROMPT", at(0), status=EXIST_LINK)
    shm_pair.prompt.do(drop, comm_id)
    shm_pair.link()  # a peer that has ended does not stand in the way either
    shm_pair.decoder.stop()
    linking.alone(shm_pair.prompt)
    assert shm_pair.prompt.do(switch, "DECODER") is None


def test_a_link_that_is_being_made_stands_in_the_way(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer has it already when this end is asked to switch.

    Regression: ``switch_role`` did not look at a link on its way.
    """
    local_pair.start(linked=False)
    decoder = local_pair.decoder
    at_the_gate, go = threading.Event(), threading.Event()
    table = decoder.do(lambda world: world.probe.link_table)
    really = table.install

    def installed_late(made: Any) -> Any:
        at_the_gate.set()
        assert go.wait(60)
        return really(made)

    # Between the last frame and the link's place in the table there is no step to stop at.
    monkeypatch.setattr(table, "install", installed_late)
    decoder.do(begin_there, "call", link, [info(1, local_pair.prompt.port)])
    assert at_the_gate.wait(60)
    for options in (None, at(0)):
        refused([decoder], [], StateError, ["being made"], switch, "MIX", options, status=EXIST_LINK)
    go.set()
    assert decoder.do(result_there, "call") == SUCCESS
    assert decoder.do(now)[0] == "DECODER"


@pytest.mark.parametrize("free", [True, False])
def test_a_link_made_meanwhile_costs_no_listener(local_pair: Pair, monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
    """Regression: the new address shared the port of the old one, and a link made in between left no listener."""
    decoder = local_pair.decoder
    linking.start_both(local_pair.prompt, decoder, local_pair.transport)
    port = decoder.port
    made = before_binding(monkeypatch, port, lambda: decoder.do(link, [info(1, local_pair.prompt.port)]))
    if free:
        assert decoder.do(switch, "PROMPT", at(port, "0.0.0.0")) == port
    else:
        with socket.create_server(("127.0.0.9", port)), pytest.raises(LinkError, match=r"0\.0\.0\.0"):
            decoder.do(switch, "PROMPT", at(port, "0.0.0.0"))
    assert made == [SUCCESS]
    ip = "0.0.0.0" if free else "127.0.0.1"
    assert decoder.do(now) == ("PROMPT" if free else "DECODER", (ip, port))
    assert reachable(port)
    bytes_move_both_ways(decoder, local_pair.prompt)


def test_a_link_that_the_peer_has_just_unlinked_does_not_stand_in_the_way(shm_pair: Pair) -> None:
    """The peer's call returns before the end of the connection has been read here."""
    shm_pair.start(linked=False)
    for _ in range(20):
        shm_pair.link()
        assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
        assert shm_pair.prompt.do(switch, "DECODER") is None
        assert shm_pair.prompt.do(switch, "PROMPT", at(shm_pair.prompt.port)) == shm_pair.prompt.port


SPECS = {
    "role": Argument((1, "PROMPT")),
    "switch_options": Argument(
        ([], "x"),
        (TYPE, LISTEN, {LISTEN: 1}),
        (RULE, "''", {LISTEN: ""}),
        (RULE, "ip:port", {LISTEN: ""}),
        (RULE, "port 'x'", {LISTEN: "127.0.0.1:x"}),
        (RULE, "65536", {LISTEN: "127.0.0.1:65536"}),
        (RULE, "::1:5", {LISTEN: "::1:5"}),
        none_ok=True,
    ),
}


def test_r01_a_wrong_argument_of_switch_role_is_refused(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0")
    before = end.do(now)
    refuse([end], Table("dd.switch_role", {"role": LLMRole.MIX}, SPECS))
    assert end.do(now) == before


def test_with_the_hixl_backend_the_address_cannot_change_and_a_missing_one_leaves_it(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for options in (at(linking.free_port()), at(end.port, "127.0.0.2")):
        refused([end], [], LLMException, [LISTEN, "cannot change"], switch, "MIX", options, status=code)
        assert end.do(now)[0] == "PROMPT"
    for role, same in (("DECODER", None), ("PROMPT", {}), ("MIX", at(end.port))):
        assert end.do(switch, role, same) == end.port
        assert end.do(now)[0] == role


def test_v1_mode_has_rules_of_its_own_which_leave_role_and_listener_and_a_decoder_may_listen(end: LocalEnd) -> None:
    v1 = {"listen_ip_info": "127.0.0.1:0", "enable_cache_manager": False}
    end.start("PROMPT", 1, **v1)
    disabled = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    refused([end], [], LLMException, ["EnableSwitchRole"], switch, "DECODER", status=disabled)
    end.stop()
    end.start("PROMPT", 1, **v1, enable_switch_role=True)
    refused([end], [], ParamError, ["PROMPT already"], switch, "PROMPT", at(0))
    assert end.do(now) == ("PROMPT", ("127.0.0.1", end.port))
    assert end.do(switch, "DECODER") is None
    refused([end], [], ParamError, [LISTEN, "PROMPT"], switch, "PROMPT")
    assert end.do(switch, "PROMPT", at(end.port)) == end.port
    assert end.do(switch, "DECODER", at(end.port)) == end.port
    assert end.do(switch, "MIX") is None
