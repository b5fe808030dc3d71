"""The two ends of a measurement: a target in a process of its own and an initiator in this one, linked.

What runs at the target is a function of its ``World``: ``target.do(function, *arguments)``. It goes there by its name,
so a script runs ``main`` of the module that ``importlib`` imports, not of ``__main__``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, info, link
from tests.support.world import World, make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["two_ends"]


@contextmanager
def two_ends(
    transport: str = "shm", *, extra: dict[str, str] | None = None, **settings: str | int
) -> Iterator[tuple[ChildEnd, World]]:
    """Yield target (PROMPT, cluster 1) and initiator (DECODER, cluster 2), linked.

    Args:
        transport: Value of ``llm.Transport``.
        extra: More options of both ends.
        settings: Of both ends, as :func:`tests.support.world.make_config` takes them.
    """
    every: dict[str, Any] = {**settings, "extra": {"llm.Transport": transport, **(extra or {})}}
    target, here = ChildEnd("target", fresh=True), World("initiator")
    try:
        target.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **every)
        here.start("DECODER", 2, make_config(**every))
        if (codes := link(here, [info(1, target.port)])) != SUCCESS:
            raise SystemExit(f"cannot link: {codes}")
        yield target, here
    finally:
        here.stop()
        target.stop()
        target.close()
