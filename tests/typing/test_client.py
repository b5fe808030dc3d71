"""What type checkers say of a user's program: nothing of client.py as it stands, and each typo in it by its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support.source import ROOT, run

CLIENT: Final = Path(__file__).with_name("client.py")
#: In place of what stands in client.py, and the word that a checker has to name.
TYPOS: Final = {
    "    LLMDataDist,\n": ("    LLMDataDst as LLMDataDist,\n", "LLMDataDst"),
    "config.enable_cache_manager = v2": ("config.enable_cachemanager = v2", "enable_cachemanager"),
    "host_mem_pool_cfg=1 << 20)": ("host_mem_pol_cfg=1 << 20)", "host_mem_pol_cfg"),
    "with decoder, decoder.connect(": ("with decoder, decoder.conect(", "conect"),
    "link.close(force=False)": ("link.close(forced=False)", "forced"),
    "decoder.pull_blocks(BLOCKS, target, np.arange(4),": (
        "decoder.pull_blocs(BLOCKS, target, np.arange(4),",
        "pull_blocs",
    ),
    "manager.register_tensors((layers[0],)": ('manager.register_tensors(("layers[0]",)', "register_tensors|tensors"),
    "CacheDesc(4, [8, 16], np.float16)": ('CacheDesc(4, [8, 16], "float16")', "CacheDesc|data_type"),
}
#: What a user of torch writes, checked with the signatures of torch's own stubs: torch is not installed here.
TORCH: Final = {
    "torch.pyi": """
class dtype:
    is_floating_point: bool
    is_signed: bool
class TensorBase:
    is_quantized: bool
    is_sparse: bool
    dtype: dtype
    def data_ptr(self) -> int: ...
class Tensor(TensorBase): ...
float16: dtype
""",
    "engine.py": """
import torch
from llm_datadist import BlocksCacheKey, CacheDesc, CacheManager

def register(manager: CacheManager, tensors: list[torch.Tensor]) -> CacheDesc:
    manager.register_tensors(tensors, BlocksCacheKey(1))
    manager.register_tensors((tensors[0],), blocks=False)
    return CacheDesc(1, [2], torch.float16)
""",
    "wrong.py": """
import torch
from llm_datadist import CacheManager

def register(manager: CacheManager, tensor: torch.Tensor) -> None:
    manager.register_tensors(tensor)
""",
}
CHECKERS: Final = {
    "mypy": ("--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "client")),
    "pyright": ("--pythonpath", sys.executable),
}
#: A program and what is said of it; mypy names a line, pyright a line and a column.
_ERROR: Final = re.compile(r"(\w+)\.py:\d+(?::\d+ -|:) error: (.*)")


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_client_of_the_whole_surface_passes_and_each_typo_in_it_is_named(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed; make lint installs it")
    text = CLIENT.read_text()
    programs = {"client": text}
    for number, (right, (wrong, _)) in enumerate(TYPOS.items()):
        assert text.count(right) == 1
        programs[f"typo{number}"] = text.replace(right, wrong)
    for name, program in ({f"{name}.py": text for name, text in programs.items()} | TORCH).items():
        (tmp_path / name).write_text(program)
    names = [*programs, "engine", "wrong"]
    command = [sys.executable, "-m", checker, *CHECKERS[checker], *(f"{name}.py" for name in names)]
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # else it asks npm for a newer one
    done = run(*command, cwd=tmp_path, env=environment, timeout=None)
    said = _ERROR.findall(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [each for each in said if each[0] in ("client", "engine")] == []
    assert any(name == "wrong" and "register_tensors" in message for name, message in said), done.stdout
    for number, (_, word) in enumerate(TYPOS.values()):
        found = [message for name, message in said if name == f"typo{number}"]
        assert any(re.search(word, message) for message in found), (word, done.stdout)


def test_the_client_runs() -> None:
    subprocess.run([sys.executable, "-W", "error", str(CLIENT)], check=True, stdout=subprocess.DEVNULL)
