"""Logging (interface R30): the logger's name, the level from the environment, the line that a record names.

What the import does to it: tests/test_public_api.py.
"""

import logging
import os
import re
import subprocess
import sys

import pytest

from llm_datadist import CacheDesc, DataType, LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist._log import LEVEL_VARIABLE, LOG_VARIABLE, apply_environment, logger
from llm_datadist.utils import log

pytestmark = pytest.mark.covers("apply_environment", "llm_datadist.utils.log")


def test_r30_level_from_the_environment_and_an_unknown_one_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert LEVEL_VARIABLE == "ASCEND_GLOBAL_LOG_LEVEL"
    kept = logging.WARNING - 1
    levels = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR, " 1 ": logging.INFO}
    for value, level in (levels | dict.fromkeys((None, "", "4", "-1", "DEBUG"), kept)).items():
        caplog.clear()
        with caplog.at_level(kept, logger="LLM_DATADIST"):
            apply_environment({} if value is None else {LEVEL_VARIABLE: value})
            assert logger.level == level
        assert [record.levelname for record in caplog.records] == ["WARNING"] * (value in ("4", "-1", "DEBUG"))
        assert not caplog.records or (repr(value) in caplog.text and LEVEL_VARIABLE in caplog.text)


def test_r23_log_functions_log_to_the_librarys_logger_with_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "LLM_DATADIST")
    for level in ("info", "warn", "warning", "error", "debug"):
        getattr(log, level)("moved %d blocks", 3)
        record = caplog.records[-1]
        assert record.name == log.get_logger().name == "LLM_DATADIST"
        assert record.levelname == {"warn": "WARNING"}.get(level, level.upper())
        assert (record.getMessage(), record.pathname) == ("moved 3 blocks", __file__)
    file, line, function, _ = log._find_caller()
    assert (file, function) == (__file__, "test_r23_log_functions_log_to_the_librarys_logger_with_the_callers_line")
    assert line > 30


def test_the_log_of_a_call_names_the_line_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    dd = LLMDataDist(LLMRole.DECODER, 1)
    dd.init({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 65536}'})
    with caplog.at_level(logging.INFO, "LLM_DATADIST"):
        cache = dd.cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 16], DataType.DT_UINT8))
        dd.cache_manager.copy_blocks(cache, {0: [1]})
        dd.cache_manager.deallocate_blocks_cache(cache)
    dd.finalize()
    spans = [each for each in caplog.records if " started " in each.getMessage() or " succeeded " in each.getMessage()]
    assert len(spans) == 6
    assert {each.pathname for each in spans} == {__file__}


def test_links_and_calls_have_loggers_of_their_own_below_the_librarys(caplog: pytest.LogCaptureFixture) -> None:
    dd = LLMDataDist(LLMRole.DECODER, 1)
    dd.init({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 65536}'})
    nowhere = LLMClusterInfo()
    nowhere.append_local_ip_info("127.0.0.1", 0)
    nowhere.append_remote_ip_info("127.0.0.1", 9)

    def said() -> set[str]:
        """Return the loggers whose records a handler of the root gets from a call and from a link that fails."""
        caplog.clear()
        dd.cache_manager.deallocate_blocks_cache(
            dd.cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 16], DataType.DT_UINT8))
        )
        assert dd.link_clusters([nowhere], 100)[0] is not LLMStatusCode.LLM_SUCCESS
        return {each.name for each in caplog.records}

    with caplog.at_level(logging.INFO, "LLM_DATADIST"):
        assert said() == {"LLM_DATADIST.calls", "LLM_DATADIST.links"}
        for silent, loud in (("calls", "links"), ("links", "calls")):
            child = logging.getLogger(f"LLM_DATADIST.{silent}")
            child.setLevel(logging.CRITICAL)
            heard = said()
            child.setLevel(logging.NOTSET)
            assert heard == {f"LLM_DATADIST.{loud}"}
    dd.finalize()


#: An LLMDataDist that logs at INFO, in a fresh interpreter; what is put before it is the application's.
_PROGRAM = """
from llm_datadist import LLMDataDist, LLMRole
LLMDataDist(LLMRole.DECODER, 1).init({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1"})
"""


OWN = "import logging; logging.basicConfig(format='own %(message)s')"
SAID = [
    (None, "", 0, ""),
    ("error", "", 0, ""),
    ("info", "", 2, r"[\d-]+ [\d:,]+ \d+ INFO <LLMDataDist.*> initialised"),
    ("debug", "", 2, ".* initialised"),
    ("loud", "", 1, "LLM_DATADIST_LOG='loud' ignored: debug, info, warning or error"),
    ("info", OWN, 2, r"own <LLMDataDist.*> initialised"),
]


@pytest.mark.parametrize(("value", "application", "lines", "first"), SAID)
def test_the_log_variable_has_it_written_once(value: str | None, application: str, lines: int, first: str) -> None:
    environment = {name: each for name, each in os.environ.items() if name not in (LOG_VARIABLE, LEVEL_VARIABLE)}
    environment |= {} if value is None else {LOG_VARIABLE: value}
    program = [sys.executable, "-c", application + _PROGRAM]
    done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60, env=environment)
    said = done.stderr.splitlines()
    assert len(said) == lines, done.stderr
    assert re.fullmatch(first, said[0] if said else "")
