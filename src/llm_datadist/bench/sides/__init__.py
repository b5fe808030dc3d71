"""The sides by name. A side's module is imported when it is asked for, because peers may not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from llm_datadist.bench.errors import BenchError

if TYPE_CHECKING:
    from llm_datadist.bench.sides.base import Side
    from llm_datadist.bench.workload import Workload

__all__ = ["LIMITS", "OURS", "PEERS", "SIDES", "find", "why_not"]

OURS: Final = {
    **{f"ours-{name}": f"llm_datadist.bench.sides.ours:{name.title()}" for name in ("shm", "cma", "tcp", "inproc")},
    **{f"ours-{name}-key": f"llm_datadist.bench.sides.bykey:{name.title()}" for name in ("shm", "cma", "tcp")},
    **{f"ours-{name}-link": f"llm_datadist.bench.sides.linking:{name.title()}" for name in ("shm", "cma", "tcp")},
    "ours-copy-blocks": "llm_datadist.bench.sides.local:CopyBlocks",
    "ours-copy-cache": "llm_datadist.bench.sides.local:CopyCache",
    "ours-swap": "llm_datadist.bench.sides.local:SwapBlocks",
    "ours-plan": "llm_datadist.bench.sides.local:Planning",
    "ours-alloc": "llm_datadist.bench.sides.local:Allocating",
}
"""This library: by transport, and what it does without one."""

LIMITS: Final = {
    "memcpy": "llm_datadist.bench.sides.limits:Memcpy",
    "memcpy-nt": "llm_datadist.bench.sides.limits:MemcpyStreaming",
    "cma": "llm_datadist.bench.sides.limits:Cma",
    "tcp-raw": "llm_datadist.bench.sides.limits:TcpRaw",
}
"""What the machine can do, without this library's engine. ``memcpy-nt``: with streaming stores."""

PEERS: Final = {
    "nixl": "llm_datadist.bench.sides.nixl:Nixl",
    "nixl-tcp": "llm_datadist.bench.sides.nixl:NixlTcp",
    "nixl-prepared": "llm_datadist.bench.sides.nixl:NixlPrepared",
    "nixl-tcp-prepared": "llm_datadist.bench.sides.nixl:NixlTcpPrepared",
    "mooncake": "llm_datadist.bench.sides.mooncake:Mooncake",
    "torch": "llm_datadist.bench.sides.torch:Torch",
}
"""Other software that does the same. ``nixl`` makes each transfer anew, ``nixl-prepared`` only posts one."""

SIDES: Final = OURS | LIMITS | PEERS
"""Name -> module:class. Every name of the form module:class is one too."""


def find(name: str) -> type[Side]:
    """Import a side by its name, or by ``module:class``.

    Raises:
        BenchError: There is no such side, or its module cannot be imported here.
    """
    module, _, attribute = SIDES.get(name, name).partition(":")
    if not attribute:
        raise BenchError(f"{name}: no such side; there are {', '.join(SIDES)}")
    try:
        side: type[Side] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BenchError(f"not there: {error}") from error
    return side


def why_not(name: str, workload: Workload) -> str | None:
    """Say why a side cannot run a workload, before anything is started; None when it can."""
    try:
        return find(name).why_not(workload)
    except BenchError as error:
        return str(error)
