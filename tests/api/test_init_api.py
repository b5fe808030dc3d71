"""init that fails, with nothing left, and processes that end or fork with live instances (interface §3.1)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist._memory.device import HostDevice
from llm_datadist.errors import LLMException, NotInitialized, OutOfMemory, ParamError, StateError
from tests.support.source import ROOT
from tests.support.world import make_config, residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.covers(
    "LLMDataDist", "_shutdown_handler", "LLMDataDist.init", "LLMStatusCode.LLM_FAILED", "errors.NotInitialized"
)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = residue()
    yield
    assert LLMDataDist.llm_engine_instance is None
    assert settled(before) == before


def live(cluster_id: int, **settings: Any) -> LLMDataDist:
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(make_config(**settings))
    return datadist


# --- init that fails --------------------------------------------------------------------------------------------------


class _BrokenDevice(HostDevice):
    """Host memory that is used up at the second pool."""

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        raise OutOfMemory("this device has nothing left")


HUGE: Final = '{"memory_size": 140737488355328}'
FAILURES: Final[dict[str, tuple[dict[str, Any], type[LLMException], LLMStatusCode, str]]] = {
    "device pool too large": (
        {"mem_pool_cfg": HUGE},
        OutOfMemory,
        LLMStatusCode.LLM_OUT_OF_MEMORY,
        "140737488355328",
    ),
    "no folder for the rendezvous": (
        {"extra": {"llm.ShmSocketDir": "/nowhere/at/all"}},
        ParamError,
        LLMStatusCode.LLM_PARAM_INVALID,
        "/nowhere/at/all",
    ),
    "a device that fails": ({"device": _BrokenDevice()}, OutOfMemory, LLMStatusCode.LLM_OUT_OF_MEMORY, "nothing left"),
    "v1 with two listeners": (
        {"enable_cache_manager": False, "listen_ip_info": "127.0.0.1:0;127.0.0.1:0"},
        ParamError,
        LLMStatusCode.LLM_PARAM_INVALID,
        "2 addresses",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_init_that_fails_half_way_leaves_nothing_and_the_port_free(name: str) -> None:
    settings, kind, code, part = FAILURES[name]
    settings = dict(settings)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = {"listen_ip_info": f"127.0.0.1:{probe.getsockname()[1]}"}
    datadist = LLMDataDist(LLMRole.PROMPT, 1, device=settings.pop("device", None))
    before = residue()
    for _ in range(2):
        with pytest.raises(kind) as caught:
            datadist.init(make_config(**(listen | settings)))
        assert caught.value.status_code is code
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)
        assert LLMDataDist.llm_engine_instance is None
        assert settled(before) == before
    datadist._device = None
    datadist.init(make_config(**listen))
    assert f"127.0.0.1:{datadist.listen_port}" == listen["listen_ip_info"]
    datadist.finalize()


def test_an_address_that_cannot_be_listened_at_is_llm_failed_naming_it_and_leaves_nothing() -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    before = residue()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        for address in (f"127.0.0.1:{port}", "192.0.2.1:26000"):  # busy, and of another host
            with pytest.raises(LLMException) as caught:
                datadist.init(make_config(listen_ip_info=address))
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert address in str(caught.value)
            assert "\n" not in str(caught.value)
    assert settled(before) == before
    datadist.init(make_config(listen_ip_info=f"127.0.0.1:{port}"))
    datadist.finalize()


def test_listening_beyond_loopback_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    datadist = live(1, listen_ip_info="0.0.0.0:0")
    warnings = [record.getMessage() for record in caplog.records if "without authentication" in record.getMessage()]
    assert warnings == [warnings[0]]
    assert f"0.0.0.0:{datadist.listen_port}" in warnings[0]
    datadist.finalize()


# --- the end of the process -------------------------------------------------------------------------------------------

_PRELUDE: Final = """
import os, sys
from tests.support.linking import info
from tests.support.world import World, cluster_info, make_config
first, second = World("first"), World("second")
port = first.start("PROMPT", 1, make_config(listen_ip_info="127.0.0.1:0"))
second.start("DECODER", 2, make_config())
assert second.dd.link_clusters([cluster_info(1, port)])[0] == 0
"""
_FORKING: Final = """
child = os.fork()
if child == 0:
    try:
        second.dd.cache_manager
    except RuntimeError as error:
        print("child:", error)
    sys.exit(0)
print("exit status", os.waitpid(child, 0)[1])
from tests.support.linking import bytes_move_both_ways
from tests.support.ends import LocalEnd
ends = LocalEnd("first"), LocalEnd("second")
for end, world in zip(ends, (first, second)):
    end.world, end.cluster_id = world, world.dd.cluster_id
bytes_move_both_ways(*ends)
first.stop()
first.start("PROMPT", 1, make_config(listen_ip_info=f"127.0.0.1:{port}"))
assert second.dd.link_clusters([cluster_info(1, port)])[0] == 0
print("over")
"""


def run_python(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Of asyncio's in dev mode only the time that a step took, which is the machine's.
    usual = re.compile(r"link to cluster|Executing <.* took [0-9.]+ seconds")
    noise = [line for line in done.stderr.splitlines() if not usual.match(line)]
    assert (done.returncode, noise) == (0, [])
    return done.stdout.splitlines()


def test_a_forked_child_has_nothing_of_its_parents_and_an_end_without_finalize_is_clean() -> None:
    assert run_python(_PRELUDE + _FORKING) == [
        "child: cache_manager: this LLMDataDist is not initialized; call init first",
        "exit status 0",
        "over",
    ]


def test_the_exit_handler_finalizes_and_swallows_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_datadist.datadist import _shutdown_handler

    first, second = live(1), live(2)
    finalize = LLMDataDist.finalize

    def failing(self: LLMDataDist) -> None:
        finalize(self)
        if self is first:
            raise StateError("too late")

    monkeypatch.setattr(LLMDataDist, "finalize", failing)
    _shutdown_handler()
    for each in (first, second):
        with pytest.raises(NotInitialized):
            each.statistics()
