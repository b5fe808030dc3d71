"""Logging (interface R30): the logger's name, no handler by import, the level from the environment."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from llm_datadist._log import LEVEL_VARIABLE, apply_environment, logger

pytestmark = pytest.mark.covers("apply_environment")


def _fresh(program: str, level: str | None) -> str:
    """Run ``program`` in a new interpreter with the variable set to ``level``; return what it printed."""
    environ = {key: value for key, value in os.environ.items() if key != LEVEL_VARIABLE}
    if level is not None:
        environ[LEVEL_VARIABLE] = level
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_r30_import_installs_no_handler_leaves_the_level_alone_and_loads_nothing_heavy() -> None:
    assert logger is logging.getLogger("LLM_DATADIST")
    assert LEVEL_VARIABLE == "ASCEND_GLOBAL_LOG_LEVEL"
    program = (
        "import logging, sys; import llm_datadist._checks, llm_datadist.config, llm_datadist.types; "
        "from llm_datadist._log import logger; "
        "print(logger.handlers, logging.getLogger().handlers, logger.level, logger.propagate, "
        "sorted({'asyncio', 'rich', 'torch', 'typer'} & set(sys.modules)))"
    )
    assert _fresh(program, None) == "[] [] 0 True []"
    assert _fresh("from llm_datadist._log import logger; print(logger.level)", "0") == str(logging.DEBUG)


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({LEVEL_VARIABLE: "0"}, logging.DEBUG),
        ({LEVEL_VARIABLE: "1"}, logging.INFO),
        ({LEVEL_VARIABLE: "2"}, logging.WARNING),
        ({LEVEL_VARIABLE: "3"}, logging.ERROR),
        ({LEVEL_VARIABLE: " 1 "}, logging.INFO),
        ({LEVEL_VARIABLE: ""}, None),
        ({}, None),
        ({LEVEL_VARIABLE: "4"}, None),
        ({LEVEL_VARIABLE: "-1"}, None),
        ({LEVEL_VARIABLE: "DEBUG"}, None),
    ],
)
def test_r30_level_from_the_environment_and_an_unknown_one_is_one_warning_and_changes_nothing(
    environ: dict[str, str], level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    kept = logging.WARNING - 1
    with caplog.at_level(kept, logger="LLM_DATADIST"):
        apply_environment(environ)
        assert logger.level == (kept if level is None else level)
    value = environ.get(LEVEL_VARIABLE)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (value in ("4", "-1", "DEBUG"))
    assert not caplog.records or (repr(value) in caplog.text and LEVEL_VARIABLE in caplog.text)
