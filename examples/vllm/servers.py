"""What the examples and tests of vLLM share: servers on this machine, with a connector or without.

Each has a port that was free, on loopback only, a log file and one core; it ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CONNECTORS", "MODEL", "Connector", "Role", "Server", "Servers", "free_port", "store_connector"]

MODEL = "tiny"
"""Name of the model, as requests have to give it."""

SECONDS = 120.0
"""A server starts in about 20 s on one core; one that needs six times as long does not come."""

Role = Literal["ordinary", "prefill", "decode", "both"]
_KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


@dataclass(frozen=True)
class Connector:
    """A connector as vLLM is told of it.

    Attributes:
        name: Its class.
        module: Where that is, for one that vLLM does not ship.
        extra: Its own options (``kv_connector_extra_config``).
        policy: What a decode server does about KV that did not come: ``fail`` or ``recompute``.
    """

    name: str
    module: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    policy: Literal["fail", "recompute"] = "fail"

    def config(self, role: Role) -> dict[str, Any]:
        """Return the value of ``--kv-transfer-config``."""
        config: dict[str, Any] = {
            "kv_connector": self.name,
            "kv_role": _KV_ROLES[role],
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": dict(self.extra),
        }
        return config | ({"kv_connector_module_path": self.module} if self.module else {})


CONNECTORS = {
    "datadist": Connector("LLMDataDistConnector", "llm_datadist.integrations.vllm"),
    "nixl": Connector("NixlConnector"),
}


def store_connector(store: str, **extra: Any) -> Connector:
    """Return the connector of the prefix store at an address "IP:PORT", for the role ``both``."""
    extra = {"store": store} | extra
    return Connector("LLMDataDistStoreConnector", "llm_datadist.integrations.vllm", extra, "recompute")


class Server:
    """One vLLM server, a proxy or a prefix store: a process group, its port and its log.

    Attributes:
        name: Name of the log file, and what errors call it.
        port: Where it listens.
        process: Its first process; the engine is a child of that.
        log: What it has printed.
    """

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.port = port
        self.process = process
        self.log = log

    @property
    def url(self) -> str:
        """Return its base address."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float = SECONDS) -> Self:
        """Wait until it answers; return it. Raise RuntimeError with the end of its log when it does not."""
        limit = time.monotonic() + seconds
        while not self.healthy():
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"{self.name} ended with {code}:\n{self.tail()}")
            if time.monotonic() > limit:
                raise RuntimeError(f"{self.name} is not ready after {seconds:g} s:\n{self.tail()}")
            time.sleep(0.2)
        return self

    def healthy(self) -> bool:
        """Return True if it says that it can serve."""
        try:
            return self.get("/health", seconds=5)[0] == 200
        except OSError:
            return False

    def get(self, path: str, seconds: float = 60) -> tuple[int, str]:
        """Return status and text of a GET, such as ``/metrics``."""
        return self._ask("GET", path, None, {}, seconds)

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, seconds: float = 60
    ) -> tuple[int, dict[str, Any]]:
        """Return status and object of a POST of JSON."""
        status, text = self._ask("POST", path, json.dumps(body), dict(headers or {}), seconds)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        return status, answer if isinstance(answer, dict) else {"text": answer}

    def _ask(
        self, method: str, path: str, body: str | None, headers: dict[str, str], seconds: float
    ) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, body, headers | {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, such as ``vllm:num_requests_running``."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, have = sample.partition("{")
            if found == name and all(f'{label}="{wanted}"' in have for label, wanted in labels.items()):
                total += float(value)
        return total

    def pulled_tokens(self) -> int:
        """Return how many tokens of its prompts it has not computed, because the connector brought their KV."""
        return int(self.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))

    def tail(self, lines: int = 40) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, seconds: float = 20) -> None:
        """Ask it to end; kill what has not ended by then. Nothing is left of it afterwards."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill all its processes at once, as a crash of its machine would."""
        with suppress(ProcessLookupError):  # none of its processes may be left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Servers:
    """Starts servers and, as a context manager, ends all of them.

    Args:
        folder: Where the log files go.
        checkpoint: The model of all servers.
    """

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._started: list[Server] = []

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all servers: first all are asked, then each is waited for."""
        for server in self._started:
            server.process.terminate()
        for server in self._started:
            server.stop()

    def start(
        self,
        role: Role,
        connector: Connector | None = None,
        *,
        name: str = "",
        port: int = 0,
        cores: str = "0",
        blocks: int = 64,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        """Start a server; ``wait()`` tells when it is ready, so that several can start at the same time.

        Call it in a thread that lives as long as the server: the kernel ends the server with that thread.

        Args:
            role: Prefill, decode, both or neither.
            connector: What moves the KV of a server with a role.
            name: Of its log file; by default its role.
            port: Where it listens; 0 picks a free one.
            cores: On which its threads compute, as ``VLLM_CPU_OMP_THREADS_BIND`` takes it ("0|1" for two ranks).
            blocks: Size of its KV cache; a block of 128 tokens.
            options: More of the command line.
            environment: More variables.
        """
        port = port or free_port()
        name = name or role
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),  # the command needs a package named vllm
            *("--model", str(self._checkpoint), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", "2304", "--enforce-eager", "--dtype", "float32"),
            *("--num-gpu-blocks-override", str(blocks)),
        ]
        if role != "ordinary":
            if connector is None:
                raise ValueError(f"a {role} server needs a connector")
            command += ["--kv-transfer-config", json.dumps(connector.config(role))]
        return self._run(name, port, [*command, *options], _environment(cores) | dict(environment or {}))

    def proxy(self, prefills: Sequence[Server], decoders: Sequence[Server], *, name: str = "proxy") -> Server:
        """Start the proxy in front of servers; it is ready when one of each kind is."""
        port = free_port()
        command = [sys.executable, str(Path(__file__).with_name("proxy.py")), "--port", str(port)]
        command += ["--prefill", *(each.url for each in prefills), "--decode", *(each.url for each in decoders)]
        return self._run(name, port, command, dict(os.environ))

    def store(self, memory: str = "512MiB", *, name: str = "store", port: int = 0) -> Server:
        """Start a prefix store; servers link to it once it listens."""
        port = port or free_port()
        command = [sys.executable, "-m", "llm_datadist", "store", "--memory", memory, "--listen", f"127.0.0.1:{port}"]
        return self._run(name, port, command, dict(os.environ))

    def _run(self, name: str, port: int, command: list[str], environment: dict[str, str]) -> Server:
        log = self._folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Not a session: a worker that waits by sched_yield may keep a core from other sessions (docs/vllm.md).
                process_group=0,
            )
        server = Server(name, port, process, log)
        self._started.append(server)
        return server


def _environment(cores: str) -> dict[str, str]:
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_HOST_IP": "127.0.0.1",
        # Two of these on one machine: each needs a port for its handshake.
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        # Nothing goes out.
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """Return a port of loopback that nobody listens on now, and that the kernel gives to no connection meanwhile."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
