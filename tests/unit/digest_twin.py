"""The digest again, in plain Python integers: slow, obvious, the oracle of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STRIPE = 1024


def _scramble(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _keys(nonce: bytes) -> Iterator[int]:
    first, second = int.from_bytes(nonce[:8], "little"), int.from_bytes(nonce[8:], "little")
    state = _scramble((first + _GOLDEN) & _MASK) ^ second
    while True:
        state = (state + _GOLDEN) & _MASK
        yield _scramble(state)


def _nh(stripe: bytes, keys: list[int]) -> int:
    padded = stripe + bytes(-len(stripe) % 16)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    keyed = [(word + key) & _MASK for word, key in zip(words, keys, strict=False)]
    return sum(a * b for a, b in zip(keyed[::2], keyed[1::2], strict=True)) % 2**128


def digest(data: bytes, nonce: bytes) -> tuple[int, int]:
    """Return (low, high) of the digest of one stream of bytes."""
    drawn = _keys(nonce)
    keys = [next(drawn) for _ in range(_STRIPE // 8)]
    place_key, length_key = next(drawn), next(drawn)
    low = high = 0
    for number, at in enumerate(range(0, len(data), _STRIPE)):
        value = _nh(data[at : at + _STRIPE], keys)
        place = _scramble((place_key + number * _GOLDEN) & _MASK)
        one = _scramble(((value & _MASK) + place) & _MASK)
        other = _scramble(value >> 64 ^ one)
        low = (low + one + other * _GOLDEN) & _MASK
        high = (high + other) & _MASK
    low = _scramble(low ^ _scramble((length_key + len(data)) & _MASK))
    return low, _scramble((high + low) & _MASK)


def standing(runs: Iterable[tuple[int, int, int]], *, alias: bool) -> set[tuple[int, int]]:
    """Return the (destination, source) bytes that can be compared after runs that were done in their order."""
    pairs = [(number, dst + i, src + i) for number, (dst, src, length) in enumerate(runs) for i in range(length)]
    written_by = {dst: number for number, dst, _ in pairs}  # destination byte -> the last run that wrote it
    return {
        (dst, src)
        for number, dst, src in pairs
        if written_by[dst] == number and not (alias and written_by.get(src, -1) > number)
    }
