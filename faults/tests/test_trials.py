"""Some trials of each kind; `faults/trials.py` makes as many as one likes."""

import pytest

from faults import trials


@pytest.mark.parametrize("transport", trials.TRANSPORTS)
@pytest.mark.parametrize("what", ["reader", "writer"])
def test_memory_used_again_under_who_was_stopped_inside_a_copy(transport: str, what: str) -> None:
    """Regression: a push whose memory changed after its first byte succeeded."""

    # Each kind of end has to be seen, so that none of them is only believed to be looked for.
    def seen(report: trials.TrialReport) -> bool:
        if what == "reader":
            return min(report.outcomes["TransferFailed"], report.reused) > 0
        kept = report.reused if transport == "tcp" else report.quarantines
        return min(report.outcomes["TransferFailed"], report.killed, kept) > 0

    report = trials.run(transport, what, 8, seen=seen)
    assert report.good, "\n".join([trials.HEAD, report.line(), *report.faults])
    assert seen(report), report.line()
