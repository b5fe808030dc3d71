"""The language of a link: which version and features two sides speak, and the refusal that names both ranges."""

from itertools import product
from typing import Any

import pytest

from faults.strangers import hello_of
from llm_datadist._links.identity import Transcript
from llm_datadist._links.versions import FEATURES, VERSIONS, Spoken, agree
from llm_datadist.errors import LinkRefused, LLMStatusCode

LOW, HIGH = VERSIONS


def test_the_newest_common_version_or_a_refusal_that_names_both_ranges() -> None:
    """Some ranges of the peer are none."""
    for theirs in product((0, *range(LOW - 2, HIGH + 3), 2**32 - 1), repeat=2):
        hello = hello_of(66, bytes(16), bytes(16), versions=theirs)
        common = range(max(LOW, theirs[0]), min(HIGH, theirs[1]) + 1)
        if common:
            assert agree(7, hello) == Spoken(max(common), frozenset(FEATURES))
            continue
        with pytest.raises(LinkRefused) as caught:
            agree(7, hello)
        assert f"{theirs[0]} to {theirs[1]} at cluster 66, {LOW} to {HIGH} at cluster 7" in str(caught.value)
        assert caught.value.status_code is LLMStatusCode.LLM_LINK_FAILED


@pytest.mark.parametrize("common", [[], FEATURES[:1], FEATURES[::-1], FEATURES[1:] * 2])
def test_features_of_one_side_alone_are_ignored(common: list[str]) -> None:
    theirs = ["other", *common, FEATURES[0].upper()]
    assert agree(7, hello_of(66, bytes(16), bytes(16), features=theirs)).features == set(common)


def test_the_digest_tells_every_change_of_what_two_greetings_say_of_their_language() -> None:
    changes: list[dict[str, Any]] = [{"versions": each} for each in ((11, 12), (11, 11), (12, 12))]
    changes += [{"features": each} for each in (["a"], ["ab"], [], ["b", "a"])] + [{"nonce": bytes(15) + b"\1"}]
    hello = {"versions": (11, 12), "features": ["a", "b"]}
    heard = [hello_of(1, bytes(16), bytes(16), **(hello | change)) for change in changes]
    digests = {Transcript.of(*both).digest() for one in heard for both in ((one, heard[0]), (heard[0], one))}
    assert len(digests) == 2 * len(changes) - 1  # with none changed both are the same
    assert {len(each) for each in digests} == {16}
