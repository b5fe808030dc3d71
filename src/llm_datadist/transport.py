"""Base classes of transports, the kinds of memory that they move, and helpers; an extension.

Another package adds a transport by a subclass of :class:`Transport`, which it declares as an entry point of the group
``llm_datadist.transports``. An instance imports it only if ``llm.Transport`` names it. docs/transports.md shows how.

Provisional: a minor version may add, change or remove names of this module and their methods; the changelog says so.
Names with an underscore that these classes have for subclasses to override (``Connection._move`` and its neighbours)
are part of it.
"""

from llm_datadist._deadline import Deadline as Deadline
from llm_datadist._memory.exports import NON_POOL as NON_POOL
from llm_datadist._native import (
    MAPPED as MAPPED,
    NO_DEADLINE as NO_DEADLINE,
    USER as USER,
    Place as Place,
    Plan as Plan,
    Tensors as Tensors,
    encode_request as encode_request,
    execute as execute,
)
from llm_datadist._native.lane_engine import (
    CHANGED as CHANGED,
    TORN as TORN,
)
from llm_datadist._native.plan import split_plan as split_plan
from llm_datadist._transport.choose import (
    Choice as Choice,
    Verdict as Verdict,
)
from llm_datadist._transport.connection import (
    PeerRange as PeerRange,
    Capabilities as Capabilities,
    Connection as Connection,
    MemoryChanged as MemoryChanged,
    MemoryTorn as MemoryTorn,
    PeerServer as PeerServer,
    RemoteTensors as RemoteTensors,
    ServedConnection as ServedConnection,
    Transfer as Transfer,
    Usage as Usage,
    Watch as Watch,
    move_mapped as move_mapped,
)
from llm_datadist._transport.moves import (
    MoveOwner as MoveOwner,
    MoveReply as MoveReply,
    MoveRequest as MoveRequest,
    answer as answer,
    refusal as refusal,
    status_of as status_of,
)
from llm_datadist._transport.transport import (
    Context as Context,
    Meeting as Meeting,
    Transport as Transport,
    Wire as Wire,
)
