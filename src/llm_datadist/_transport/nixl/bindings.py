"""NIXL's package, which is optional and imported at the first use, and what the environment lets UCX use.

Threads: any; NIXL, once imported, has threads of its own.
"""

from __future__ import annotations

import importlib.util
import logging.config
import os
import re
import threading
from contextlib import suppress
from functools import cache
from typing import Any, Final

from llm_datadist._checks import clean

NOT_INSTALLED: Final = (
    "NIXL is not installed: pip install 'open-datadist[nixl]', or without the torch that its wheel declares and never "
    "imports: pip install --no-deps nixl nixl-cu12"
)
#: What an agent is told to use. NIXL takes one name, not a list; "ib" stands for all RDMA, that of EFA too.
_TLS: Final = {"rdma": "ib", "tcp": "tcp"}
#: Names that UCX_TLS may have: for memory of GPUs, which NIXL wants where there are some, and between hosts.
_GPU: Final = re.compile(r"(cuda|gdr|rocm|ze|gaudi)(_\w+)?")
_RDMA: Final = re.compile(r"ib|srd|(rc|dc)(_\w+)?")
_BETWEEN_HOSTS: Final = re.compile(rf"tcp|ud(_\w+)?|{_RDMA.pattern}")


class NixlFailed(Exception):
    """Failure inside NIXL; bytes may have moved, and may still."""

    def __init__(self, text: str) -> None:
        super().__init__(clean(text))  # a part may be a peer's text


def installed() -> bool:
    """Return True if the package is there; it is not imported."""
    try:
        return importlib.util.find_spec("nixl") is not None
    except ImportError:
        return False


@cache
def package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version("nixl")
    return "?"


def import_bindings() -> Any:  # noqa: ANN401 (NIXL has no types)
    """Return NIXL's bindings; ``logging.config.dictConfig`` does nothing in this thread while they are imported.

    NIXL calls it then and has no switch for that. The call would close all handlers of the program, and one that was
    opened with mode "w" would log nothing afterwards.
    """
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # UCX's default is stdout, which belongs to the program
    configure, importing = logging.config.dictConfig, threading.get_ident()

    def configure_elsewhere(config: Any) -> None:  # noqa: ANN401 (a dict, or the type that typeshed has for it)
        if threading.get_ident() != importing:
            configure(config)

    logging.config.dictConfig = configure_elsewhere
    try:
        from nixl import _bindings
    except ImportError as error:
        raise NixlFailed(f"{NOT_INSTALLED} ({error})") from error
    finally:
        logging.config.dictConfig = configure
    return _bindings


def ucx_transports(fabric: str) -> str:
    """Return what UCX may use for a fabric: ``UCX_TLS`` if set, because then NIXL sets nothing. Raises NixlFailed.

    No shared memory: an agent's end does not stop a writer that has mapped it.
    """
    if (chosen := os.environ.get("UCX_TLS")) is None:
        return _TLS[fabric]
    names = [name for name in chosen.split(",") if not _GPU.fullmatch(name)]
    if not all(map(_BETWEEN_HOSTS.fullmatch, names)):
        raise NixlFailed(
            f"UCX_TLS={chosen} may let UCX use shared memory, where a transfer that was given up cannot be stopped: "
            "name transports between hosts, or leave it unset"
        )
    if fabric == "tcp" and "tcp" not in names:
        raise NixlFailed(f"UCX_TLS={chosen} lacks tcp")
    if fabric == "rdma" and not (names and all(map(_RDMA.fullmatch, names))):
        raise NixlFailed(f"UCX_TLS={chosen} is not RDMA alone")
    return chosen


def why_no_gpu() -> str:
    """Return why UCX may not move memory of a GPU here, if so.

    Without cuda_copy UCX takes it for the host's. cuda_ipc maps it in the peer, which an agent's end does not stop; and
    what gdr_copy does then nobody has looked at.
    """
    chosen = os.environ.get("UCX_TLS", "")
    if [name for name in chosen.split(",") if _GPU.fullmatch(name)] == ["cuda_copy"]:
        return ""
    return f"UCX_TLS={chosen}: must name cuda_copy and no other transport of GPU memory, as in tcp,cuda_copy"
