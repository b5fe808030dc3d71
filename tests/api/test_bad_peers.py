"""Strangers at our listener, and linked peers who misbehave: only they suffer."""

from __future__ import annotations

import struct
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist._cache.registry import Namespace
from llm_datadist._links.messages import (
    CONTROL_PREAMBLE,
    FRAME_LIMIT,
    Beat,
    Consumed,
    Failed,
    Linked,
    Message,
    Ping,
    Pong,
    Refused,
    Release,
    Resolve,
    Resolved,
    TransportChoice,
    UnlinkAck,
    UnlinkCancel,
    UnlinkRequest,
    Welcome,
    frame,
)
from tests.support.gates import stopped
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links
from tests.support.moves import BLOCKS, Spec, Use, make, moved, picture, same_bytes, show, wait_until
from tests.support.strangers import Stranger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair

MAX = 2**63 - 1
BAD_BYTES: Final[dict[str, bytes]] = {
    "nothing": b"",
    "garbage": b"\xff" * 4096,
    "zeroes": bytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a preamble": CONTROL_PREAMBLE[:5],
    "another version": CONTROL_PREAMBLE[:9] + b"\x63" + CONTROL_PREAMBLE[10:],
    "another purpose": CONTROL_PREAMBLE[:11] + b"\x09",
    "half a header": CONTROL_PREAMBLE + b"\0\0",
    "half a frame": CONTROL_PREAMBLE + struct.pack(">I", 100) + b"abc",
    "an oversized frame": CONTROL_PREAMBLE + struct.pack(">I", FRAME_LIMIT + 1),
    "no message": CONTROL_PREAMBLE + struct.pack(">I", 3) + b"abc",
    "another message": CONTROL_PREAMBLE + frame(Beat(1)),
    "a resolve": CONTROL_PREAMBLE + frame(Resolve(1, False, None, 1, 0, 1000)),
}


@pytest.fixture
def linked(shm_pair: Pair) -> Iterator[Pair]:
    """A prompt that is linked to a decoder and must be as it was afterwards, while strangers come and go."""
    shm_pair.start()
    shm_pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    before, bytes_before = shm_pair.prompt.do(picture), shm_pair.prompt.do(show, "kv")
    yield shm_pair
    wait_until(lambda: shm_pair.prompt.do(links) == {2: "ready"})
    wait_until(lambda: shm_pair.prompt.do(picture).pins == 0)
    after = shm_pair.prompt.do(picture)
    assert (after.caches, after.keys) == (before.caches, before.keys)
    assert [pool.used_bytes for pool in after.pools] == [pool.used_bytes for pool in before.pools]
    same_bytes(shm_pair.prompt.do(show, "kv"), bytes_before)
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


def port_of(pair: Pair) -> int:
    assert pair.prompt.port is not None
    return pair.prompt.port


# --- strangers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_BYTES)
def test_a_stranger_who_says_something_else_is_hung_up_on(linked: Pair, name: str) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.say(BAD_BYTES[name])
        if len(BAD_BYTES[name]) < len(CONTROL_PREAMBLE) or "half" in name:
            stranger.sock.shutdown(1)  # it would be waited for: greetings have ten seconds
        assert stranger.is_hung_up_on()


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"version": 99}, LLMStatusCode.LLM_LINK_FAILED, "version 99"),
        ({"wanted": 77}, LLMStatusCode.LLM_LINK_FAILED, "remote_cluster_id=77"),
        ({"remote_accessible": True}, LLMStatusCode.LLM_PARAM_INVALID, "EnableRemoteCacheAccessible"),
        ({"cluster_id": 2}, LLMStatusCode.LLM_ALREADY_LINK, "another cluster id"),
    ],
)
def test_a_stranger_who_may_not_link_is_told_why(linked: Pair, changes: Any, code: LLMStatusCode, part: str) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.say(CONTROL_PREAMBLE, stranger.hello(**changes))
        refused = stranger.hear(Refused)
        assert refused.code == code
        assert part in refused.text
        assert "\n" not in refused.text
        assert stranger.is_hung_up_on()


def test_an_echo_of_the_targets_greeting_is_refused(linked: Pair) -> None:
    with Stranger(port_of(linked)) as stranger:
        hello = stranger.hello()
        stranger.say(CONTROL_PREAMBLE, hello)
        stranger.say(stranger.hear(Welcome))
        assert "expected TransportChoice" in stranger.hear(Refused).text
        assert stranger.is_hung_up_on()


@pytest.mark.parametrize("transport", ["shm", "inproc", "x\ny"])
def test_a_stranger_who_was_not_at_the_rendezvous_is_refused(linked: Pair, transport: str) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.say(CONTROL_PREAMBLE, stranger.hello())
        stranger.hear(Welcome)
        stranger.say(TransportChoice(transport, "because", 1, present=False, proof=b"", share=b""))
        refused = stranger.hear(Refused)
        assert refused.code == LLMStatusCode.LLM_LINK_FAILED
        assert "\n" not in refused.text


def test_a_token_that_is_expected_already_is_refused(linked: Pair) -> None:
    with Stranger(port_of(linked)) as first, Stranger(port_of(linked)) as second:
        token = b"t" * 16
        first.say(CONTROL_PREAMBLE, first.hello(token=token))
        first.hear(Welcome)
        second.say(CONTROL_PREAMBLE, second.hello(token=token))
        assert "token" in second.hear(Refused).text


def test_strangers_in_every_stage_of_a_handshake_disturb_nobody(linked: Pair) -> None:
    strangers = [Stranger(port_of(linked)) for _ in range(60)]
    for number, stranger in enumerate(strangers):
        whole = CONTROL_PREAMBLE + frame(stranger.hello())
        stranger.say(whole[: len(whole) * number // 59])
    strangers[-1].hear(Welcome)
    bytes_move_both_ways(linked.prompt, linked.decoder)
    for stranger in strangers:
        stranger.__exit__()


def test_two_hundred_idle_strangers_and_a_good_peer_links(shm_pair: Pair) -> None:
    shm_pair.start(linked=False)
    strangers = [Stranger(port_of(shm_pair)) for _ in range(200)]
    shm_pair.link()
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    assert strangers[0].is_hung_up_on(), "whoever has been silent for longest makes room"
    # One of the last is still listened to.
    strangers[-1].say(CONTROL_PREAMBLE, strangers[-1].hello())
    strangers[-1].hear(Welcome)
    for stranger in strangers:
        stranger.__exit__()


def test_a_storm_of_connections_leaves_nothing(linked: Pair) -> None:
    def storm() -> None:
        for number in range(60):
            # The kernel may reset a connection that was hung up on before it had said everything.
            with suppress(ConnectionError), Stranger(port_of(linked)) as stranger:
                stranger.say(list(BAD_BYTES.values())[number % len(BAD_BYTES)])

    storms = [threading.Thread(target=storm) for _ in range(4)]
    for each in storms:
        each.start()
    bytes_move_both_ways(linked.prompt, linked.decoder)
    for each in storms:
        each.join()


# --- linked peers who misbehave ---------------------------------------------------------------------------------------


def still_served(stranger: Stranger) -> None:
    stranger.say(Ping(4711))
    while stranger.hear(Pong).id != 4711:
        pass


WILD: Final = [
    Resolve(1, False, None, MAX, MAX, MAX),
    Resolve(MAX, False, None, -(2**63), 0, 0),
    Resolve(3, False, None, 2**64 - 1, 0, 0),
    Resolve(4, False, (99, 0, 0), 1, 0, 10),
    Resolve(5, False, (-(2**63), 2**64 - 1, 2**64 - 1), 1, 0, 10),
    Resolve(6, False, (int(Namespace.REQUEST), 2**64 - 1, 1), 0, 0, MAX),
    Resolve(7, True, None, 1, 0, 1000),
    Resolve(8, True, None, 0, MAX, 1000),
    Resolve(9, False, None, 0, 0, 1000),
]


def test_wild_resolves_are_answered_with_failures_and_the_link_stays(linked: Pair) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        for message in WILD:
            stranger.say(message)
            answer = stranger.hear(Failed)
            assert answer.id == message.id
            assert answer.code in (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_PARAM_INVALID)
        still_served(stranger)


def test_what_nobody_asked_for_is_ignored(linked: Pair) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        stranger.say(
            Failed(1, 0, "x"),
            UnlinkAck(1),
            Pong(MAX),
            UnlinkCancel(),
            UnlinkCancel(),
            Beat(MAX),
            Consumed(1, 0, 0, 4),
            Consumed(-5, MAX, MAX, MAX),
            *(Release(pin, 0, count) for pin in (0, 1, 2, 3, MAX) for count in (0, 1, MAX)),
        )
        still_served(stranger)


def test_a_pin_in_an_answer_that_nobody_asked_for_is_given_back(linked: Pair) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        raw = msgspec.Raw(b"\xc0")
        stranger.say(Resolved(9, 1, raw, 0, b"", b"", [], 77))
        assert stranger.hear(Release) == Release(77, 0, 0)
        still_served(stranger)


@pytest.mark.parametrize(
    "what",
    [
        frame(Linked(1, b"")),
        frame(TransportChoice("shm", "", 1, present=False, proof=b"", share=b"")),
        frame(Refused(0, "")),
        CONTROL_PREAMBLE,
        struct.pack(">I", FRAME_LIMIT + 1),
        struct.pack(">I", 1) + b"\xc1",
        b"\xff" * 100_000,
    ],
)
def test_what_has_no_place_on_a_link_costs_this_link_only(linked: Pair, what: bytes) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        stranger.say(what)
        assert stranger.is_hung_up_on()


def test_the_end_inside_a_frame_costs_this_link_only(linked: Pair) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        stranger.say(frame(Ping(1))[:6])


def test_the_pins_of_others_are_not_a_strangers_to_release(shm_pair: Pair, tmp_path: Path) -> None:
    shm_pair.start()
    spec = Spec(rows=2, stride=64, keys=(CacheKey(1, 5),))
    source = shm_pair.prompt.do(make, "kv", spec, 1)
    target = shm_pair.decoder.do(make, "kv", replace(spec, keys=()), 2)
    with (
        Stranger(port_of(shm_pair)) as stranger,
        stopped(shm_pair.decoder, "before copy", tmp_path, "pull_cache", CacheKey(1, 5), Use("kv"), 1) as pull,
    ):
        assert shm_pair.prompt.do(picture).pins == 1
        stranger.link()
        unknown = shm_pair.prompt.do(picture).unknown_releases
        stranger.say(*(Release(pin, 0, 4) for pin in range(64)))
        still_served(stranger)
        now = shm_pair.prompt.do(picture)
        assert (now.pins, now.unknown_releases) == (1, unknown + 64)
        assert len(now.keys) == 1, "nothing was consumed"
        pull.finish()
    same_bytes(shm_pair.decoder.do(show, "kv"), moved(target, source, [(1, 0)]))
    same_bytes(shm_pair.prompt.do(show, "kv"), source)
    wait_until(lambda: shm_pair.prompt.do(picture).pins == 0)
    assert shm_pair.prompt.do(picture).keys == ()


def test_replayed_frames_do_nothing_twice(shm_pair: Pair) -> None:
    shm_pair.start()
    keys = (CacheKey(1, 5), CacheKey(1, 6))
    shm_pair.prompt.do(make, "kv", Spec(rows=2, stride=64, keys=keys), 1)
    with Stranger(port_of(shm_pair)) as stranger:
        stranger.link()
        resolve = Resolve(1, False, (int(Namespace.REQUEST), 5, 0), 0, 0, 10_000)
        stranger.say(resolve, resolve)
        first, second = stranger.hear(Resolved), stranger.hear(Resolved)
        assert first.pin != second.pin
        release = Release(first.pin, 0, 4)
        stranger.say(release, release, release)
        still_served(stranger)
        after = shm_pair.prompt.do(picture)
        assert (after.pins, after.unknown_releases, len(after.keys)) == (1, 2, 1)
    wait_until(lambda: shm_pair.prompt.do(picture).pins == 0)  # the second pin went with its peer
    assert len(shm_pair.prompt.do(picture).keys) == 1


def test_unlink_requests_without_end_are_answered_and_the_link_goes_with_the_peer(linked: Pair) -> None:
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        for number in range(20):
            stranger.say(UnlinkRequest(number))
            assert stranger.hear(UnlinkAck).id == number
        assert linked.prompt.do(links)[66] == "draining"
        stranger.say(UnlinkCancel())
        still_served(stranger)
        assert linked.prompt.do(links)[66] == "ready"


def test_a_peer_that_asks_and_never_listens_is_served_no_more(linked: Pair) -> None:
    question: Message = Resolve(1, False, (int(Namespace.REQUEST), 2**64 - 1, 0), 0, 0, 1000)
    with Stranger(port_of(linked)) as stranger:
        stranger.link()
        stranger.sock.settimeout(1.0)
        # Megabytes of questions, each with an answer nobody takes: at some point the other side reads no more.
        with suppress(TimeoutError):
            while True:
                stranger.say(frame(question) * 5000)
        bytes_move_both_ways(linked.prompt, linked.decoder)


def test_a_stranger_may_link_again_and_replaces_its_own_link_only(linked: Pair) -> None:
    incarnation = b"s" * 16
    with (
        Stranger(port_of(linked), incarnation=incarnation) as first,
        Stranger(port_of(linked), incarnation=incarnation) as second,
    ):
        first.link(sequence=1)
        second.link(sequence=2)
        assert first.is_hung_up_on()
        still_served(second)
        with Stranger(port_of(linked), incarnation=incarnation) as stale, pytest.raises(AssertionError, match="Linked"):
            stale.link(sequence=1)
        still_served(second)
        assert linked.prompt.do(links) == {2: "ready", 66: "ready"}


def test_a_good_peer_links_while_a_stranger_holds_up_its_own_handshake(shm_pair: Pair) -> None:
    shm_pair.start(linked=False)
    with Stranger(port_of(shm_pair), cluster_id=2) as stranger:
        stranger.say(CONTROL_PREAMBLE, stranger.hello())
        stranger.hear(Welcome)
        assert shm_pair.decoder.do(link, [info(1, port_of(shm_pair))]) == SUCCESS
        stranger.say(TransportChoice("shm", "too late", 1, present=False, proof=b"", share=b""))
        stranger.hear(Refused)
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
