"""LLMDataDist: the composition root. init builds the engine, finalize takes it down (API §3)."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, ClassVar

from llm_datadist.checks import check_type, check_uint64
from llm_datadist.errors import LLMException
from llm_datadist.instance.asynchronous import AwaitedLinks
from llm_datadist.instance.communicators import CommunicatorLinks
from llm_datadist.instance.managers import Managed
from llm_datadist.instance.observe import Observed
from llm_datadist.instance.roles import Switching
from llm_datadist.instance.v1links import V1Links
from llm_datadist.log import logger
from llm_datadist.options import Options
from llm_datadist.types import LLMRole

if TYPE_CHECKING:
    from llm_datadist.engine import Engine
    from llm_datadist.memory.device import Device

__all__ = ["LLMDataDist"]


class LLMDataDist(Managed, AwaitedLinks, V1Links, CommunicatorLinks, Switching, Observed):
    """One end of the links: a prefill or decode process (or a part of one) that publishes and moves KV caches.

    The calls that link are documented in ``instance/clusters.py``, ``instance/v1links.py`` and, for rank tables,
    ``instance/communicators.py``, ``switch_role`` in ``instance/roles.py``, the managers of caches in
    ``instance/managers.py``, the extensions that tell what is going on in ``instance/observe.py``. Objects are
    independent; several may live in one process (R20). Any thread may call any method, except that ``finalize`` must
    be alone (API §11).

    Args:
        role: A label in v2 mode, where either side may pull and push; in v1 mode it says who may do what.
        cluster_id: uint64, unique among all that link to each other.
        device: What DEVICE placement means in this process; None: host memory. An extension.

    Attributes:
        llm_engine_instance: The most recently initialised live object of this process, or None.

    Raises:
        TypeError: Wrong types (``NoneArgument`` for None).
        ParamError: ``cluster_id`` outside uint64.

    Source: API §3.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    _live: ClassVar[list[LLMDataDist]] = []
    _live_lock: ClassVar[threading.Lock] = threading.Lock()
    #: In a forked child: the parent's engines, kept so that nothing of theirs is torn down here.
    _abandoned: ClassVar[list[Engine]] = []

    def __init__(self, role: LLMRole, cluster_id: int, *, device: Device | None = None) -> None:
        self._role = check_type("role", role, LLMRole)
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._device = device
        self._engine: Engine | None = None
        self._manager = None
        self._lifecycle = threading.Lock()

    # --- life cycle ------------------------------------------------------------------------------------------------

    def init(self, options: dict[str, str]) -> None:
        """Reserve the pools, start to listen if ``llm.listenIpInfo`` is given, and become usable.

        A second call on an initialised object returns silently. After ``finalize`` it may be called again. The dict
        is what ``LLMConfig.generate_options()`` returns, or written by hand; it is not changed.

        Raises:
            TypeError: Not a dict of str to str.
            ParamError: An option breaks its rule; the text names it.
            OutOfMemory: A pool does not fit the host or its cgroup (R11).
            LinkError: The listen address cannot be bound (``LLM_FAILED``); the text names it.

        Source: API §3.1.
        """
        with self._lifecycle:
            if self._engine is None:
                self._init(Options.parse(options, self._role))

    def _init(self, options: Options) -> None:
        # Late, so that importing the package does not load asyncio.
        from llm_datadist.engine import Engine

        engine = Engine(self._cluster_id, options, self._device)
        self._manager = self._make_manager(engine)
        self._engine = engine
        with LLMDataDist._live_lock:
            LLMDataDist._live.append(self)
            LLMDataDist.llm_engine_instance = self
        logger.info("%r initialised", self)

    def finalize(self) -> None:
        """Give up links, listener, pools and tables. Peers are not told; they see their links end.

        No-op when not initialised. Managers taken before are dead from now on (R21); NumPy views stay safe to read.

        Source: API §3.2.
        """
        with self._lifecycle:
            engine, self._engine, self._manager = self._engine, None, None
            if engine is None:
                return
            with LLMDataDist._live_lock:
                LLMDataDist._live.remove(self)
                if LLMDataDist.llm_engine_instance is self:
                    LLMDataDist.llm_engine_instance = LLMDataDist._live[-1] if LLMDataDist._live else None
            engine.close()
            logger.info("%r finalized", self)

    # --- properties ------------------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> int:
        """The cluster id given to the constructor."""
        return self._cluster_id

    def __repr__(self) -> str:
        engine = self._engine
        state = "not initialised" if engine is None else f"{len(engine.links.all())} links"
        return f"<LLMDataDist {self._role.name} cluster {self._cluster_id}: {state}>"


def _shutdown_handler() -> None:
    """At interpreter exit: let layer-wise transfers that move come to their end, then finalize, quietly."""
    live = list(LLMDataDist._live)
    for engine in [each._engine for each in live]:  # all of them first: one may send to another
        if engine is not None:
            engine.tasks.finish()
    for instance in live:
        try:
            instance.finalize()
        except LLMException as error:
            logger.warning("finalize at exit: %s", error)


def _in_forked_child() -> None:
    """The parent's objects are not initialised here; the child may make its own."""
    LLMDataDist._live_lock = threading.Lock()
    for instance in LLMDataDist._live:
        instance._lifecycle = threading.Lock()
        engine, instance._engine, instance._manager = instance._engine, None, None
        if engine is not None:
            LLMDataDist._abandoned.append(engine)
            engine.abandon()
    LLMDataDist._live.clear()
    LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_in_forked_child)
