"""More ends in the process of a worker, which come and go while it works: pairs that link, move bytes and finalize.

One pair is two CacheManagers that link by ``link_clusters`` and take each other's role, one links by a rank table, one
has the v1 interface. Addresses, ports and pools are their own; the worker's threads, signals and faults are not.
"""

import itertools
import os
from random import Random
from typing import Any, Final

import numpy as np

from faults.campaign.journal import Scene
from faults.campaign.memory import Shape, Stamp, difference, fill, whole, words_of
from faults.harness import holds_within
from llm_datadist import BlocksCacheKey, LLMDataDist, LLMRole, RegisterMemStatus
from llm_datadist.errors import LLMException
from tests.support.linking import info
from tests.support.probe import cache_of
from tests.support.ranks import table
from tests.support.world import make_config

_SHAPE: Final = Shape(4, 8, 64)
_BUDGET_MS: Final = 2000
_PREPARE_SECONDS: Final = 3.0
_KEY: Final = BlocksCacheKey(1, 5)
_POOL: Final = '{"memory_size": 1048576, "page_shift": 12}'
_numbers: Final = itertools.count(1)


class Lodgers:
    def __init__(self, scene: Scene, rng: Random) -> None:
        self._scene, self._rng = scene, rng

    def run(self) -> None:
        while not self._scene.stop.is_set():
            how = self._rng.choice(("clusters", "roles", "ranks", "v1"))
            prompt, decoder = LLMDataDist(LLMRole.PROMPT, 1), LLMDataDist(LLMRole.DECODER, 2)
            try:
                self._live(how, prompt, decoder)
            except LLMException:
                self._scene.journal.note("lodgers that did not get far")
            for each in (decoder, prompt):
                self._call("finalize", each.finalize)
            self._scene.stop.wait(self._rng.choice((0.05, 0.3)))

    def _call(self, kind: str, function: Any, *args: Any) -> Any:
        outcome = self._scene.call(f"lodger {kind}", _BUDGET_MS / 1e3, function, *args)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _live(self, how: str, prompt: LLMDataDist, decoder: LLMDataDist) -> None:
        scene = self._scene
        settings: dict[str, Any] = {"sync_kv_timeout": _BUDGET_MS, "mem_pool_cfg": _POOL, "host_mem_pool_cfg": None}
        # A transport of their own choice: between the two ends of one process any will do.
        settings["extra"] = {"llm.Transport": self._rng.choice(("auto", "inproc", "shm", "tcp"))}
        settings |= {"enable_cache_manager": None} if how == "v1" else {}
        for each in (prompt, decoder):
            listen = {} if how == "ranks" or each is decoder else {"listen_ip_info": "127.0.0.1:0"}
            self._call("init", each.init, make_config(**settings, **listen))
        if how == "roles":
            self._call("switch_role", prompt.switch_role, LLMRole.DECODER)  # which listens no more
            options = make_config(**settings, listen_ip_info="127.0.0.1:0")
            self._call("switch_role", prompt.switch_role, LLMRole.PROMPT, options)
        turn = next(_numbers)
        managers: list[Any] = [
            each.kv_cache_manager if how == "v1" else each.cache_manager for each in (prompt, decoder)
        ]
        made = [
            self._call("allocate", manager.allocate_blocks_cache, _SHAPE.desc(), key)
            for manager, key in zip(managers, (_KEY, None), strict=True)
        ]
        source, target = (cache_of(each) if how == "v1" else each for each in made)
        stamp = Stamp(scene.worker, scene.life, 59, turn)
        fill(words_of(source), stamp)
        numbers = []
        if how == "ranks":
            join = f"campaign {os.getpid()} {turn}", {1: 0, 2: 1}, table("127.0.0.1", "127.0.0.1")
            numbers = [self._call("link", each.link, *join) for each in (prompt, decoder)]
            preparing = RegisterMemStatus.PREPARING
            holds_within(lambda: decoder.query_register_mem_status(numbers[1]) is not preparing, _PREPARE_SECONDS)
        else:
            self._call("link_clusters", decoder.link_clusters, [info(1, prompt.listen_port)], _BUDGET_MS)
        blocks = list(range(_SHAPE.rows))
        self._call(f"pull_blocks, {how}", managers[1].pull_blocks, _KEY, made[1], blocks, blocks)
        found, wanted = np.stack(words_of(target)), whole(stamp, _SHAPE)
        if np.array_equal(found, wanted):
            scene.journal.verified(found.nbytes)
        else:
            scene.journal.violation("wrong bytes", f"lodger, {how}: {difference(found, wanted)}")
        # The worker's own manager must not take a cache of a lodger for one of its own.
        if scene.call("copy_blocks of a lodger", scene.budget, scene.cm.copy_blocks, target, {0: [1]}) is None:
            scene.journal.violation("wrong bytes", "a cache of a lodger was taken for one of the worker's")
        for each, number in zip((prompt, decoder), numbers, strict=bool(numbers)):
            self._call("unlink", each.unlink, number)
