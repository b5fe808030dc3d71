"""An attacker between two processes who changes what their greetings say of versions and features.

Authenticated links notice by the tag of the record, plain ones by the digest that both sides repeat. An attacker who
rewrites that, too, is not noticed in plain links, as docs/security.md says.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from faults.relay import Relay, Rewriter, Way
from faults.sealing import DATA, TLS_RECORDS
from tests.support.authority import secret_file
from tests.support.kinds import Pair, World
from tests.support.linking import alone, bytes_move_both_ways, dialled, language, links_of, speaking
from tests.support.probe import deadline
from tests.support.wire import FEATURES, VERSIONS, Transcript
from tests.support.wire import messages as wire

CHANGED: Final = "the greetings were changed on the way"
NEXT: Final = (VERSIONS[0], VERSIONS[1] + 1)
#: What a link says that nobody touches.
ALL: Final = f"{NEXT[1]}: {' '.join(sorted(FEATURES))}"
Meets = Callable[..., str]


def unlinked(world: World) -> None:
    links_of(world).unlink(1, deadline(10_000), force=False)


@contextmanager
def apart(pair: Pair, **extra: str) -> Iterator[Meets]:
    """Two processes that speak two versions, not linked; afterwards they link directly."""
    prompt, decoder = pair.start(linked=False, extra=extra)

    def meets(up: Way, down: Way, *, moves: bool = True) -> str:
        """Link through a relay; return the error, or what both sides say of the link, over which bytes move."""
        with Relay(("127.0.0.1", prompt.port or 0), (up, down)) as relay:
            text = decoder.do(dialled, relay.port)
            if not text:
                if moves:
                    bytes_move_both_ways(prompt, decoder)
                here, text = decoder.do(language, 1), prompt.do(language, 2)
                assert here == text
                decoder.do(unlinked)
        alone(decoder, prompt)
        return text

    with speaking(prompt, decoder, spoken=NEXT):
        yield meets
        pair.link()
        bytes_move_both_ways(prompt, decoder)


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(f"{request.param}_pair")
    return found


class Attacker:
    """Changes greetings of this kind, and puts into these digests what the receivers expect."""

    def __init__(self, what: dict[str, Any], kind: type[wire.Greeting], *digests: type[wire.Message]) -> None:
        self._what, self._kind, self._digests = what, kind, digests
        self._said: list[wire.Greeting] = []

    def change(self, message: wire.Message) -> wire.Message:
        if isinstance(message, wire.Greeting):
            self._said.append(message)
            return replace(message, **self._what) if isinstance(message, self._kind) else message
        if not isinstance(message, self._digests):
            return message
        hello, welcome = self._said
        if isinstance(message, wire.TransportChoice):  # to the listener: what it heard, what it said
            hello = replace(hello, **self._what)
        else:
            welcome = replace(welcome, **self._what)
        return replace(message, agreed=Transcript.of(hello, welcome).digest())


def test_changed_versions_and_features_of_plain_greetings_are_refused(pair: Pair) -> None:
    bare = {"features": [], "versions": VERSIONS}
    lowered: tuple[dict[str, Any], ...] = (
        {"versions": VERSIONS},
        {"versions": (0, 2**32 - 1)},
        {"features": []},
        {"features": [*FEATURES, "unknown"]},
    )
    cases: list[tuple[str, Attacker]] = [(ALL, Attacker({}, wire.Greeting))]
    cases += [
        (f": refused: {CHANGED}: ", Attacker(what, kind))  # the listener has noticed
        for what, kind in itertools.product(lowered, (wire.Hello, wire.Welcome, wire.Greeting))
    ]
    cases += [
        (CHANGED, Attacker(bare, wire.Greeting, wire.TransportChoice)),  # the dialer: the listener believes
        (f"{VERSIONS[1]}: ", Attacker(bare, wire.Greeting, wire.TransportChoice, wire.Linked)),
    ]
    with apart(pair) as meets:
        for expected, attacker in cases:
            text = meets(Rewriter(attacker.change), Rewriter(attacker.change))
            if CHANGED in expected:
                assert text.startswith("LinkRefused: link to 127.0.0.1:")
                assert (expected in text, "refused:" in text) == (True, "refused:" in expected), text
            else:
                assert text == expected


def test_a_greeting_changed_in_an_authenticated_link_has_a_wrong_tag(pair: Pair, tmp_path: Path) -> None:
    """So has each record that is large enough to be one; the others are of TLS or a choice."""
    with apart(pair, **secret_file(tmp_path / "secrets", a=b"a" * 32)) as meets:
        honest = Way(), Way()
        assert meets(*honest, moves=False) == ALL
        for number, way in enumerate(honest):
            at, large = 0, []
            for record in TLS_RECORDS.records_of(bytes(way.came)):
                large += [at + 100] if record[0] == DATA and len(record) > 150 else []
                at += len(record)
            assert len(large) > 1
            for at in large:
                harmful = (Way(at), Way()) if number == 0 else (Way(), Way(at))
                text = meets(*harmful)
                assert harmful[number].hit
                assert text.startswith(("AuthFailed: link to 127.0.0.1:", "LinkRefused: link to 127.0.0.1:")), text
