"""What the calls of v1 share: roles, and handles that were dropped."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from llm_datadist.checks import check_rule, check_type
from llm_datadist.kv_cache import KvCache
from llm_datadist.managers.base import EngineUser
from llm_datadist.types import CacheDesc, LLMRole, Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine import Engine

__all__ = ["KvUser", "check_cache", "require_device"]


class KvUser(EngineUser):
    """Holds the engine of one ``init`` in v1 mode, and the ids of caches whose handles were dropped. Any thread.

    Args:
        engine: Of the LLMDataDist.
        role: Returns its role as of now: ``switch_role`` changes it.
    """

    def __init__(self, engine: Engine, role: Callable[[], LLMRole]) -> None:
        super().__init__(engine)
        self._role = role
        # Filled by KvCache.__del__, anywhere; a deque takes and gives one element without a lock.
        self._forgotten: deque[int] = deque()

    @property
    def _engine(self) -> Engine:
        engine = super()._engine
        while self._forgotten:
            try:
                cache_id = self._forgotten.popleft()
            except IndexError:  # another thread was quicker
                break
            engine.store.deallocate(cache_id)
        return engine

    def _require_role(self, call: str, role: LLMRole) -> None:
        now = self._role()
        check_rule(now is role, f"{call}: only a {role.name} may, and this is a {now.name}")


def check_cache(name: str, cache: object) -> KvCache:
    """Return ``cache`` if it is a KvCache on the device: v1 has no other calls for caches (R16)."""
    found = check_type(name, cache, KvCache)
    require_device(name, found.cache_desc)
    return found


def require_device(name: str, desc: CacheDesc) -> None:
    """Raise ParamError unless the placement is DEVICE."""
    check_rule(
        desc.placement is Placement.DEVICE, f"{name}: placement is {desc.placement.name}, only DEVICE is possible here"
    )
