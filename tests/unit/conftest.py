"""What several unit tests need."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from llm_datadist._links.loop import ControlLoop
from llm_datadist.errors import LLMException, LLMStatusCode
from llm_datadist.testing.scene import residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def refused() -> Callable[..., None]:
    """``refused(kind, call, *parts)``: ``call`` raises exactly ``kind``, in one line that holds all ``parts``.

    A class with a status must carry LLM_PARAM_INVALID.
    """

    def refused(kind: type[Exception], call: Callable[[], object], *parts: str) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        if isinstance(caught.value, LLMException):
            assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
        assert "\n" not in str(caught.value)

    return refused


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Lanes and their engines leave no descriptor and no thread."""
    before = residue()
    yield
    assert settled(before) == before


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    control = ControlLoop()
    control.start()
    yield control
    control.stop()
    assert "llm-datadist-control" not in [thread.name for thread in threading.enumerate()]
