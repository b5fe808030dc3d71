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


def test_r30_logger_has_the_documented_name() -> None:
    assert logger is logging.getLogger("LLM_DATADIST")
    assert LEVEL_VARIABLE == "ASCEND_GLOBAL_LOG_LEVEL"


def test_r30_import_installs_no_handler_and_leaves_the_level_alone() -> None:
    program = (
        "import logging; from llm_datadist._log import logger; "
        "print(logger.handlers, logging.getLogger().handlers, logger.level, logger.propagate)"
    )
    assert _fresh(program, None) == "[] [] 0 True"


@pytest.mark.parametrize(
    ("value", "level"),
    [("0", logging.DEBUG), ("1", logging.INFO), ("2", logging.WARNING), ("3", logging.ERROR), (" 1 ", logging.INFO)],
)
def test_r30_level_from_the_environment(value: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    apply_environment({LEVEL_VARIABLE: value})
    assert logger.level == level
    logger.setLevel(logging.NOTSET)


def test_r30_the_import_reads_the_environment() -> None:
    assert _fresh("from llm_datadist._log import logger; print(logger.level)", "0") == str(logging.DEBUG)


@pytest.mark.parametrize("environ", [{}, {LEVEL_VARIABLE: ""}])
def test_r30_unset_level_changes_nothing(environ: dict[str, str]) -> None:
    before = logger.level
    apply_environment(environ)
    assert logger.level == before


@pytest.mark.parametrize("value", ["4", "-1", "DEBUG"])
def test_r30_unknown_level_is_one_warning_and_changes_nothing(value: str, caplog: pytest.LogCaptureFixture) -> None:
    before = logger.level
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        apply_environment({LEVEL_VARIABLE: value})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert repr(value) in caplog.text
    assert LEVEL_VARIABLE in caplog.text
    assert logger.level == before


def test_layer_0_imports_nothing_heavy_and_nothing_optional() -> None:
    program = (
        "import sys; import llm_datadist._checks, llm_datadist.config, llm_datadist._log, llm_datadist.types; "
        "print(sorted({'asyncio', 'rich', 'torch', 'typer'} & set(sys.modules)))"
    )
    assert _fresh(program, None) == "[]"
