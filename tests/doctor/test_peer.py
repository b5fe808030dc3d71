"""Each finding about a peer, made real, by the command itself: two processes, one of them ``--serve``."""

import json
import os
import re
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from faults.strangers import listener
from llm_datadist.config import LISTEN
from llm_datadist.metrics import LinkStatistics
from llm_datadist.tools.doctor import peer
from llm_datadist.tools.doctor.finding import Finding, Severity
from llm_datadist.tools.doctor.serve import CLOCK, CLUSTER
from llm_datadist.types.cluster import show_address
from tests.doctor.hosts import forbid, is_, needs
from tests.support import fakecuda
from tests.support.authority import Authority, secret_file
from tests.support.ends import LocalEnd
from tests.support.linking import free_port, has_ipv6
from tests.support.probe import deadline
from tests.support.source import PATHS, run, run_here
from tests.support.wire import VERSIONS, messages, other_build

pytest.importorskip("typer", reason="the command needs the extra [cli]")
Found = dict[str, Finding]


def _two_ports() -> int:
    """Return a port that is free, and the one above it, too; the kernel gives neither to a connection meanwhile."""
    while True:
        port = free_port()
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


@contextmanager
def _served(*options: str, host: str = "127.0.0.1") -> Iterator[int]:
    port = _two_ports()
    command = [sys.executable, "-m", "llm_datadist", "doctor", "--serve", "--port", str(port), *options]
    command += ["--host", host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | PATHS) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(f"serving at {show_address((host, port))}")
            yield port
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def _doctor(
    port: int, *options: str, host: str = "127.0.0.1", preparation: str = "", inside: tuple[str, ...] = ()
) -> tuple[int, Found]:
    """Run the command, here unless it is to run somewhere else; return its exit status and its findings by name."""
    words = ("doctor", "--peer", f"{host}:{port}", "--json", *options)
    if preparation or inside:
        code = f"{preparation}\nimport sys\nfrom llm_datadist.tools.cli import main\nsys.exit(main())"
        done = run(*inside, sys.executable, "-c", code, *words)
    else:
        done = run_here(*words)
    assert "Traceback" not in done.stderr, done.stderr
    shown = json.loads(done.stdout)
    assert shown["exit_code"] == done.returncode, done.stderr
    return done.returncode, {each["name"]: msgspec.convert(each, Finding) for each in shown["findings"]}


def _fails(port: int, *options: str, finding: str, value: str, mend: str, **settings: Any) -> Found:
    """Run the command: it finds this problem."""
    code, found = _doctor(port, *options, **settings)
    assert code == 2
    is_(found[finding], Severity.PROBLEM, value, mend)
    return found


def test_good_peer_with_one_secret_and_one_with_another_or_none(tmp_path: Path) -> None:
    files = (secret_file(tmp_path / name, a=name.encode() * 8) for name in ("there", "other"))
    there, other = (each["llm.AuthSecretFile"] for each in files)
    with _served("--secrets", there) as port:
        code, found = _doctor(port, "--secrets", there)
        assert code < 2, found
        for name in ("reachable", "clock", "link", "authentication", "latency"):
            assert found[f"peer_{name}"].state is Severity.OK, found
        assert found["peer_transport"].value.startswith("shm: ")
        assert "GB/s, memcpy " in found["peer_bandwidth"].value
        for options, mend in ((("--secrets", other), "the secrets differ"), ((), "this side has no secret")):
            _fails(port, *options, finding="peer_authentication", value="authenti", mend=mend)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_good_peer_over_ipv6() -> None:
    with _served(host="::1") as port:
        code, found = _doctor(port, host="[::1]")
    assert code < 2, found
    assert {found[f"peer_{name}"].state for name in ("reachable", "clock", "link")} == {Severity.OK}, found


def test_closed_port_and_unknown_host() -> None:
    mend = "llm-datadist doctor --serve --host"
    _fails(_two_ports(), finding="peer_reachable", value="Connection refused", mend=mend)
    host, mend, nothing = "nowhere.invalid", "getent hosts nowhere.invalid", needs("unshare", "-n")  # nobody is asked
    _fails(26000, finding="peer_reachable", value=host, mend=mend, host=host, inside=nothing)


def test_what_a_peer_says_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from llm_datadist.tools.cli.doctor import _show

    _show([Finding("peer_link", Severity.OK, "linked to pid 7 of a\x1b[2J\nok      peer_authentication: proved", "")])
    shown = "ok      peer_link: linked to pid 7 of a?[2J?ok      peer_authentication: proved\n"
    assert capsys.readouterr().out == shown


def test_certificates_of_one_authority_and_of_another(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    there, here = (_given(authority.issue(name, ["*"])) for name in ("there", "here"))
    foreign = _given(Authority(tmp_path, "other").issue("foreign", ["*"]) | {"llm.TlsCa": str(authority.path)})
    with _served(*there) as port:
        _, found = _doctor(port, *here)
        is_(found["peer_authentication"], Severity.OK, "both sides proved a secret or certificate", "")
        mend = "certificates of one authority"
        _fails(port, *foreign, finding="peer_authentication", value="authenti", mend=mend)


def _given(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("--option", f"{name}={value}")]


def test_link_that_is_much_slower_than_one_stream() -> None:
    """A relay slows the connections of the link, and passes the raw measurements on."""
    with _served("--option", "llm.Transport=tcp") as port, _relayed(port) as slow:
        code, found = _doctor(slow)
        assert [each for each in found.values() if each.state is Severity.PROBLEM] == []
        assert code == 1
        is_(found["peer_bandwidth"], Severity.WARNING, "one socket stream", "llm.CopyThreads=4")
        short, mend = ("--option", "llm.SyncKvCacheWaitTime=200"), "ss -ti dst 127.0.0.1"
        _fails(slow, *short, finding="peer_pull", value="200 ms", mend=mend)


@contextmanager
def _listening(handler: Any, port: int) -> Iterator[None]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _relayed(port: int) -> Iterator[int]:
    """Yield a port whose connections reach ``port`` at 4 MB/s each; the port above it reaches the one above."""
    here = _two_ports()

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            above = int(self.request.getsockname()[1]) - here
            with socket.create_connection(("127.0.0.1", port + above)) as there:
                back = threading.Thread(target=copy, args=(there, self.request, 0.0 if above else 1 / 4e6))
                back.start()
                copy(self.request, there, 0.0)
                back.join()

    def copy(source: socket.socket, target: socket.socket, seconds_a_byte: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                target.sendall(data)
                time.sleep(len(data) * seconds_a_byte)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with _listening(Relay, here), _listening(Relay, here + 1):
        yield here


def test_forced_tcp_a_secret_of_no_side_or_one_an_option_that_is_wrong_and_cma_forbidden_by_seccomp(
    tmp_path: Path,
) -> None:
    with _served() as port:
        ours = ("--secrets", secret_file(tmp_path / "ours", a=b"a" * 32)["llm.AuthSecretFile"])
        _fails(port, *ours, finding="peer_authentication", value="has none", mend="the peer has no secret")
        code, found = _doctor(port, "--option", "llm.Transport=tcp")
        assert code >= 1
        is_(found["peer_transport"], Severity.WARNING, "tcp: data lanes, as llm.Transport asks", "no llm.Transport")
        is_(found["peer_authentication"], Severity.WARNING, "not authenticated", "--secrets FILE")
        assert "one socket stream" in found["peer_bandwidth"].value
        wrong = ("--option", "llm.Transport=pigeon")
        _fails(port, *wrong, finding="peer_link", value="pigeon", mend="correct the option")
        _, found = _doctor(port, preparation=forbid("process_vm_readv"))
        assert found["peer_transport"].value.startswith("shm: ")
        is_(found["peer_private_transport"], Severity.WARNING, "not by cma", "--cap-add SYS_PTRACE")


@pytest.mark.gpu(True)
def test_pools_in_a_gpu_that_both_sides_share_and_ones_that_are_not_mapped(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fakecuda.environment().items():
        monkeypatch.setenv(name, value)
    cuda = ("--option", "llm.DeviceMemory=cuda")
    with _served(*cuda) as port:
        _, found = _doctor(port, *cuda, preparation="pass")
        gpus = "; pools in GPUs: here cuda:0 (Fake GPU 0), GPU 66616b65, there GPU 66616b65"
        is_(found["peer_transport"], Severity.OK, gpus, "")
        assert {found[f"peer_{name}"].state for name in ("private_transport", "latency")} == {Severity.OK}
        fail = "import os; os.environ['FAKECUDA_FAIL'] = 'cuMemImportFromShareableHandle:101:0:99'"
        _, found = _doctor(port, *cuda, preparation=fail)
        is_(found["peer_transport"], Severity.WARNING, "CUDA_ERROR_INVALID_DEVICE (101): by data lanes", "gpu_export")
        is_(found["gpu_export"], Severity.WARNING, "CUDA_ERROR_INVALID_DEVICE (101)", "-mig 0")


def test_peer_that_is_no_doctor_and_one_with_another_cluster_id() -> None:
    end = LocalEnd("plain")
    for cluster, name, value, mend in (
        (CLUSTER, "peer_pull", "", "doctor --serve"),
        (7, "peer_link", "cluster", "--cluster-id 7; or start llm-datadist doctor --serve"),
    ):
        end.start("PROMPT", cluster, listen_ip_info=f"127.0.0.1:{_two_ports()}")
        assert end.port is not None
        found = _fails(end.port, finding=name, value=value, mend=mend)
        end.stop()
        is_(found["peer_clock"], Severity.UNKNOWN, f"port {end.port + 1}", "doctor --serve")


def test_service_whose_cluster_id_is_told(tmp_path: Path) -> None:
    host = run(sys.executable, "-m", "llm_datadist", "doctor", "--json").returncode
    settings = secret_file(tmp_path / "secrets", one=b"s" * 32)
    given = ("--secrets", settings["llm.AuthSecretFile"])
    end = LocalEnd("service")
    end.start("PROMPT", 7, listen_ip_info="127.0.0.1:0", extra=settings)
    assert end.port is not None
    code, found = _doctor(end.port, "--cluster-id", "7", *given)
    peers = {name: each.state for name, each in found.items() if name.startswith("peer_")}
    names = ("reachable", "link", "authentication", "transport", "private_transport")
    assert (code, peers) == (host, {f"peer_{name}": "ok" for name in names}), found
    other = ("--cluster-id", "8", *given)
    _fails(end.port, *other, finding="peer_link", value="is cluster 7", mend="--cluster-id 7")
    end.stop()


def test_ready_only_links_and_says_by_its_status_whether_it_could() -> None:
    end = LocalEnd("service")
    end.start("PROMPT", 7, listen_ip_info="127.0.0.1:0")
    there = ("--ready", "--peer", f"127.0.0.1:{end.port}")
    for options in ((), ("--cluster-id", "7")):
        done = run_here("doctor", *there, *options)
        assert (done.returncode, done.stdout, done.stderr) == (0, "cluster 7 takes links\n", "")
    for words, text in (
        ((*there, "--cluster-id", "8"), "remote_cluster_id=8"),
        ((*there, "--json"), "--ready needs --peer, and neither --serve nor --json"),
        ((*there, "--serve"), "--ready needs --peer, and neither --serve nor --json"),
        (("--ready",), "--ready needs --peer, and neither --serve nor --json"),
    ):
        done = run_here("doctor", *words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    end.stop()
    done = run_here("doctor", *there)
    assert (done.returncode, "refused" in done.stderr) == (2, True), done.stderr


_PORT: Final = f"not this library: is it the port of {LISTEN}?"


@pytest.mark.parametrize(
    ("answer", "value", "mend"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", f"speaks SSH, {_PORT}", ":PORT"),
        (b"-ERR \x1b[2J\r\n", f"answers '-ERR ?[2J', {_PORT}", ":PORT"),
        (None, "another program", "pip install --upgrade"),
        (messages.frame(messages.Refused(1, other_build(b"ODATDIST\0\1\0\0"))), "wire", "pip install --upgrade"),
        (b"", "no answer", "ps -o stat"),
    ],
)
def test_port_of_something_else(answer: bytes | None, value: str, mend: str) -> None:
    """Or of another wire major, which hangs up (None) or says so."""
    with listener(lambda sock: sock.close() if answer is None else sock.sendall(answer)) as port:
        _fails(port, finding="peer_link", value=value, mend=mend)


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("scheme", ["HTTP", "TLS"])
def test_port_of_a_web_server_that_waits_for_a_request(scheme: str, secret: bool, tmp_path: Path) -> None:
    """A link waits in vain for plain HTTP; to a server of TLS it looks like one that rejects the secret."""
    context, own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Authority(tmp_path).issue("web", ["*"])
    context.load_cert_chain(own["llm.TlsCert"], own["llm.TlsKey"])

    class Web(BaseHTTPRequestHandler):
        def setup(self) -> None:
            if scheme == "TLS":
                self.request = context.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
            super().setup()

        def handle(self) -> None:
            with self.request, suppress(OSError):  # to TLS, one link and two questions are no handshake
                super().handle()

    given = ("--secrets", secret_file(tmp_path / "s", a=b"a" * 32)["llm.AuthSecretFile"]) if secret else ()
    with _listening(Web, port := free_port()):
        _fails(port, *given, finding="peer_link", value=f"127.0.0.1:{port} speaks {scheme}, {_PORT}", mend=":PORT")


def test_peer_without_a_common_version_of_the_protocol() -> None:
    code = "from llm_datadist._links import handshake, versions\nhandshake.VERSIONS = versions.VERSIONS = (98, 99)"
    both = f"98 to 99 at cluster .*, {VERSIONS[0]} to {VERSIONS[1]} at cluster {CLUSTER}"
    with _served() as port:
        found = _fails(port, finding="peer_link", value="98 to 99", mend="pip install --upgrade", preparation=code)
    assert re.search(both, found["peer_link"].value)


def test_clock_that_differs() -> None:
    def ahead(sock: socket.socket) -> None:
        while sock.recv(1):
            sock.sendall(CLOCK.pack(time.time_ns() + 3600 * 10**9))

    with listener(ahead) as port:
        finding = peer.clock("127.0.0.1", port - 1, deadline(60_000))
    is_(finding, Severity.WARNING, "+3600", "chronyc makestep")


class _Dribble(socketserver.BaseRequestHandler):
    """Answers with a byte now and then, none of which comes late: 50 clocks take 20 s, a stream longer than a day."""

    def handle(self) -> None:
        with suppress(OSError):
            self.request.recv(1)
            while True:
                self.request.sendall(b"\0")
                time.sleep(0.05)


def test_all_questions_to_a_peer_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_TOTAL_MS", 500)  # two minutes
    here = _two_ports()
    with _listening(_Dribble, here), _listening(_Dribble, here + 1):
        found = _examined(here)
        link = LinkStatistics(CLUSTER, "ready", "tcp", None, "", 1, "here", 0, 0, 0)
        found["stream"] = peer.bandwidth(link, 1.0, "127.0.0.1", here, deadline(500))
    is_(
        found["peer_clock"], Severity.UNKNOWN, "not all is answered within the 0.5 s of doctor --peer", "doctor --serve"
    )
    assert "peer_link" not in found
    is_(found["stream"], Severity.UNKNOWN, "not all is answered within the 0.5 s of doctor --peer", "doctor --serve")
    monkeypatch.setattr(peer, "_TOTAL_MS", 15_000)
    with _served() as port:
        found = _examined(port)
    is_(found["peer_link"], Severity.OK, "", "")
    is_(found["peer_pull"], Severity.PROBLEM, "within the 15 s of doctor --peer", "ss -ti dst")  # a pull may take 20 s


def _examined(port: int) -> Found:
    return {each.name: each for each in peer.examine("127.0.0.1", port, {}, lambda _: None)}


def test_finding_of_pulls_that_took_for_ever() -> None:
    link = LinkStatistics(CLUSTER, "ready", "shm", "cma", "", 1, "here", 0, 0, 0)
    finding = peer.bandwidth(link, 0.0, "127.0.0.1", 1, deadline(60_000))
    is_(finding, Severity.WARNING, "", "llm.CopyThreads=4")


def test_port_that_is_taken_ends_serve_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(sys.executable, "-m", "llm_datadist", "doctor", "--serve", "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llm-datadist doctor: ")
    assert done.stderr.count("\n") == 1
