"""The choice of a link's transports: a pure decision that both sides make alike."""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 (dataclasses of data)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llm_datadist.errors import LinkRefused, ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Verdict:
    """A transport's judgement of one peer; ``reason`` is one line, for :meth:`LLMDataDist.explain`."""

    possible: bool
    reason: str
    silent: bool = False  # impossible, and not worth a word unless the transport is asked for
    final: bool = False  # impossible, and no other transport reaches that memory either


@dataclass(frozen=True, slots=True)
class Candidate:
    """One transport, as far as the choice needs it."""

    name: str
    pools: bool  # it reaches what the peer exports
    non_pool: bool  # it reaches the peer's other memory
    beside: bool  # it may carry non-pool memory beside a transport that does not reach that
    peer_cannot: str  # why the peer alone may be unable to use it
    judge: Callable[[], Verdict]


@dataclass(frozen=True, slots=True)
class Choice:
    """The transports of a link, and why those."""

    name: str  # for what the peer exports
    private: str | None  # for the peer's non-pool memory; None: nothing reaches it
    reason: str  # one line: why they can be used, and why each better one cannot


def agree(mine: str | None, theirs: str | None, known: Sequence[str]) -> str | None:
    """Return the transport that one of the sides asks for, None if neither does. The other side takes it too."""
    if theirs is not None and theirs not in known:
        raise LinkRefused(f"the peer asks for llm.Transport={theirs!r}; known here are {', '.join(known)}")
    if mine is not None and theirs is not None and mine != theirs:
        raise LinkRefused(f"llm.Transport differs: {theirs} at the peer, {mine} here")
    return mine or theirs


def choose(candidates: Sequence[Candidate], forced: str | None) -> Choice:
    """Return the first candidate that both sides can use, or the forced one for everything."""
    known = {each.name: each for each in candidates}
    if forced is not None and forced not in known:
        raise ParamError(f"llm.Transport={forced!r} is no transport; known are {', '.join(known)}")
    against: list[str] = []
    for each in [each for each in candidates if each.pools] if forced is None else [known[forced]]:
        verdict = each.judge()
        if verdict.possible:
            return _with_private(each, "; ".join([verdict.reason, *against]), forced, candidates)
        if forced is not None or not verdict.silent:
            against.append(f"not {each.name}: {verdict.reason}")
    raise LinkRefused(f"llm.Transport={forced!r} cannot reach the peer: {'; '.join(against)}")


def _with_private(chosen: Candidate, reason: str, forced: str | None, candidates: Sequence[Candidate]) -> Choice:
    """Add how non-pool memory is reached: by the same transport, else by the first that may be beside it."""
    if chosen.non_pool:
        return Choice(chosen.name, chosen.name, reason)
    by, against = "private memory by", [] if forced is None else [f"llm.Transport is {forced}"]
    for each in candidates if forced is None else ():
        if not each.beside:
            continue
        verdict = each.judge()
        if verdict.possible:
            but = "".join(f", not by {text}" for text in against)
            return Choice(chosen.name, each.name, f"{reason}; {by} {each.name}{but}")
        if verdict.final:
            against = [verdict.reason]
            break
        against.append(f"{each.name}: {verdict.reason}")
    return Choice(chosen.name, None, f"{reason}; {by} nothing: {'; '.join(against)}")


def yield_to(choice: Choice, candidates: Sequence[Candidate], theirs: str | None) -> Choice:
    """Return the choice with the peer's transport for non-pool memory, if the peer cannot use the better one."""
    beside = {each.name: each for each in candidates if each.beside}
    order = [*beside]
    mine = choice.private
    if mine is None or mine == choice.name or theirs not in order or order.index(theirs) <= order.index(mine):
        return choice
    return replace(choice, private=theirs, reason=f"{choice.reason}, but {beside[mine].peer_cannot}: by {theirs}")
