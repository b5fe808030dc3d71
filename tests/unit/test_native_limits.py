"""The limits of the bench: what the compiled functions refuse. Their callers: tests/bench/test_sides.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._native import _native
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable

ONE, NULL, ME = np.array([1 << 20], np.uint64), np.zeros(1, np.uint64), os.getpid()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: _native.limit_memcpy(ONE, NULL, 8, 1, False), "address 0 is 0"),
        (lambda: _native.limit_process(ME, False, ONE, ONE, 0, 1), "block_bytes is 0"),
        (lambda: _native.limit_process(ME, False, ONE, ONE, (1 << 30) + 1, 1), "block_bytes is 1073741825"),
        (lambda: _native.limit_stream(0, True, ONE, 0, 0), "block_bytes is 0"),
        (lambda: _native.limit_stream(0, True, ONE, 8, 3), r"wait is 3: must be in \[0, 2\]"),
    ],
)
def test_what_they_refuse(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ParamError, match=said):
        call()
