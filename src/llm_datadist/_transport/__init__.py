"""How the bytes of a plan get from one process to another, and which way is the best.

Read :mod:`llm_datadist._transport.connection` first, then :mod:`llm_datadist._transport.inproc`.
"""

from llm_datadist._transport.choose import Choice, agree, choose
from llm_datadist._transport.connection import Connection, RemoteTensors, Transfer
from llm_datadist._transport.peer_memory import PeerMemory
from llm_datadist._transport.samehost import SameHostListener, exchange_memory
from llm_datadist._transport.shm import ShmConnection

__all__ = [
    "Choice",
    "Connection",
    "PeerMemory",
    "RemoteTensors",
    "SameHostListener",
    "ShmConnection",
    "Transfer",
    "agree",
    "choose",
    "exchange_memory",
]
