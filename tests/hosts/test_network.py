"""No hosts are to be had. What they do is seen by the other tests of this folder, which need it."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import impossible
from tests.hosts.network import Impossible, Network


def test_no_hosts_are_a_reason_to_skip_unless_they_are_required_and_a_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Impossible, match="ip, tc, nsenter, unshare cannot") as caught:
        Network(1)
    for wish, outcome in (("", pytest.skip.Exception), ("required", pytest.fail.Exception)):
        monkeypatch.setenv("LLM_DATADIST_HOSTS", wish)
        with pytest.raises(outcome, match="ip, tc, nsenter, unshare cannot be found"):
            impossible(caught.value)
