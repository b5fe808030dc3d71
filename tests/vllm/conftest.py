"""What the tests with real vLLM servers share; without vLLM they are skipped."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from servers import Servers
from tests.support.source import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = ROOT / "examples" / "vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where vLLM is not installed; it is not imported here."""
    if find_spec("vllm") is None:
        for item in items:
            if item.path.is_relative_to(ROOT / "tests" / "vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@pytest.fixture(scope="session", autouse=True)
def _as_on_one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """References are signed by a secret that the engines make, as they do without configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLM_DATADIST_INSECURE", raising=False)
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))  # vLLM keeps its own folder
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Captures vLLM's log, which its own handler keeps from the root; once, if pytest captures such logs itself."""
    if caplog.handler not in (vllm := logging.getLogger("vllm")).handlers:
        monkeypatch.setattr(vllm, "propagate", True)
    return caplog


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group and no model: the configuration has what the connector reads of them."""
    rank = import_module("llm_datadist.integrations.vllm.rank")
    monkeypatch.setattr(rank, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(rank, "identity_of", lambda _: {"vllm": "1", "weights": "w"})


@pytest.fixture
def gpu_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake GPU, as vLLM's platform and in torch."""
    import_module("tests.vllm.fake_torch").install(monkeypatch)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model; that its answers depend on the whole prompt has been checked."""
    folder = tmp_path_factory.mktemp("checkpoint")
    subprocess.run([sys.executable, str(EXAMPLES / "model.py"), str(folder)], check=True, timeout=100)
    return folder


@pytest.fixture
def servers(tmp_path: Path, checkpoint: Path) -> Iterator[Servers]:
    """Starts servers of the checkpoint; none is left afterwards."""
    with Servers(tmp_path, checkpoint) as started:
        yield started
