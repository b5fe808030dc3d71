"""omni-infer with dynamic links: lazy links, ids above 2**63, failures, restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.omni import DECODER_ID, DST, KINDS, PROMPT_ID, SRC, attempts, do, holds, register, start, told
from tests.support.frozen import frozen
from tests.support.linking import links
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.covers("omni-infer, dynamic")


def test_the_first_request_links_and_the_next_one_uses_the_link(ends: tuple[ChildEnd, ChildEnd]) -> None:
    prompt, decoder = ends
    assert min(PROMPT_ID, DECODER_ID) > 2**63
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    assert decoder.do(links) == {}
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 10)
    assert decoder.do(links) == {PROMPT_ID: "ready"}
    decoder.do(do, "pull_kv", told(port), DST, SRC)
    assert decoder.do(attempts) == 2 * KINDS, "none had to be repeated"


def test_after_a_failure_unlink_by_force_link_again_and_one_more_pull(ends: tuple[ChildEnd, ChildEnd]) -> None:
    """The prompt is asleep in the middle of its topology change; it keeps the old entity of the link all the time."""
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    prompt.do(do, "unregister")
    with pytest.raises(RuntimeError, match=r"pull from .* failed"):
        decoder.do(do, "pull_kv", told(port), SRC, DST)
    assert decoder.do(attempts) == KINDS + 2, "one model each time: the first failure ends the request"
    assert decoder.do(links) == {PROMPT_ID: "ready"}
    holds(decoder, 20, 10)

    prompt.do(register, 30)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 30)
    wait_until(lambda: prompt.do(links) == {DECODER_ID: "ready"})


def test_a_peer_that_lost_the_link_alone_is_pulled_from_by_the_one_more_pull(ends: tuple[ChildEnd, ChildEnd]) -> None:
    """Here the prompt has dropped its side by force: the first pull fails, the second is on a new link."""
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    prompt.do(do, "force_unlink", DECODER_ID)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 10)


def test_force_unlink_by_bare_id_is_a_success_for_the_living_the_dead_and_the_unknown(
    processes: Processes, ends: tuple[ChildEnd, ChildEnd]
) -> None:
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    decoder.do(do, "force_unlink", PROMPT_ID, 2**64 - 1, 0)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    decoder.do(do, "force_unlink", PROMPT_ID, 12345)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    processes.kill(prompt)
    decoder.do(do, "force_unlink", PROMPT_ID)
    assert decoder.do(links) == {}
    decoder.do(do, "force_unlink", PROMPT_ID)
    with pytest.raises(RuntimeError, match="link to "):
        decoder.do(do, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 10)


def test_a_prompt_that_is_stopped_fails_the_request_and_serves_the_next_one(ends: tuple[ChildEnd, ChildEnd]) -> None:
    """Nothing answers, also not to the link again: every step ends within its own timeout (5 s)."""
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    with frozen(prompt), pytest.raises(RuntimeError, match=r"link to .*LLM_TIMEOUT"):
        decoder.do(do, "pull_kv", told(port), SRC, DST)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 10)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_prompt_that_comes_back_as_a_new_process_with_the_same_id(
    processes: Processes, ends: tuple[ChildEnd, ChildEnd], noticed: bool
) -> None:
    """Noticed: the host has a new timestamp, so the old link is dropped first. Else a failed pull finds it out."""
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    decoder.do(do, "pull_kv", told(port), SRC, DST)
    processes.kill(prompt)
    again = processes.born("prompt again")
    again.do(start, True, 40, port)
    decoder.do(do, "pull_kv", told(port, timestamp=2 if noticed else 1), SRC, DST)
    holds(decoder, 20, 40)
    assert decoder.do(links) == {PROMPT_ID: "ready"}
