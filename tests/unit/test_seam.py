"""The seam of the transports: none is named outside its places, and a connection has what every transport has."""

import ast
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

import llm_datadist
from llm_datadist import LLMDataDist, LLMRole, _option_kinds
from llm_datadist._transport import instances
from llm_datadist._transport.registry import Transports, transports_for
from llm_datadist._transport.tcp.connection import TcpTransport
from llm_datadist.errors import LinkRefused, LLMException
from tests.support.world import make_config

ROOT = Path(llm_datadist.__file__).parent
#: Where transports may be named: their package, the options, the tools. Docstrings are documentation.
PLACES = {"_transport", "transport.py", "config.py", "_option_kinds.py", "tools", "testing", "integrations"}
NAMES = {*_option_kinds.TRANSPORTS[1:]}
LANES = {"lane", "lanes"}  # what tcp has, and the native engine that is its own


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] not in PLACES:
            yield str(place), ast.parse(path.read_text())


def words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}


def said(tree: ast.Module) -> Iterator[str]:
    """Yield every identifier and every string that is no docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            if isinstance(value := getattr(node, field, None), str) and not hasattr(socket, value):
                yield value


def test_no_transport_is_named_outside_its_places() -> None:
    found = {}
    for place, tree in modules():
        forbidden = NAMES if place.startswith("_native") else NAMES | LANES
        named = sorted({text for text in said(tree) if words(text) & forbidden})
        if named:
            found[place] = named
    assert found == {}


def test_nobody_outside_asks_of_which_transport_a_connection_is() -> None:
    for place, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = ast.unparse(node.args[1])
                assert not re.search(r"(Connection|Transport)\b", asked), f"{place}: isinstance(..., {asked})"


def test_the_option_has_the_transports_in_the_order_of_preference() -> None:
    assert ("auto", *(kind.name for kind in transports_for("nixl"))) == _option_kinds.TRANSPORTS


def test_lanes_are_not_dialled_to_a_peer_that_has_offered_none() -> None:
    """NIXL asks for lanes to fall back on without a word of the peer about them."""
    transport = TcpTransport.__new__(TcpTransport)
    for offered in ({}, {"tcp": b"too short"}):
        meeting = Mock(dialled=True, theirs=offered, forced="nixl")
        with pytest.raises(LinkRefused, match="the peer takes no data lanes"):
            transport.connect(meeting)


def test_a_transport_that_cannot_be_started_or_closed_costs_no_other_one() -> None:
    transports = Transports.__new__(Transports)
    ends: list[str] = []
    broken = Mock(
        close=Mock(side_effect=OSError("full")),
        stop=Mock(side_effect=OSError("full")),
        abandon=Mock(side_effect=OSError("full")),
    )
    after = Mock(**{f"{verb}.side_effect": partial(ends.append, verb) for verb in ("close", "stop", "abandon")})
    transports.exports, transports.by_name = Mock(), {"broken": broken, "after": after}
    for call in (transports.stop, transports.close, transports.abandon):
        with pytest.raises(OSError, match="full"):
            call()
    assert ends == ["stop", "close", "abandon"]


def test_an_init_whose_transports_cannot_start_leaves_no_instance_behind() -> None:
    before = dict(instances._instances)
    with pytest.raises(LLMException, match="/no/where"):
        LLMDataDist(LLMRole.PROMPT, 1).init(make_config(extra={"llm.ShmSocketDir": "/no/where"}))
    assert before == instances._instances
