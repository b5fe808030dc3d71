"""Choice of a link's transports: a decision without I/O, which both sides make alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from llm_datadist.errors import LinkRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist._transport.connection import Capabilities


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of one peer by a transport; ``reason`` is one line, for :meth:`LLMDataDist.explain`."""

    possible: bool
    reason: str
    silent: bool = False  # impossible, and mentioned only if the transport is asked for
    final: bool = False  # impossible, and no other transport reaches that memory either


class Candidate:
    """A transport, as far as the choice needs it."""

    name: str  # as in ``llm.Transport``
    capabilities: Capabilities  # of its connections
    beside: bool = False  # may carry non-pool memory beside a transport that does not reach it
    peer_cannot: str = "the peer cannot use it"  # reason if only the peer cannot use it


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Choice:
    name: str  # for the peer's pools
    private: str | None  # for the peer's non-pool memory; None if no transport reaches it
    reason: str  # one line: why these, and why none of the better ones


def agree(mine: str | None, theirs: str | None, known: Sequence[str]) -> str | None:
    """Return the transport that either side asks for, if any; it binds both. Raises LinkRefused."""
    if mine is not None and theirs is not None and mine != theirs:
        raise LinkRefused(f"llm.Transport differs: {theirs} at the peer, {mine} here")
    if theirs is not None and theirs not in known:
        rule = f"this side has {', '.join(known)}, and imports no other for a peer: set llm.Transport here too"
        raise LinkRefused(f"the peer asks for llm.Transport={theirs!r}; {rule}")
    return mine or theirs


def choose(candidates: Sequence[C], judge: Callable[[C], Verdict], forced: str | None) -> Choice:
    """Return the first usable candidate (best first), or the ``forced`` one, a candidate. Raises LinkRefused."""
    known = {each.name: each for each in candidates}
    against: list[str] = []
    automatic = [each for each in candidates if each.capabilities.shared_regions]
    for each in automatic if forced is None else [known[forced]]:
        verdict = judge(each)
        if verdict.possible:
            choice = Choice(each.name, each.name, "; ".join([verdict.reason, *against]))
            if each.capabilities.non_pool_memory:
                return choice
            if forced is not None:
                return _without_private(choice, f"llm.Transport is {forced}")
            return _with_private(choice, [other for other in candidates if other.beside], judge)
        if forced is not None or not verdict.silent:
            against.append(f"not {each.name}: {verdict.reason}")
    raise LinkRefused(f"llm.Transport={forced!r} cannot reach the peer: {'; '.join(against)}")


def _with_private(choice: Choice, beside: Sequence[C], judge: Callable[[C], Verdict]) -> Choice:
    against: list[str] = []
    for each in beside:
        verdict = judge(each)
        if verdict.possible:
            but = "".join(f", not by {text}" for text in against)
            return replace(choice, private=each.name, reason=f"{choice.reason}; non-pool memory by {each.name}{but}")
        if verdict.final:
            return _without_private(choice, verdict.reason)
        against.append(f"{each.name}: {verdict.reason}")
    return _without_private(choice, "; ".join(against))


def _without_private(choice: Choice, reason: str) -> Choice:
    return replace(choice, private=None, reason=f"{choice.reason}; non-pool memory by nothing: {reason}")


def yield_to(choice: Choice, candidates: Sequence[Candidate], theirs: str | None) -> Choice:
    """Return the choice with the peer's transport for non-pool memory if that is the less preferred one."""
    beside = {each.name: each for each in candidates if each.beside}
    order = [*beside]
    mine = choice.private
    if mine is None or mine == choice.name or theirs not in order or order.index(theirs) <= order.index(mine):
        return choice
    return replace(choice, private=theirs, reason=f"{choice.reason}, but {beside[mine].peer_cannot}: by {theirs}")
