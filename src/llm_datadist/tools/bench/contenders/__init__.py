"""The contenders by name. Modules are imported on demand: peers may not be installed.

Contenders for peers are in ``benchmarks/peers`` of a checkout.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist.tools.bench import BenchError

if TYPE_CHECKING:
    from types import ModuleType

    from llm_datadist.tools.bench.contenders.base import Contender
    from llm_datadist.tools.bench.workload import BenchWorkload

_CHECKOUT: Final = Path(__file__).parents[5]
_PEERS_PACKAGE: Final = "benchmarks.peers."
_IMPORT_S: Final = 120

LIMITS: Final = {
    "memcpy": f"{__name__}.limits:Memcpy",
    "memcpy-nt": f"{__name__}.limits:MemcpyStreaming",
    "cma": f"{__name__}.limits:Cma",
    "tcp-raw": f"{__name__}.limits:TcpRaw",
    "tcp-raw-encrypted": f"{__name__}.limits:TcpRawEncrypted",
    "cuda-copy": "benchmarks.peers.cuda:CudaCopy",
}
"""Limits of the machine, without this library's engine. ``memcpy-nt``: streaming stores."""

PEERS: Final = {
    "nixl": "benchmarks.peers.nixl:Nixl",
    "nixl-tcp": "benchmarks.peers.nixl:NixlTcp",
    "nixl-prepared": "benchmarks.peers.nixl:NixlPrepared",
    "nixl-tcp-prepared": "benchmarks.peers.nixl:NixlTcpPrepared",
    "mooncake": "benchmarks.peers.mooncake:Mooncake",
    "torch": "benchmarks.peers.torch:Torch",
    "cuda-loop": "benchmarks.peers.cuda:CudaLoop",
    "cuda-batch": "benchmarks.peers.cuda:CudaBatch",
    "nixl-gpu": "benchmarks.peers.nixl:NixlGpu",
    "torch-gpu": "benchmarks.peers.torch:TorchGpu",
}
"""Other software. ``nixl`` makes each transfer from prepared descriptors, ``nixl-prepared`` only posts one."""

CONTENDERS: Final = {
    # This library's, by transport or call.
    **{f"ours-{name}": f"{__name__}.ours:Ours@{name}" for name in ("shm", "cma", "tcp", "nixl")},
    **{f"ours-{name}-key": f"{__name__}.ours:ByKey@{name}" for name in ("shm", "cma", "tcp")},
    **{f"ours-{name}-link": f"{__name__}.ours:Linking@{name}" for name in ("shm", "cma", "tcp", "nixl")},
    "ours-inproc": f"{__name__}.ours:Inproc",
    "ours-copy-blocks": f"{__name__}.local:CopyBlocks",
    "ours-copy-cache": f"{__name__}.local:CopyCache",
    "ours-swap": f"{__name__}.local:SwapBlocks",
    "ours-plan": f"{__name__}.local:Planning",
    "ours-alloc": f"{__name__}.local:Allocating",
    **LIMITS,
    **PEERS,
}
"""Name -> ``module:class`` or ``module:class@transport``; text of these forms is a name, too."""


def find(name: str) -> type[Contender]:
    """Import a contender by its name; raise BenchError if it is unknown, or cannot be imported here."""
    module, _, attribute = CONTENDERS.get(name, name).partition(":")
    attribute, _, transport = attribute.partition("@")
    if not attribute:
        raise BenchError(f"{name}: no such contender; there are {', '.join(CONTENDERS)}")
    try:
        loaded = _peer_module(module) if module.startswith(_PEERS_PACKAGE) else import_module(module)
        contender: type[Contender] = getattr(loaded, attribute)
    except (ImportError, AttributeError) as error:
        raise BenchError(f"not there: {error}") from error
    return contender.over(transport) if transport else contender


def _peer_module(name: str) -> ModuleType:
    """Import a module of ``benchmarks/peers`` from its file."""
    if name in sys.modules:
        return sys.modules[name]
    path = _CHECKOUT.joinpath(*name.split(".")).with_suffix(".py")
    spec = spec_from_file_location(name, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise BenchError("not in this installation: the contenders of peers are in benchmarks/peers of a checkout")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def why_not(name: str, workload: BenchWorkload) -> str | None:
    """Return the reason why a contender cannot run a workload, or None. Starts nothing."""
    try:
        return find(name).why_not(workload)
    except BenchError as error:
        return str(error)


@cache
def why_not_importable(module: str, package: str) -> str | None:
    """Return the reason why another process cannot import ``module`` of pip's ``package``, or None."""
    if find_spec(module.partition(".")[0]) is None:
        return f"not installed (pip install {package})"
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"import {module} takes more than {_IMPORT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"import {module}: {lines[-1] if lines else f'exit code {done.returncode}'}"
