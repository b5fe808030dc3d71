"""Base classes of transports, the kinds of memory that they move, and helpers; an extension.

Another package adds a transport by a subclass of :class:`Transport`, which it declares as an entry point of the group
``llm_datadist.transports``. An instance imports it only if ``llm.Transport`` names it. docs/transports.md shows how.

Provisional: a minor version may add, change or remove names of this module and their methods; the changelog says so.
Names with an underscore that these classes have for subclasses to override (``Connection._move`` and its neighbours)
are part of it.
"""

from __future__ import annotations

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._native import (
    MAPPED,
    NO_DEADLINE,
    USER,
    Place,
    Plan,
    Tensors,
    encode_request,
    execute,
)
from llm_datadist._native.lane_engine import CHANGED, TORN
from llm_datadist._native.plan import split_plan
from llm_datadist._transport.choose import Choice, Verdict
from llm_datadist._transport.connection import (
    AddressRange,
    Capabilities,
    Connection,
    MemoryChanged,
    MemoryTorn,
    PeerServer,
    RemoteTensors,
    ServedConnection,
    Transfer,
    Usage,
    Watch,
    move_mapped,
)
from llm_datadist._transport.moves import (
    MoveOwner,
    MoveReply,
    MoveRequest,
    answer,
    refusal,
    status_of,
)
from llm_datadist._transport.transport import Context, Meeting, Transport, Wire

__all__ = [
    "CHANGED",
    "MAPPED",
    "NON_POOL",
    "NO_DEADLINE",
    "TORN",
    "USER",
    "AddressRange",
    "Capabilities",
    "Choice",
    "Connection",
    "Context",
    "Deadline",
    "Meeting",
    "MemoryChanged",
    "MemoryTorn",
    "MoveOwner",
    "MoveReply",
    "MoveRequest",
    "PeerServer",
    "Place",
    "Plan",
    "RemoteTensors",
    "ServedConnection",
    "Tensors",
    "Transfer",
    "Transport",
    "Usage",
    "Verdict",
    "Watch",
    "Wire",
    "answer",
    "encode_request",
    "execute",
    "move_mapped",
    "refusal",
    "split_plan",
    "status_of",
]
