"""Who may do what (``llm.PeerPolicy``): every verb over every transport, models, mappings, and policies with errors."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages as wire
from llm_datadist._memory.exports import Exports
from llm_datadist._native import readable
from llm_datadist._transport import samehost
from llm_datadist._transport.rendezvous import MemoryOffer, Packet, Refusal, RendezvousHello, decode
from llm_datadist.errors import AuthFailed, CacheMismatch, CacheNotFound, LinkRefused, ParamError
from tests.support import moves
from tests.support.authority import Authority, secret_file
from tests.support.grants import LONG, claim, grant, tell
from tests.support.layers import Always, outcome, raw, spanned
from tests.support.linking import explain, info, link, links, links_of, pull_from
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, refused, same_bytes, show, wait_until
from tests.support.pairs import pair_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kinds import Bytes, LocalEnd, Pair, World

FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET = b"s" * 32
VERBS = ("pull", "push", "locate", "consume")
ALL: dict[str, Any] = dict.fromkeys(("link", *VERBS), True)
#: name -> (ends that the fixture makes, llm.Transport, where the caches are)
ROUTES = {
    "inproc": ("inproc", "inproc", "pool"),
    "shm": ("shm", "auto", "pool"),
    "cma": ("shm", "auto", "private"),
    "tcp": ("tcp", "tcp", "pool"),
}
SOURCE_BLOCKS, TARGET_BLOCKS = [1, 6], [0, 3]
PAIRS = list(zip(TARGET_BLOCKS, SOURCE_BLOCKS, strict=True))


def rules(*verbs: str, **more: Any) -> dict[str, Any]:
    """Return what lets a peer link and do this."""
    return dict.fromkeys(("link", *verbs), True) | more


def start(pair: Pair, folder: Path, policy: dict[str, Any], *, by: str = "prompt", rca: bool = False) -> None:
    """Start both ends with a shared secret, not linked; one of them has the policy."""
    extra = {"llm.Transport": pair.transport} | secret_file(folder / "secrets", a=SECRET)
    theirs = extra | {"llm.PeerPolicy": json.dumps(policy)}
    settings: dict[str, Any] = {"enable_remote_cache_accessible": True} if rca else {}
    prompt, decoder = (theirs, extra) if by == "prompt" else (extra, theirs)
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=prompt, **settings)
    pair.decoder.start("DECODER", 2, extra=decoder, **settings)


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, str]]:
    """Two ends, not started, and where their caches are to be."""
    ends, transport, memory = ROUTES[request.param]
    for pair in pair_of(request, ends):
        pair.transport = transport
        yield pair, memory


def send_raw(world: World, config: Any) -> Any:
    """Push blocks to addresses; raise what the transfer failed with."""
    task = world.cm.transfer_cache_async(world.caches["kv"], Always(), [config], SOURCE_BLOCKS, TARGET_BLOCKS)
    outcome(task)
    for error in task.errors:
        if error is not None:
            raise error


def over(pair: Pair, memory: str) -> None:
    """Check that the owner's link uses the transport of the route."""
    used, auto = pair.prompt.do(explain, 2), "cma" if memory == "private" else "shm"
    name = used.private_transport if memory == "private" else used.transport
    assert name == (auto if pair.transport == "auto" else pair.transport)


#: With remote cache access or without, what is denied. Each verb at every server: tests/unit/test_access_matrix.py.
DENIED = [(True, ""), (True, "pull"), (True, "push"), (True, "consume")]
DENIED += [(False, ""), (False, "push"), (False, "locate"), (False, "consume")]


@pytest.mark.parametrize(("rca", "denied"), DENIED, ids=[f"{'rca' if rca else 'alone'}-{no}" for rca, no in DENIED])
def test_a_peer_does_what_it_may(route: tuple[Pair, str], tmp_path: Path, rca: bool, denied: str) -> None:
    """What is denied changes nothing at either end, and the link goes on; the owner may do all of it at its peer.

    A pull consumes the key of a row without RCA, a push with it; of registered memory no key is consumed.
    """
    pair, memory = route
    start(pair, tmp_path, {"2": ALL | ({denied: False} if denied else {}), "*": ALL}, rca=rca)
    pair.link()
    prompt, decoder, keys = pair.prompt, pair.decoder, (CacheKey(1, req_id=7), CacheKey(1, req_id=8))
    there: dict[str, Bytes] = {
        "kv": prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory=memory), 1),
        "row": prompt.do(make, "row", Spec(rows=1, keys=keys[:1]), 2),
        "kept": prompt.do(make, "kept", Spec(rows=1, keys=keys[1:], memory="private"), 3),
    }
    here: dict[str, Bytes] = {
        "kv": decoder.do(make, "kv", Spec(blocks=True, memory=memory), 4),
        "own": decoder.do(make, "own", Spec(rows=1, memory=memory), 5),
    }
    rows = [CacheKeyByIdAndIndex(1, prompt.do(moves.cache_id, name), 0) for name in ("row", "kept")] if rca else keys
    verb, to, blocks = "push" if rca else "pull", raw(prompt, "kv", range(2)), (Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS)

    def tries(verbs: set[str], function: Any, *args: Any) -> bool:
        """Return True if the call, which takes these verbs, goes well, as it has to where none of them is denied."""
        if denied in verbs:
            text = f"llm.PeerPolicy of the owner does not allow cluster 2 to {denied}"
            refused((decoder, prompt), [*there, *here], CacheMismatch, [text], function, *args)
            return False
        decoder.do(function, *args)
        return True

    if tries({"pull"}, call, "pull_blocks", BLOCKS, *blocks):
        here["kv"] = moved(here["kv"], there["kv"], PAIRS)
    prompt.do(grant, [0], LONG, "kv", bytes(16))
    if tries({"pull"}, claim, bytes(16)):
        decoder.do(tell, "claimed", "release")
        wait_until(lambda: not prompt.do(tell, "grant", "active"))
    if not rca and tries({"push", "locate"}, send_raw, to):
        there["kv"] = spanned(there["kv"], here["kv"], [(dst * 48, src * 48, 48) for dst, src in PAIRS])
    if rca and tries({"push"}, call, "push_blocks", BLOCKS, *blocks):
        there["kv"] = moved(there["kv"], here["kv"], PAIRS)
    if not denied:
        over(pair, memory)
    for verbs, name, row in (({verb, "consume"}, "row", rows[0]), ({verb}, "kept", rows[1])):
        if tries(verbs, call, f"{verb}_cache", row, Use("own")):
            there[name], here["own"] = (here["own"],) * 2 if rca else (there[name],) * 2
    consumed = not {verb, "consume"} & {denied}
    wait_until(lambda: len([key for key in prompt.do(picture).keys if "7" in key.key]) == 1 - consumed)
    mine = BlocksCacheKey(2, 9)
    source: Bytes = decoder.do(make, "mine", Spec(blocks=True, blocks_key=mine, memory=memory), 6)
    prompt.do(call, "pull_blocks", mine, Use("kv"), [2], [5])
    there["kv"] = moved(there["kv"], source, [(5, 2)])
    for end, held in ((prompt, there), (decoder, here)):
        for name, expected in held.items():
            same_bytes(end.do(show, name), expected)


@pytest.mark.parametrize("by", ["prompt", "decoder"])
def test_clusters_that_are_not_named_or_may_not_link_are_not_linked(pair: Pair, tmp_path: Path, by: str) -> None:
    """Whichever end dials; nothing changes at either end, and the peer is told nothing of the policy."""
    peer = "2" if by == "prompt" else "1"
    policies: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"3": ALL}, False),
        ({peer: ALL | {"link": False}, "*": ALL}, False),
        ({peer: {"pull": True, "push": True}}, False),
        ({peer: {"link": True}}, True),
        ({"3": {}, "*": ALL}, True),
    ]
    for policy, may in policies:
        start(pair, tmp_path, policy, by=by)
        before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
        if may:
            pair.link()
        else:
            with pytest.raises(AuthFailed) as caught:
                pair.decoder.do(dial, pair.prompt.port)
            assert caught.value.status_code is FAILED
            if by == "prompt":
                assert "asks for authentication" in str(caught.value)
            assert ("PeerPolicy" in str(caught.value)) is (by == "decoder")
            assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (FAILED, [FAILED])
            assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before
            assert [end.do(links) for end in (pair.prompt, pair.decoder)] == [{}, {}]
        pair.decoder.stop()
        pair.prompt.stop()


@pytest.mark.parametrize("by", ["prompt", "decoder"])
@pytest.mark.parametrize(
    ("transport", "verbs", "reason"),
    [
        ("shm", rules("push"), "llm.PeerPolicy allows cluster {} to push only"),
        ("cma", rules("pull", models=[0]), "llm.PeerPolicy allows cluster {} some models only"),
        ("cma", rules(), "the peer lets this end into none of its memory"),
    ],
)
def test_a_transport_that_a_peer_may_not_use_is_not_replaced_by_another(
    shm_pair: Pair, tmp_path: Path, by: str, transport: str, verbs: dict[str, Any], reason: str
) -> None:
    shm_pair.transport = transport
    start(shm_pair, tmp_path, {"*": verbs}, by=by)
    with pytest.raises(LinkRefused) as caught:
        shm_pair.decoder.do(dial, shm_pair.prompt.port)
    text = str(caught.value)
    assert reason.format(2 if by == "prompt" else 1) in text or ("chose differently" in text and verbs == rules())
    assert [end.do(links) for end in (shm_pair.prompt, shm_pair.decoder)] == [{}, {}]


def test_both_ends_may_have_a_policy(shm_pair: Pair, tmp_path: Path) -> None:
    """Each end gives its own reason for tcp, and decides for itself."""
    shm_pair.transport = "auto"
    secrets = secret_file(tmp_path / "secrets", a=SECRET)
    for end, cluster_id, may in ((shm_pair.prompt, 1, rules("pull", models=[0])), (shm_pair.decoder, 2, rules("push"))):
        extra = secrets | {"llm.PeerPolicy": json.dumps({str(3 - cluster_id): may})}
        end.start("PROMPT", cluster_id, listen_ip_info="127.0.0.1:0", extra=extra)
    shm_pair.link()
    there, here = shm_pair.prompt.do(explain, 2), shm_pair.decoder.do(explain, 1)
    assert (there.transport, here.transport) == ("tcp", "tcp")
    assert "llm.PeerPolicy allows cluster 2 some models only" in there.reason
    assert "llm.PeerPolicy allows cluster 1 to push only" in here.reason
    source: Bytes = shm_pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    target: Bytes = shm_pair.decoder.do(make, "kv", Spec(blocks=True, blocks_key=BlocksCacheKey(2, 0)), 2)
    text = "does not allow cluster 1 to pull"
    back = call, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS
    refused((shm_pair.prompt, shm_pair.decoder), ["kv"], CacheMismatch, [text], *back)
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS)
    same_bytes(shm_pair.decoder.do(show, "kv"), moved(target, source, PAIRS))


def dial(world: World, port: int) -> None:
    """Link to whoever listens there."""
    links_of(world).link(None, ("127.0.0.1", port), Deadline(10_000))


@pytest.mark.parametrize("rca", [False, True], ids=["alone", "rca"])
def test_models_bound_what_a_peer_finds_by_key_id_and_address(
    route: tuple[Pair, str], tmp_path: Path, rca: bool
) -> None:
    pair, memory = route
    start(pair, tmp_path, {"2": ALL | {"models": [0, 3]}}, rca=rca)
    pair.link()
    used = [end.do(explain, peer) for end, peer in ((pair.prompt, 2), (pair.decoder, 1))]
    assert {each.transport for each in used} == {"tcp" if pair.transport == "auto" else pair.transport}
    if pair.transport == "auto":
        assert all("llm.PeerPolicy allows cluster 2 some models only" in each.reason for each in used)
    names = ["shut", "no key", "row", "open", "kv", "mine"]
    shut, key, row = BlocksCacheKey(1, 5), BlocksCacheKey(1, 3), CacheKey(1, req_id=1, model_id=5)
    pair.prompt.do(make, "shut", Spec(blocks=True, blocks_key=shut, memory=memory), 1)
    pair.prompt.do(make, "no key", Spec(rows=2), 2)
    pair.prompt.do(make, "row", Spec(rows=1, keys=(row,), memory=memory), 3)
    there: Bytes = pair.prompt.do(make, "open", Spec(blocks=True, blocks_key=key, memory=memory), 4)
    here: Bytes = pair.decoder.do(make, "kv", Spec(blocks=True, memory=memory), 5)
    pair.decoder.do(make, "mine", Spec(rows=2), 6)
    pair.prompt.do(grant, [0], LONG, "shut", bytes(16))
    ids = {name: CacheKeyByIdAndIndex(1, pair.prompt.do(moves.cache_id, name), 0) for name in names[:3]}
    blocks, mine = (Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS), Use("mine")
    model, cache = "to use model 5", "which has no key of its models"
    attempts: list[tuple[str, Any, *tuple[Any, ...]]] = [
        (model, call, "pull_blocks", shut, *blocks),
        (cache, call, "pull_cache", ids["no key"], mine),
        (cache, call, "pull_cache", ids["row"], mine),
        (cache, claim, bytes(16)),
    ]
    if rca:
        attempts += [
            (model, call, "push_blocks", shut, *blocks),
            (cache, call, "push_blocks", ids["shut"], *blocks),
            (cache, call, "push_cache", ids["no key"], mine),
            # How many rows it has is not told either.
            (cache, call, "push_cache", CacheKeyByIdAndIndex(1, ids["no key"].cache_id, 7), mine),
        ]
    else:
        attempts.append((model, call, "pull_cache", row, mine))
        attempts.append(("in none of the 1 caches", send_raw, raw(pair.prompt, "shut", range(2))))
    for text, *args in attempts:
        refused((pair.decoder, pair.prompt), names, CacheMismatch, [text], *args)
    pair.decoder.do(call, "pull_blocks", key, *blocks)
    here = moved(here, there, PAIRS)
    if rca:
        pair.decoder.do(call, "push_blocks", key, Use("kv"), [2], [5])
        there = moved(there, here, [(5, 2)])
    else:
        pair.decoder.do(send_raw, raw(pair.prompt, "open", range(2)))
        there = spanned(there, here, [(dst * 48, src * 48, 48) for dst, src in PAIRS])
    same_bytes(pair.decoder.do(show, "kv"), here)
    same_bytes(pair.prompt.do(show, "open"), there)


def pools(world: World) -> list[int]:
    """Return the inodes of the memfds behind the pools."""
    engine = world.dd._require_engine("test")
    segments: list[Any] = list(engine.store.exports.regions.values())
    return [os.fstat(segment.fd).st_ino for segment in segments]


def mapped(world: World, inodes: list[int]) -> list[str]:
    """Return the permissions under which this process has mapped these files."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    return sorted(line[1] for line in lines if int(line[4]) in inodes and "memfd" in line[5])


@pytest.mark.parametrize("by", ["prompt", "decoder"])
@pytest.mark.parametrize(
    ("verbs", "permissions", "transports"),
    [
        (rules("pull", "push"), ["rw-s", "rw-s"], ("shm", "cma")),
        (rules("pull"), ["r--s", "r--s"], ("shm", "cma")),
        (rules("locate", "consume"), [], ("shm", None)),
        (rules("push"), [], ("tcp", "tcp")),
        (rules("pull", "push", models=[0]), [], ("tcp", "tcp")),
    ],
    ids=["both", "pull", "neither", "push", "models"],
)
def test_a_peer_maps_of_our_pools_what_it_may_use(
    shm_pair: Pair, tmp_path: Path, verbs: dict[str, Any], permissions: list[str], transports: Any, by: str
) -> None:
    """Whichever end dials; the end with the policy goes on reading its peer."""
    shm_pair.transport = "auto"
    start(shm_pair, tmp_path, {"*": verbs}, by=by, rca=True)
    shm_pair.link()
    owner, peer = (shm_pair.prompt, shm_pair.decoder)[:: 1 if by == "prompt" else -1]
    assert peer.do(mapped, owner.do(pools)) == permissions
    assert owner.do(mapped, peer.do(pools)) == (["rw-s", "rw-s"] if transports[0] == "shm" else [])
    seen = peer.do(explain, owner.cluster_id)
    assert (seen.transport, seen.private_transport) == transports
    assert owner.do(explain, peer.cluster_id).transport == transports[0]
    key = BlocksCacheKey(peer.cluster_id, 0)
    source: Bytes = peer.do(make, "kv", Spec(blocks=True, blocks_key=key), 1)
    target: Bytes = owner.do(make, "kv", Spec(blocks=True), 2)
    owner.do(call, "pull_blocks", key, Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS)
    same_bytes(owner.do(show, "kv"), moved(target, source, PAIRS))


@contextmanager
def offered(name: str, hello: wire.Hello, exports: Exports) -> Iterator[Packet]:
    """Yield what the same-host listener answers to a stranger that says its token."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, MemoryOffer(exports, hello.token) as offer:
        sock.settimeout(20)
        sock.connect(samehost._address(name))
        while not readable(sock.fileno()):
            with suppress(PermissionError):  # until the listener has admitted this process
                offer.send(sock)
                break
        with Packet.receive(sock) as packet:
            yield packet


def test_a_stranger_gets_the_descriptors_that_it_may_use_and_no_others(end: LocalEnd) -> None:
    """Strangers 66 to 69 link or not as the policy says; 70 is not named."""
    named: dict[int, dict[str, Any]] = {
        66: rules(),
        67: rules("pull"),
        68: rules("push"),
        69: rules("pull", "push", models=[1]),
    }
    extra = {"llm.Insecure": "1", "llm.PeerPolicy": json.dumps({str(key): value for key, value in named.items()})}
    settings: dict[str, Any] = {"enable_remote_cache_accessible": True}
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **settings)
    inodes, name = set(end.do(pools)), ""
    for cluster_id, may in named.items():
        with Stranger(end.port, cluster_id) as stranger:
            hello = stranger.hello(remote_accessible=True)
            stranger.say(wire.CONTROL_PREAMBLE, hello)
            name = stranger.hear(wire.Welcome).rendezvous
            assert stranger._guards is not None
            exports = Exports(stranger.incarnation, {}, stranger._guards, writable=False)
            with offered(name, hello, exports) as packet:
                answer = decode(packet.data)
                got = [fd for fd in packet.fds if os.fstat(fd).st_ino in inodes]
                assert len(got) == (2 if may == rules("pull") else 0)
                for fd in got:
                    mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
                    with pytest.raises(PermissionError):
                        mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                    with pytest.raises(OSError, match="Bad file descriptor") as caught:
                        os.pwrite(fd, b"x", 0)
                    assert caught.value.errno == errno.EBADF
                if cluster_id in (68, 69):
                    assert isinstance(answer, Refusal)
                    assert packet.fds == []
                else:
                    assert isinstance(answer, RendezvousHello)
                    assert (answer.cookie_address == 0) is (cluster_id == 66)
    with Stranger(end.port, 70) as stranger:
        hello = stranger.hello(remote_accessible=True)
        stranger.say(wire.CONTROL_PREAMBLE, hello)
        told = stranger.hear(wire.Refused)
        assert (told.code, told.text) == (FAILED, "this listener asks for authentication")
        assert stranger.is_hung_up_on()
        assert stranger._guards is not None
        with offered(name, hello, Exports(stranger.incarnation, {}, stranger._guards, writable=False)) as packet:
            assert packet.fds == []
            assert isinstance(decode(packet.data), Refusal)
    assert end.do(links) == {}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"7": {"read": true}}', "'7'.*unknown field `read`.*known are link, pull, push, locate, consume, models"),
        ('{"7": {"pull": 1}}', r"'7'.*Expected `bool`, got `int` - at `\$.pull`"),
        ('{"7": {"pull": null}}', r"'7'.*Expected `bool`, got `null` - at `\$.pull`"),
        ('{"*": 3}', r"'\*'.*Expected `object`, got `int`"),
        ('{"seven": {}}', "'seven' is no cluster id"),
        ('{"-1": {}}', "'-1' is no cluster id"),
        ('{"07": {}}', "'07' is no cluster id"),
        ('{"18446744073709551616": {}}', "'18446744073709551616' is no cluster id.*at most 18446744073709551615"),
        ('{"7": {"models": 3}}', r"'7'.*Expected `array`, got `int` - at `\$.models`"),
        ('{"7": {"models": ["0"]}}', r"'7'.*Expected `int`, got `str` - at `\$.models\[0\]`"),
        ('{"7": {"models": [true]}}', r"'7'.*Expected `int`, got `bool`"),
        ('{"7": {"models": [-1]}}', "'7'.*Expected `int` >= 0"),
        ('{"7": {"models": [18446744073709551616]}}', "'7': models: 18446744073709551616 is no model id"),
        ('{"7": {"link": tru}}', "no JSON object of cluster ids: .*JSON is malformed|Expecting value"),
        ('{"7": ' + "[" * 100_000, "no JSON object of cluster ids|Expected `object`"),
        ("{folder}/latin", "latin': no JSON object of cluster ids"),
        ('{"7": {}, "8": {}, "7": {"link": true}}', "'7' is there twice"),
        ('{"7": {"link": false, "link": true}}', "'link' is there twice"),
        ('{"7": {"link": true}', "no JSON object of cluster ids: Input data was truncated"),
        ("", "neither JSON nor the path of a file"),
        ("{folder}/missing", "missing' cannot be read: No such file"),
        ("{folder}", "is no regular file|cannot be read: Is a directory"),
        ("{folder}/list", "list': no JSON object of cluster ids: Expected `object`, got `array`"),
        ("{folder}/verb", "verb': '7'.*unknown field `read`"),
        ("x\0y", "NUL and lone surrogates are not allowed"),
    ],
)
def test_errors_of_a_policy_are_named_at_init(end: LocalEnd, tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "list").write_text("[]")
    (tmp_path / "latin").write_bytes(b'{"7\xe9": {}}')
    (tmp_path / "verb").write_text('{"7": {"read": true}}')
    extra = secret_file(tmp_path / "secrets", a=SECRET) | {"llm.PeerPolicy": text.replace("{folder}", str(tmp_path))}
    with pytest.raises(ParamError, match=rule) as caught:
        end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    assert str(caught.value).startswith("llm.PeerPolicy")
    assert "\n" not in str(caught.value)


def test_a_policy_needs_peers_that_prove_who_they_are(
    end: LocalEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or ``llm.Insecure``, by which they are believed; a policy may be in a file."""
    monkeypatch.delenv("LLM_DATADIST_INSECURE", raising=False)
    path = tmp_path / "policy.json"
    path.write_text(' {"7": {"link": true}}')
    extra = {"llm.PeerPolicy": str(path)}
    with pytest.raises(
        ParamError, match=r"llm.PeerPolicy: without authentication .* llm.AuthSecretFile .*llm.Insecure"
    ):
        end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra | {"llm.Insecure": "1"})
    assert "llm.PeerPolicy without authentication: peers are believed" in caplog.text


def test_a_certificate_binds_the_cluster_id_that_a_policy_names(local_pair: Pair, tmp_path: Path) -> None:
    """So a peer that says another id, which may do more, is not linked."""
    authority = Authority(tmp_path)
    policy = {"llm.PeerPolicy": json.dumps({"9": ALL, "2": rules("pull")})}
    extra = {"llm.Transport": "tcp"}
    there, here = (extra | authority.issue(name, clusters) for name, clusters in (("prompt", [1]), ("decoder", [2])))
    local_pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=there | policy)
    local_pair.decoder.start("DECODER", 9, extra=here)
    assert local_pair.decoder.do(link, [info(1, local_pair.prompt.port)]) == (FAILED, [FAILED])
    local_pair.decoder.stop()
    local_pair.decoder.start("DECODER", 2, extra=here)
    local_pair.link()
    with pytest.raises(CacheNotFound):
        local_pair.decoder.do(pull_from, 1)


def test_no_text_of_an_end_shows_a_secret(local_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(local_pair, tmp_path, {"2": ALL})
    local_pair.link()
    secret = (tmp_path / "secrets").read_text().split()[1]
    for end in (local_pair.prompt, local_pair.decoder):
        texts = [*end.do(texts_of), caplog.text]
        assert [text for text in texts if secret in text or SECRET.decode() in text] == []
        assert any("statistics" in text.lower() for text in texts)


def texts_of(world: World) -> list[str]:
    """Return all that an end says of itself."""
    engine = world.dd._require_engine("test")
    own = [engine, engine.options, engine._access, vars(engine), engine.links.all()]
    objects = [world.dd, world.dd.statistics(), *own]
    return [repr(each) for each in objects] + [str(each) for each in objects]
