"""Named steps of a transfer at which a test can stop, count or kill a thread (``faults/gates.py``).

A step compares :data:`watch` with None inline, which costs less than a call. The library never sets it. Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Gets the name of the step, its object (a link, the initiator or the store), and details.
watch: Callable[..., None] | None = None
