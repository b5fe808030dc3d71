"""An attacker between two processes who changes what their greetings say of versions and features.

Authenticated links notice by the tag of the record, plain ones by the digest that both sides repeat. An attacker who
rewrites that, too, is not noticed in plain links, as docs/security.md says.
"""

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from faults.relay import Relay, Rewriter, Turner, Way
from faults.strangers import hello_of
from llm_datadist._deadline import Deadline
from llm_datadist._links import handshake, versions
from llm_datadist._links import messages as wire
from llm_datadist._links.identity import Transcript
from llm_datadist._links.versions import FEATURES, READS_BY_KEY, VERSIONS
from llm_datadist._log import logger
from tests.support.authority import secret_file
from tests.support.kinds import Pair, World
from tests.support.linking import alone, bytes_move_both_ways, dialled, links_of

CHANGED: Final = "the greetings were changed on the way"
NEXT: Final = (VERSIONS[0], VERSIONS[1] + 1)
#: What a link says that nobody touches.
ALL: Final = f"{NEXT[1]}: {READS_BY_KEY}"
Change = Callable[[wire.Message], wire.Message | bytes]


def speaks(world: World, spoken: tuple[int, int], features: list[str]) -> None:
    """From now on this process offers this range and these features."""
    for module in (handshake, versions):
        vars(module).update(VERSIONS=spoken, FEATURES=features)


def language(world: World, peer: int) -> str:
    version, features = links_of(world).get(peer).spoken
    assert [each.protocol for each in world.dd.statistics().links] == [version]
    return f"{version}: {' '.join(features)}"


def unlinked(world: World) -> None:
    links_of(world).unlink(1, Deadline(10_000), force=False)


def keep_log(world: World) -> None:
    world.memory["log"] = log = io.StringIO()
    logger.addHandler(logging.StreamHandler(log))


def drop_log(world: World) -> None:
    logger.removeHandler(logger.handlers[-1])


def kept_log(world: World) -> str:
    """Return what was said. It is at most once a second that a listener says why it admits nobody."""
    return str(world.memory["log"].getvalue())


def as_it_is(message: wire.Message) -> wire.Message:
    return message


class Scene:
    """Two processes that speak two versions, not linked."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.prompt, self.decoder = pair.prompt, pair.decoder

    def meets(self, up: Way, down: Way) -> str:
        """Link through a relay; return the error's text, or what both sides say of the link, over which bytes move.

        Afterwards neither has a link.
        """
        assert self.prompt.port is not None
        with Relay(("127.0.0.1", self.prompt.port), (up, down)) as relay:
            text = self.decoder.do(dialled, relay.port)
            if not text:
                bytes_move_both_ways(self.prompt, self.decoder)
                here, text = self.decoder.do(language, 1), self.prompt.do(language, 2)
                assert here == text
                self.decoder.do(unlinked)
        alone(self.decoder, self.prompt)
        return text


@pytest.fixture(params=["tcp", "shm"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    yield from apart(request.getfixturevalue(f"{request.param}_pair"))


def apart(pair: Pair, **extra: str) -> Iterator[Scene]:
    ends = pair.start(linked=False, extra=extra)
    try:
        for end in ends:
            end.do(speaks, NEXT, FEATURES)
        yield Scene(pair)
        pair.link()  # directly
        bytes_move_both_ways(*ends)
    finally:
        for end in ends:
            end.do(speaks, VERSIONS, FEATURES)


LOWERED: Final[dict[str, dict[str, Any]]] = {
    "versions": {"versions": VERSIONS},
    "wider": {"versions": (0, 2**32 - 1)},
    "features": {"features": []},
    "a feature more": {"features": [*FEATURES, "unknown"]},
}


def changing(kind: type[wire.Greeting], what: dict[str, Any]) -> Change:
    return lambda each: msgspec.structs.replace(each, **what) if isinstance(each, kind) else each


def test_changed_versions_and_features_of_plain_greetings_are_refused(scene: Scene) -> None:
    assert scene.meets(Rewriter(as_it_is), Rewriter(as_it_is)) == ALL
    for kind, what in itertools.product((wire.Hello, wire.Welcome, wire.Greeting), LOWERED):
        change = changing(kind, LOWERED[what])
        text = scene.meets(Rewriter(change), Rewriter(change))
        assert text.startswith("LinkRefused: link to 127.0.0.1:"), (kind, what, text)
        assert f": refused: {CHANGED}: " in text, (kind, what, text)  # the listener has noticed


class Attacker:
    """Takes the features out of both greetings, and puts into digests what the receivers expect."""

    def __init__(self, *digests: type[wire.Message]) -> None:
        self._digests = digests
        self._said: list[wire.Greeting] = []

    def change(self, message: wire.Message) -> wire.Message:
        if isinstance(message, wire.Greeting):
            self._said.append(message)
            return msgspec.structs.replace(message, features=[], versions=VERSIONS)
        if not isinstance(message, self._digests):
            return message
        hello, welcome = self._said
        bare: Any = {"features": [], "versions": VERSIONS}
        if isinstance(message, wire.TransportChoice):  # the listener: what it heard, what it said
            seen = msgspec.structs.replace(hello, **bare), welcome
        else:
            seen = hello, msgspec.structs.replace(welcome, **bare)
        return msgspec.structs.replace(message, agreed=Transcript.of(*seen).digest())


def test_the_dialer_notices_changed_greetings_of_which_the_listener_is_told_that_all_is_well(scene: Scene) -> None:
    attacker = Attacker(wire.TransportChoice)
    text = scene.meets(Rewriter(attacker.change), Rewriter(attacker.change))
    assert text.startswith("LinkRefused: link to 127.0.0.1:")
    assert CHANGED in text
    assert "refused:" not in text, text


def test_an_attacker_on_a_plain_link_who_rewrites_the_digests_too_is_not_kept_out(scene: Scene) -> None:
    attacker = Attacker(wire.TransportChoice, wire.Linked)
    assert scene.meets(Rewriter(attacker.change), Rewriter(attacker.change)) == f"{VERSIONS[1]}: "


# --- authenticated links ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "shm"])
def secure(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    secrets = secret_file(tmp_path / "secrets", a=b"a" * 32)
    yield from apart(request.getfixturevalue(f"{request.param}_pair"), **secrets)


def places() -> dict[str, tuple[int, int]]:
    """Return where the plain text of a greeting tells versions and features, and which bits make others of them."""
    plain = wire.frame(hello_of(1, bytes(16), bytes(16), versions=NEXT))
    return {
        "versions": (plain.index(bytes([0x92, *NEXT])) + 2, NEXT[1] ^ VERSIONS[1]),
        "features": (plain.index(READS_BY_KEY.encode()), 0x20),
    }


def test_a_greeting_changed_in_an_authenticated_link_has_a_wrong_tag(secure: Scene) -> None:
    log: list[tuple[str, int]] = []

    def way(direction: str, *change: int) -> Turner:
        return Turner(lambda nbytes: log.append((direction, nbytes)), *change)

    assert secure.meets(way("up"), way("down")) == ALL
    # Up, down, up: the handshake of TLS, then Hello in the last record. Welcome is the next one down.
    turns = [(each, len(list(group))) for each, group in itertools.groupby(log, lambda entry: entry[0])]
    assert [each for each, _ in turns[:6]] == ["up", "down", "up", "down", "up", "down"]
    hello, welcome = turns[0][1] + turns[2][1] - 1, turns[1][1]
    sizes = {name: [nbytes for each, nbytes in log if each == name] for name in ("up", "down")}
    assert min(sizes["up"][hello], sizes["down"][welcome]) > 150  # a greeting
    secure.prompt.do(keep_log)
    for (place, mask), (direction, record) in itertools.product(places().values(), (("up", hello), ("down", welcome))):
        up, down = (way(each, record, place, mask) if each == direction else way(each) for each in ("up", "down"))
        text = secure.meets(up, down)
        assert up.turned or down.turned
        said = text if direction == "down" else secure.prompt.do(kept_log)  # by the side that heard it
        assert "AuthFailed: link to 127.0.0.1:" in text
        assert "bad record mac" in said, (direction, text, said)
    secure.prompt.do(drop_log)
