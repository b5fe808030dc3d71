"""The commands that deploy/ has as probes, against a process that lives, one that drains, one that has ended."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm_datadist.config import SHM_SOCKET_DIR
from llm_datadist.store import STORE_ID
from tests.deploy.manifests import STORE, containers, option, services, words
from tests.store import engines as e
from tests.store.engines import NS, family_of, keys_of
from tests.support.authority import secret_file
from tests.support.linking import free_port
from tests.support.moves import make, wait_until
from tests.support.source import PATHS, ROOT, run

pytest.importorskip("yaml", reason="`make test-deploy` installs what reads the manifests")
pytest.importorskip("typer", reason="the command needs the extra [cli]")
pytest.importorskip("prometheus_client", reason="its metrics need the extra [metrics]")


@contextmanager
def _store(folder: Path, sockets: Path) -> Iterator[tuple[subprocess.Popen[str], Any, int, str]]:
    """Start the store of the manifest, with folders of the test; yield it, its probe, port and address of metrics."""
    ((_, container),) = containers(STORE)
    probe = container["readinessProbe"]["exec"]["command"]
    port, pod = free_port(), os.environ | PATHS | {"POD_IP": "127.0.0.1"}
    pod["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), pod["PATH"]])
    ours = {
        "$(POD_IP)": "127.0.0.1",
        "26100": f"{port}",
        "/credentials": str(folder),
        "/run/open-datadist": str(sockets),
        "--memory=32GiB": "--memory=4MiB",
    }

    def here(command: list[str]) -> list[str]:
        for old, new in ours.items():
            command = [word.replace(old, new) for word in command]
        return command

    asked: dict[str, Any] = {"env": pod, "cwd": ROOT}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*here(words(container)), "--json", "--metrics=0"], stdout=subprocess.PIPE, stderr=log, text=True, **asked
        )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        yield process, lambda: run(*here(probe), **asked), port, f"http://127.0.0.1:{first['metrics']}/metrics"
    finally:
        process.kill()
        process.communicate()


def test_the_probe_of_the_store_tells_a_store_that_lives_from_one_that_hangs_drains_or_has_ended(
    tmp_path: Path, socket_folder: Path
) -> None:
    settings = secret_file(tmp_path / "secrets", pods=bytes(32))
    with _store(tmp_path, socket_folder) as (process, probe, port, metrics), family_of() as family:
        for _ in range(3):
            done = probe()
            assert (done.returncode, done.stdout) == (0, f"cluster {STORE_ID} takes links\n"), done.stderr
        with urllib.request.urlopen(metrics, timeout=30) as answer:
            told = answer.read().decode()
        assert "llm_datadist_info{" in told
        assert not re.search(r"^llm_datadist_link_(up|lost)\{", told, flags=re.MULTILINE), told
        process.send_signal(signal.SIGSTOP)
        done = probe()
        assert done.returncode == 2, done.stdout
        process.send_signal(signal.SIGCONT)
        assert probe().returncode == 0
        engine = family.child("engine")
        engine.start("MIX", 7, extra={**settings, SHM_SOCKET_DIR: str(socket_folder)})
        engine.do(make, "kv", e.SPEC, 7)
        engine.do(e.open_client, "client", port, NS, {"store_id": STORE_ID})
        keys = keys_of(0, 1)
        assert engine.do(e.save, keys, [3, 4]) == 2
        assert engine.do(e.look_up, keys) == 2  # held: the drain waits for it
        assert probe().returncode == 0
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: probe().returncode == 2)
        done = probe()
        assert (done.returncode, "draining" in done.stderr) == (2, True), done.stderr
        assert process.poll() is None, "it has ended, and not been draining"
        engine.do(e.release)
        assert process.wait(60) == 0
        assert process.stdout is not None
        (space,) = json.loads(process.stdout.read())["statistics"]["namespaces"]
        assert (space["stored"], space["published"]) == (2, 2)
        done = probe()
        assert (done.returncode, "refused" in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "log").read_text() == "", "what a probe writes into the log of the store"


class _Health(BaseHTTPRequestHandler):
    """A server as vLLM and the proxy are to a probe."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _serving() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["prompt", "decoder", "proxy"])
def test_the_probe_of_compose_tells_a_server_that_is_well_from_one_that_is_not_or_has_ended(name: str) -> None:
    service = services()[name]
    first, *command = service["healthcheck"]["test"]
    assert (first, command[0]) == ("CMD", "python3")
    there = f":{option(service, 'port')}/"
    assert there in command[-1]
    with _serving() as port:
        asked = [sys.executable, *(word.replace(there, f":{port}/") for word in command[1:])]
        _Health.status = 200
        well = run(*asked)
        _Health.status = 503
        ill = run(*asked)
    ended = run(*asked)
    assert (well.returncode, ill.returncode, ended.returncode) == (0, 1, 1), well.stderr
    assert "503" in ill.stderr
    assert "refused" in ended.stderr
