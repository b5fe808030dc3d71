"""The language of a link: which version and features two sides speak, and the refusal that names both ranges."""

from typing import Any

import pytest

from faults.strangers import hello_of
from llm_datadist._links import versions
from llm_datadist._links.identity import Transcript
from llm_datadist._links.versions import READS_BY_KEY, Spoken, agree
from llm_datadist.errors import LinkRefused, LLMStatusCode

Range = tuple[int, int]
MOST = 2**32 - 1


@pytest.mark.parametrize(
    ("mine", "theirs", "version"),
    [
        ((11, 11), (11, 11), 11),
        ((11, 11), (10, 11), 11),
        ((11, 11), (11, 12), 11),
        ((11, 12), (11, 11), 11),
        ((10, 12), (11, 13), 12),
        ((10, 12), (9, 10), 10),
        ((11, 11), (0, MOST), 11),
        ((11, 11), (12, 12), None),
        ((11, 11), (10, 10), None),
        ((11, 12), (13, 14), None),
        ((11, 12), (9, 10), None),
        # Ranges that are none.
        ((11, 11), (12, 11), None),
        ((11, 11), (11, 10), None),
        ((11, 11), (MOST, 0), None),
        ((10, 12), (12, 10), None),
        ((11, 11), (0, 0), None),
        ((11, 11), (MOST, MOST), None),
    ],
)
def test_the_newest_common_version_or_a_refusal_that_names_both_ranges(
    monkeypatch: pytest.MonkeyPatch, mine: Range, theirs: Range, version: int | None
) -> None:
    monkeypatch.setattr(versions, "VERSIONS", mine)
    hello = hello_of(66, bytes(16), bytes(16), versions=theirs)
    if version is not None:
        assert agree(7, hello) == Spoken(version, frozenset({READS_BY_KEY}))
        return
    with pytest.raises(LinkRefused) as caught:
        agree(7, hello)
    assert f"{theirs[0]} to {theirs[1]} at cluster 66, {mine[0]} to {mine[1]} at cluster 7" in str(caught.value)
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_FAILED


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [
        (["a", "b"], ["b", "a"], {"a", "b"}),
        (["a", "b"], ["c", "b", "b"], {"b"}),
        (["a"], [], set()),
        ([], ["a"], set()),
        (["a"], ["A", "a ", ""], set()),
    ],
)
def test_features_of_one_side_alone_are_ignored(
    monkeypatch: pytest.MonkeyPatch, mine: list[str], theirs: list[str], common: set[str]
) -> None:
    monkeypatch.setattr(versions, "FEATURES", mine)
    assert agree(7, hello_of(66, bytes(16), bytes(16), features=theirs)).features == common


def test_the_digest_tells_every_change_of_what_two_greetings_say_of_their_language() -> None:
    hello = {"versions": (11, 12), "features": ["a", "b"]}
    changes: list[dict[str, Any]] = [
        {},
        {"versions": (11, 11)},
        {"versions": (12, 12)},
        {"features": ["a"]},
        {"features": ["ab"]},
        {"features": []},
        {"features": ["b", "a"]},
        {"nonce": bytes(15) + b"\1"},
    ]
    heard = [hello_of(1, bytes(16), bytes(16), **(hello | change)) for change in changes]
    digests = {Transcript.of(*both).digest() for one in heard for both in ((one, heard[0]), (heard[0], one))}
    assert len(digests) == 2 * len(changes) - 1  # with none changed both are the same
    assert {len(each) for each in digests} == {16}
