"""A short campaign against the prefix store, and its judges; `make test-store` runs a minute of it."""

import re

import pytest

from faults.__main__ import main
from faults.store.history import Published, Record

SPACE = b"n" * 32
A, B = b"a" * 32, b"b" * 32


def at(what: str, key: bytes, begin: float, end: float | None = None) -> Record:
    return Record(what, SPACE, key, begin, begin if end is None else end)


EVENTS = [at("cleared", A, 0), at("stored", A, 2), at("stored", B, 3), at("removed", A, 5), at("cleared", A, 8)]
SAVES = [at("save", A, 1), at("save", B, 1)]


def test_every_byte_is_right_and_no_slot_is_lost_in_a_short_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["store", "--seconds", "16", "--epoch", "7", "--seed", "3"])
    out = capsys.readouterr().out
    assert status == 0, out
    found = re.findall(r"^(\S.{,47}?) +([\d,]+)$", out, re.MULTILINE)
    counts = {name: int(count.replace(",", "")) for name, count in found}
    for what in ("save", "lookup", "load", "hits", "events", "bytes compared"):
        assert counts[what] > 0, out


@pytest.mark.parametrize(
    ("hit", "fine"),
    [
        (at("hit", A, 0.5, 1.5), False),  # before its publish
        (at("hit", A, 1.5, 2.5), True),  # published during the lookup
        (at("hit", A, 3, 4), True),
        (at("hit", A, 4, 6), True),  # removed during the lookup
        (at("hit", A, 6, 7), False),  # after its removal
        (at("hit", B, 6, 7), True),
        (at("hit", B, 9, 10), False),  # after the store has ended
        (at("hit", b"c" * 32, 3, 4), False),  # of nobody
    ],
)
def test_a_hit_outside_of_the_time_of_its_key_is_found(hit: Record, fine: bool) -> None:
    assert list(Published(EVENTS).judge([*SAVES, hit])) == ([] if fine else [f"not published then: {hit}"])


def test_events_that_contradict_each_other_and_publishes_without_a_save_are_found() -> None:
    assert Published(EVENTS[:3]).index == {(SPACE, A), (SPACE, B)}
    assert Published(EVENTS).index == set()
    (twice,) = Published([*EVENTS[:2], at("stored", A, 3)]).faults
    assert "was there" in twice
    (never,) = Published([at("removed", A, 3)]).faults
    assert "was not there" in never
    (unsaved,) = Published(EVENTS).judge([SAVES[0], at("save", B, 4)])
    assert "published before any save" in unsaved


def test_wrong_bytes_that_a_load_found_need_a_flipped_bit() -> None:
    published = Published([*EVENTS[:3], at("flip", A, 4)])
    assert not list(published.judge([*SAVES, at("mismatch", A, 5), at("mismatch", B, 5)]))  # one load of both
    (found,) = published.judge([*SAVES, at("mismatch", B, 5)])
    assert "no bit was flipped" in found
