"""Named steps of a transfer at which a test can stop, count or kill a thread (``faults/gates.py``).

Code at a step says ``if steps.watch is not None: steps.watch("plan", link)``: inline, because a call costs six times
as much as the comparison. Nothing in the library sets :data:`watch`. Any thread calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Called with the name of the step, the object that it concerns (a link, the initiator or the store), and details.
watch: Callable[..., None] | None = None
