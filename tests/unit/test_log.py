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
        ({LEVEL_VARIABLE: ""}, logging.NOTSET),
        ({}, logging.NOTSET),
    ],
)
def test_r30_level_from_the_environment(environ: dict[str, str], level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    apply_environment(environ)
    assert logger.level == level
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("value", ["4", "-1", "DEBUG"])
def test_r30_unknown_level_is_one_warning_and_changes_nothing(value: str, caplog: pytest.LogCaptureFixture) -> None:
    before = logger.level
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        apply_environment({LEVEL_VARIABLE: value})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert repr(value) in caplog.text
    assert LEVEL_VARIABLE in caplog.text
    assert logger.level == before
