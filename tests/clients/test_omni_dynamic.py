"""omni-infer with dynamic links: lazy links, ids above 2**63, failures, restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.kv import drive
from tests.clients.omni import DECODER_ID, DST, KINDS, PROMPT_ID, SRC, attempts, holds, register, start, told
from tests.support.linking import links
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.covers("omni-infer, dynamic")


def test_links_are_lazy_and_after_a_failure_unlink_by_force_link_again_and_one_more_pull(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prompt, decoder = ends
    assert min(PROMPT_ID, DECODER_ID) > 2**63
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    assert decoder.do(links) == {}
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 10)
    assert decoder.do(links) == {PROMPT_ID: "ready"}
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    assert decoder.do(attempts) == 2 * KINDS, "none had to be repeated"

    # The prompt is asleep in the middle of its topology change; it keeps the old entity of the link all the time.
    prompt.do(drive, "unregister")
    with pytest.raises(RuntimeError, match=r"pull from .* failed"):
        decoder.do(drive, "pull_kv", told(port), SRC, DST)
    assert decoder.do(attempts) == 2 * KINDS + 2, "one model each time: the first failure ends the request"
    assert decoder.do(links) == {PROMPT_ID: "ready"}
    holds(decoder, 20, 10)
    prompt.do(register, 30)
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 30)
    wait_until(lambda: prompt.do(links) == {DECODER_ID: "ready"})

    # The prompt has dropped its side by force: the first pull fails, the second is on a new link.
    prompt.do(drive, "force_unlink", DECODER_ID)
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 30)


def test_force_unlink_by_bare_id_is_a_success_for_the_living_the_dead_and_the_unknown(
    processes: Processes, ends: tuple[ChildEnd, ChildEnd]
) -> None:
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    decoder.do(drive, "force_unlink", PROMPT_ID, 2**64 - 1, 0)
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    decoder.do(drive, "force_unlink", PROMPT_ID, 12345)
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    processes.kill(prompt)
    for _ in range(2):
        decoder.do(drive, "force_unlink", PROMPT_ID)
        assert decoder.do(links) == {}
    with pytest.raises(RuntimeError, match="link to "):
        decoder.do(drive, "pull_kv", told(port), SRC, DST)
    holds(decoder, 20, 10)


def test_a_prompt_that_comes_back_as_a_new_process_with_the_same_id(
    processes: Processes, ends: tuple[ChildEnd, ChildEnd]
) -> None:
    """First a failed pull finds it out; then the host has a new timestamp, so the old link is dropped first."""
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    for timestamp, seed in ((1, 40), (2, 50)):
        processes.kill(prompt)
        prompt = processes.born(f"prompt of {seed}")
        prompt.do(start, True, seed, port)
        decoder.do(drive, "pull_kv", told(port, timestamp), SRC, DST)
        holds(decoder, 20, seed)
        assert decoder.do(links) == {PROMPT_ID: "ready"}
