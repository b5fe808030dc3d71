"""A peer whose every text holds terminal escapes: nothing that people read here has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from faults.strangers import Stranger, listener, read_hello
from llm_datadist import BlocksCacheKey, LLMException
from llm_datadist._links import messages as wire
from llm_datadist._statistics_page import cleaned
from tests.support.kinds import LocalEnd, World
from tests.support.linking import dialled, explain
from tests.support.moves import Spec, call, make

EVIL: Final = "x\x1b]0;owned\x07\x1b[2J\n\u202eFATAL\x9b31m"


def answer(stranger: Stranger, kind: type[Any], make_answer: Callable[[int], wire.Message]) -> threading.Thread:
    """Answer the next message of a kind, in a thread."""

    def serve() -> None:
        stranger.say(make_answer(stranger.hear(kind).id))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def ask(world: World) -> None:
    world.dd.ask(66, "x", b"", 10_000)


def claim(world: World) -> None:
    world.cm.claim_grant(66, bytes(16))


def pull(world: World) -> None:
    call(world, "pull_blocks", BlocksCacheKey(66), world.caches["kv"], [0], [0])


def test_no_error_log_reason_or_statistic_has_an_escape_of_a_peer(
    end: LocalEnd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "llm_datadist")
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0")
    end.do(make, "kv", Spec(blocks=True), 1)
    shown: list[str] = []
    with Stranger(end.port) as stranger:
        stranger.link(over="tcp", host=EVIL, choice={"reason": EVIL})
        for function, kind, made in (
            (ask, wire.Question, lambda number: wire.Failed(number, 1, EVIL)),
            (claim, wire.Claim, lambda number: wire.ClaimOver(number, EVIL, 1)),
            (pull, wire.Resolve, lambda number: wire.Failed(number, 1, EVIL)),
        ):
            thread = answer(stranger, kind, made)
            with pytest.raises(LLMException) as caught:
                end.do(function)
            thread.join()
            shown.append(str(caught.value))
        shown.append(end.do(explain, 66).peer_host)
        statistics = msgspec.json.decode(msgspec.json.encode(end.world.dd.statistics()))
        assert all("x?]0;owned??[2J ?FATAL?31m" in text for text in [*shown, str(statistics)]), shown
        assert cleaned(statistics) == statistics

    def refuse(sock: Any) -> None:
        read_hello(sock)
        sock.sendall(wire.frame(wire.Refused(1, EVIL)))

    with listener(refuse) as port:
        shown.append(end.do(dialled, port))
    logged = [record.getMessage() for record in caplog.records]
    assert any("FATAL" in text for text in logged)
    assert [text for text in [*shown, *logged] if not text.isprintable()] == []
