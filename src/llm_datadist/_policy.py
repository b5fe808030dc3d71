"""Permissions of peers, from the option ``llm.PeerPolicy``: values and parser.

The text is a JSON object from cluster ids, or ``*`` for all others, to permissions; others are denied.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from functools import partial
from typing import Annotated, Final

import msgspec

from llm_datadist._checks import check_rule, clean, is_digits
from llm_datadist.errors import ParamError

OTHERS: Final = "*"
"""Name of all clusters that the policy does not name."""

_UINT64_MAX: Final = 2**64 - 1
_MAX_FILE_BYTES: Final = 1 << 20
_MAX_SHOWN: Final = 200


class Permissions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Permissions of one peer.

    ``models`` limits them to caches with a key of these models; unset: all caches. ``tenant`` names the group of peers
    to which handlers of questions count it.
    """

    link: bool = False
    pull: bool = False
    push: bool = False
    locate: bool = False
    consume: bool = False
    ask: bool = False
    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = ""  # checked if given
    models: frozenset[Annotated[int, msgspec.Meta(ge=0)]] | msgspec.UnsetType = msgspec.UNSET


_decode_peers: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_rules: Final = msgspec.json.Decoder(Permissions).decode


class PeerPolicy:
    """Permissions of every cluster. Immutable."""

    def __init__(self, named: dict[int, Permissions], others: Permissions) -> None:
        self._named = named
        self._others = others

    def of(self, cluster_id: int) -> Permissions:
        return self._named.get(cluster_id, self._others)

    @classmethod
    def parse(cls, option: str, given: str) -> PeerPolicy:
        """Parse JSON text (it begins with ``{``) or the file at a path. ParamError names ``option`` and place."""
        if given.lstrip()[:1] == "{":
            where, text = option, given.encode()
        else:
            where, text = f"{option}: {given[:_MAX_SHOWN]!r}", _read(option, given)
        try:
            peers = _decode_peers(text)
            json.loads(text, object_pairs_hook=partial(_once, where))  # msgspec ignores duplicates
        except ParamError:
            raise
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ParamError(f"{where}: not a JSON object of cluster ids: {clean(str(error))}") from None
        parsed = {peer: _permissions(f"{where}: {peer!r}", peer, rules) for peer, rules in peers.items()}
        others = parsed.pop(OTHERS, Permissions())
        return cls({int(peer): each for peer, each in parsed.items()}, others)


def _once(where: str, fields: list[tuple[str, object]]) -> None:
    """Raise ParamError if a JSON object has a name twice."""
    counted = Counter(name for name, _ in fields)
    if len(counted) < len(fields):
        raise ParamError(f"{where}: {counted.most_common(1)[0][0]!r} appears twice")


def _permissions(where: str, peer: str, rules: msgspec.Raw) -> Permissions:
    if peer != OTHERS and not (is_digits(peer) and str(int(peer)) == peer and int(peer) <= _UINT64_MAX):
        raise ParamError(f"{where} is not a cluster id: decimal digits, at most {_UINT64_MAX}, or {OTHERS!r}")
    try:
        found = _decode_rules(rules)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        known = ", ".join(Permissions.__struct_fields__)
        raise ParamError(f"{where}: {clean(str(error))}; known are {known}") from None
    check_rule(found.tenant.isprintable(), f"{where}: tenant: {found.tenant!r} has characters that cannot be printed")
    for model in () if isinstance(found.models, msgspec.UnsetType) else found.models:
        check_rule(model <= _UINT64_MAX, f"{where}: models: {model} is not a model id: at most {_UINT64_MAX}")
    return found


def _read(option: str, given: str) -> bytes:
    """Return the file's bytes; open it without waiting, because it may be a pipe."""
    shown = repr(given[:_MAX_SHOWN])
    check_rule(given.strip(), f"{option}: {shown} is neither JSON nor the path of a file, leave it out")
    try:
        with open(given, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            check_rule(stat.S_ISREG(os.fstat(file.fileno()).st_mode), f"{option}: {shown} is not a regular file")
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ParamError(f"{option}: {shown} cannot be read: {error.strerror}") from None
    check_rule(len(text) <= _MAX_FILE_BYTES, f"{option}: {shown} has more than {_MAX_FILE_BYTES} bytes")
    return text
