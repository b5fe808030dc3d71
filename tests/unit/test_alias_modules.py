"""The module paths of interface §1.1: each name is there, and is the very object that the package has
(interface R23)."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from importlib import import_module
from typing import Final

import pytest

import llm_datadist
import llm_datadist_wrapper
from llm_datadist import LLMStatusCode
from llm_datadist.utils import log
from tests.support.source import ROOT, SOURCE

pytestmark = pytest.mark.covers(
    "__all__",
    "llm_datadist.*",
    "llm_datadist_v1",
    "llm_datadist_wrapper",
    "trans_str_ip",
    "LLMDataDist.kv_cache_manager",
    "compat.check_positive_or_set_default",
)

#: Path -> the modules here, and what of each must be importable from it.
PATHS: Final = {
    "llm_datadist.configs": {
        "llm_datadist.config": "LlmConfig LLMConfig",
        "llm_datadist": "LLMRole LLMClusterInfo",
        "llm_datadist.types.cluster": "trans_str_ip",
    },
    "llm_datadist.status": {
        "llm_datadist": "LLMException LLMStatusCode Status",
        "llm_datadist.errors": "code_2_status",
        "llm_datadist.compat": "handle_llm_status raise_if_false raise_if_true",
    },
    "llm_datadist.data_type": {"llm_datadist": "DataType"},
    "llm_datadist.utils.utils": {
        "llm_datadist._checks": "check_uint64 check_uint32 check_uint16 check_uint8 check_int64 check_int32",
        "llm_datadist.compat": "check_isinstance check_dict check_list_uint64 check_list_int32 "
        "check_positive_or_set_default",
    },
    "llm_datadist.v2.llm_types": {
        "llm_datadist": "RegisterMemStatus Cache TransferWithCacheKeyConfig",
        "llm_datadist.types.enums": "PushType",
        "llm_datadist.compat": "check_layer_range",
    },
    "llm_datadist.v2.llm_datadist": {"llm_datadist": "LLMDataDist", "llm_datadist.datadist": "_shutdown_handler"},
    "llm_datadist.v2.llm_utils": {
        "llm_datadist.compat": "layer_range_to_tensor_indices",
        "llm_datadist.config": "parse_listen_ip_info",
    },
    "llm_datadist.v2.cache_manager": {"llm_datadist.cache_manager": "CacheManager"},
    "llm_datadist.v2.config": {"llm_datadist.config": "Options"},
    "llm_datadist_v1": {"llm_datadist": "KvCacheManager KvCache Tensor TensorDesc"},
}

#: A fork for each path, before anything of the library is imported: which of them cannot be imported first?
_EACH_FIRST: Final = """
import os, sys
import numpy
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        __import__(path)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(path)
"""


def test_r23_a_documented_path_has_the_very_same_object() -> None:
    wrong = [
        f"{path}.{name}"
        for path, homes in PATHS.items()
        for home, names in homes.items()
        for name in names.split()
        if getattr(import_module(path), name) is not getattr(import_module(home), name)
    ]
    assert wrong == []


def test_r23_each_documented_path_can_be_imported_first() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _EACH_FIRST, *PATHS],
        env={"PYTHONPATH": str(SOURCE.parent), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_r23_v2_list_is_the_first_23_of_26_names() -> None:
    assert (len(llm_datadist.v2_list), len(llm_datadist.__all__)) == (23, 26)
    assert llm_datadist.__all__[:23] == llm_datadist.v2_list
    assert set(llm_datadist.__all__[23:]) == {"KvCacheManager", "Tensor", "TensorDesc"}
    assert all(hasattr(llm_datadist, name) for name in llm_datadist.v2_list)
    assert set(llm_datadist.__all__) <= set(dir(llm_datadist))


def test_r23_every_package_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["scikit-build"]["wheel"]["packages"]
    packages = sorted(f"src/{folder.parent.name}" for folder in SOURCE.parent.glob("*/__init__.py"))
    assert sorted(listed) == packages
    assert len(packages) == 3


def test_an_unknown_name_and_one_without_a_published_contract_are_not_there() -> None:
    for name in ("nothing", "kv_cache_manager_", "EngineConfig", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(llm_datadist, name)
    for name in ("EngineConfig", "ClusterConfig"):
        with pytest.raises(ImportError, match=name):
            exec(f"from llm_datadist.v2.config import {name}")


# --- llm_datadist_wrapper --------------------------------------------------------------------------------------------


def test_r23_wrapper_constants_are_the_status_codes() -> None:
    from llm_datadist_wrapper import kFailed, kKvCacheNotExist, kSuccess

    assert (kSuccess, kFailed, kKvCacheNotExist) == (0, 0xFFFFFFFF, 0x5010B002)
    assert {getattr(llm_datadist_wrapper, name) for name in llm_datadist_wrapper.__all__} == set(
        map(int, LLMStatusCode)
    )
    assert len(llm_datadist_wrapper.__all__) == len(LLMStatusCode)
    assert {"kSuccess", "kFailed"} <= set(dir(llm_datadist_wrapper))
    with pytest.raises(AttributeError, match="has no attribute 'kNothing'"):
        _ = llm_datadist_wrapper.kNothing


# --- llm_datadist.utils.log ------------------------------------------------------------------------------------------


def test_r23_log_functions_log_to_the_librarys_logger_with_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "LLM_DATADIST")
    for level in ("info", "warn", "warning", "error", "debug"):
        getattr(log, level)("moved %d blocks", 3)
        record = caplog.records[-1]
        assert record.name == log.get_logger().name == "LLM_DATADIST"
        assert record.levelname == {"warn": "WARNING"}.get(level, level.upper())
        assert (record.getMessage(), record.pathname) == ("moved 3 blocks", __file__)


def test_r23_find_caller_names_the_code_that_calls_it() -> None:
    file, line, function, _ = log._find_caller()
    assert (file, function) == (__file__, "test_r23_find_caller_names_the_code_that_calls_it")
    assert line > 100
