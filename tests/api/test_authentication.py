"""Credentials: secrets and certificates, what links, what each end says of a refusal, files that are wrong; those that
change while links are made, used and lost; and llm.PeerPolicy: what a peer may do, over every transport."""

import datetime
import errno
import json
import mmap
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from faults.strangers import Stranger, hello_of, rendezvous_of
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages as wire
from llm_datadist._links.credentials import Credentials, Secret, new_secret
from llm_datadist._memory.exports import Exports
from llm_datadist._native import readable
from llm_datadist._transport.samehost.rendezvous import MemoryOffer, Packet, Refusal, RendezvousHello, decode
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, CacheMismatch, LinkRefused, OutOfMemory, ParamError
from llm_datadist.integrations.references import ReferenceKeys
from llm_datadist.testing.peers import close_exports, new_exports
from llm_datadist.tools.cli import keys as cli_keys
from tests.doctor.hosts import needs
from tests.support import linking, moves
from tests.support.authority import DAY, NOW, Authority, secret_file
from tests.support.grants import LONG, claim, grant, tell
from tests.support.kinds import Bytes, ChildEnd, LocalEnd, Pair, World
from tests.support.layers import Always, outcome, raw, spanned
from tests.support.linking import SUCCESS, bytes_move_both_ways, explain, info, link, linked, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, refused, same_bytes, show, wait_until
from tests.support.pairs import pair_of
from tests.support.source import ROOT, run
from tests.support.users import USER, become

FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET, OTHER = b"s" * 32, b"o" * 32
PEM = {"llm.TlsCert": "any.pem", "llm.TlsKey": "any.key", "llm.TlsCa": "ca.pem"}


def dial(world: World, port: int) -> None:
    """Link as ``link_clusters`` does, which turns what is raised here into a status."""
    linking.links_of(world).link(None, ("127.0.0.1", port), Deadline(10_000))


def start(pair: Pair, there: dict[str, str], here: dict[str, str], **settings: Any) -> None:
    """Start both ends, not linked, with these options."""
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra | there, **settings)
    pair.decoder.start("DECODER", 2, listen_ip_info="127.0.0.1:0", extra=extra | here, **settings)


def relink(pair: Pair) -> None:
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    pair.link()


@pytest.mark.parametrize("here", ["plain", "secret", "certificate"])
@pytest.mark.parametrize("there", ["plain", "secret", "certificate"])
def test_two_ends_link_only_if_they_authenticate_alike(pair: Pair, tmp_path: Path, there: str, here: str) -> None:
    """An end believes every secret of its file and shows the first; a certificate may name several clusters or all."""
    authority = Authority(tmp_path)
    old, new = secret_file(tmp_path / "a", old=SECRET, new=OTHER), secret_file(tmp_path / "b", n=OTHER, o=SECRET)
    ways: dict[str, list[dict[str, str]]] = {
        "plain": [{}, {}],
        "secret": [old, new],
        "certificate": [authority.issue("prompt", [7, 1]), authority.issue("decoder", ["*"])],
    }
    start(pair, ways[there][0], ways[here][1])
    if there == here:
        pair.link()
        bytes_move_both_ways(pair.prompt, pair.decoder)
    else:
        not_admitted(pair)


def not_admitted(pair: Pair) -> str:
    """The decoder is refused, and nothing changes at either end; return what it is told."""
    ends = (pair.prompt, pair.decoder)
    before = [end.do(picture) for end in ends]
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (FAILED, [FAILED])
    with pytest.raises(AuthFailed) as caught:
        pair.decoder.do(dial, pair.prompt.port)
    assert caught.value.status_code is FAILED
    assert [end.do(picture) for end in ends] == before
    assert [end.do(links) for end in ends] == [{}, {}]
    return str(caught.value)


@pytest.mark.parametrize("refuses", ["dialler", "listener"])
@pytest.mark.parametrize("way", ["secret", "certificate"])
def test_credentials_that_differ_are_named_at_both_ends(
    local_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str, refuses: str
) -> None:
    if way == "secret":
        there, here = secret_file(tmp_path / "a", a=SECRET), secret_file(tmp_path / "b", b=OTHER)
        if refuses == "listener":  # the one that dials believes both
            here = secret_file(tmp_path / "b", b=OTHER, a=SECRET)
        words = [f"shows {name}, digest {Secret(name, value).digest}" for name, value in (("a", SECRET), ("b", OTHER))]
    else:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            cli_keys.new(folder, ca=True)
        there, here = ({option: str(folder / name) for option, name in PEM.items()} for folder in folders)
        if refuses == "listener":
            (folders[1] / "ca.pem").write_text("".join((folder / "ca.pem").read_text() for folder in folders))
        words = ["the CAs of the two sides differ"] * 2
    start(local_pair, there, here)
    caplog.clear()
    with pytest.raises(AuthFailed) as caught:
        local_pair.decoder.do(dial, local_pair.prompt.port)
    said = f"link to 127.0.0.1:{local_pair.prompt.port}: not authenticated: the "
    assert str(caught.value).startswith(said), caught.value
    wait_until(lambda: len(caplog.messages) == 1)
    assert "is not admitted: AuthFailed: the " in caplog.messages[0]
    for text, word, files in zip((caplog.messages[0], str(caught.value)), words, (there, here), strict=True):
        assert word in text
        assert all(f"{option}={path}" in text for option, path in files.items() if option != "llm.TlsKey"), text
        assert not re.search("c3Nz|b29v", text), "of the secrets only digests"


#: What is wrong with the certificate of one side: the clusters that it names, when it ends, or who made it.
CERTIFICATES: dict[str, list[Any]] = {"none": [], "another": [3], "alike": ["2x", "22", ""]}
CERTIFICATES |= {"expired": ["*"], "foreign": ["*"]}


@pytest.mark.parametrize("side", ["prompt", "decoder"])
@pytest.mark.parametrize("fault", CERTIFICATES)
def test_a_certificate_is_good_for_its_clusters_and_time(shm_pair: Pair, tmp_path: Path, side: str, fault: str) -> None:
    authority = Authority(tmp_path)
    good = {"prompt": authority.issue("prompt", [1]), "decoder": authority.issue("decoder", [2])}
    maker = Authority(tmp_path, "other") if fault == "foreign" else authority
    bad = maker.issue("bad", CERTIFICATES[fault], expires=NOW - DAY if fault == "expired" else NOW + DAY)
    good[side] = bad | {"llm.TlsCa": str(authority.path)}
    start(shm_pair, good["prompt"], good["decoder"])
    not_admitted(shm_pair)


def test_a_plain_stranger_is_told_one_sentence(shm_pair: Pair, tmp_path: Path) -> None:
    secrets = secret_file(tmp_path / "a", a=SECRET)
    start(shm_pair, secrets, secrets)
    with Stranger(shm_pair.prompt.port) as stranger:
        stranger.say(wire.CONTROL_PREAMBLE)
        told = stranger.hear(wire.Refused)
        assert (told.code, told.text) == (FAILED, "this listener asks for authentication")
        assert stranger.is_hung_up_on()
    with Stranger(shm_pair.prompt.port) as stranger:  # a Hello in plain text behind the sealed preamble
        stranger.say(wire.TLS_PREAMBLE, stranger.hello())
        assert stranger.is_hung_up_on()
    shm_pair.link()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"llm.AuthSecretFile": "{folder}/missing"}, "cannot be read: No such file"),
        ({"llm.AuthSecretFile": "{folder}/pipe"}, "no regular file"),  # and nobody writes into it
        ({"llm.AuthSecretFile": "{folder}/open"}, "mode 0644: group and others must have no access"),
        ({"llm.AuthSecretFile": "{folder}/empty"}, "holds no secret"),
        ({"llm.AuthSecretFile": "{folder}/short"}, "has 31 bytes, 32 at least"),
        ({"llm.AuthSecretFile": "{folder}/words"}, "line 1 of .* is not of the form"),
        ({"llm.AuthSecretFile": ""}, "names no file"),
        ({"llm.TlsCert": "{folder}/a.crt"}, "llm.TlsKey, llm.TlsCa is missing"),
        ({"llm.AuthSecretFile": "{folder}/good", "llm.TlsCa": "x"}, "one way, choose one"),
        ({"llm.TlsCert": "{folder}/x", "llm.TlsKey": "{folder}/good", "llm.TlsCa": "x"}, "cannot be used: No such"),
        ({"llm.TlsCert": "{folder}/good", "llm.TlsKey": "{folder}/good", "llm.TlsCa": "{folder}/good"}, "cannot be us"),
        ({"llm.TlsCert": "{folder}/good", "llm.TlsKey": "{folder}/open", "llm.TlsCa": "{folder}/good"}, "mode 0644"),
    ],
)
def test_bad_files_are_named_at_init(end: LocalEnd, tmp_path: Path, options: dict[str, str], rule: str) -> None:
    secret_file(tmp_path / "good", a=SECRET)
    os.mkfifo(tmp_path / "pipe", 0o600)
    secret_file(tmp_path / "open", a=SECRET)
    (tmp_path / "open").chmod(0o644)
    secret_file(tmp_path / "empty")
    secret_file(tmp_path / "short", a=SECRET[:31])
    secret_file(tmp_path / "words", **{"a b": SECRET})
    extra = {key: value.format(folder=tmp_path) for key, value in options.items()}
    with pytest.raises(ParamError, match=rule) as caught:
        end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    assert "ssss" not in str(caught.value)
    assert any(option in str(caught.value) for option in options)


_LOADED = """
import os, sys
from pathlib import Path
from llm_datadist._links.credentials import Credentials
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import LLMException
opened = []
sys.addaudithook(lambda event, arguments: opened.append(arguments) if event == "open" else None)
try:
    Credentials(CredentialFiles(secrets=Path(sys.argv[1])))
    print([path for path, _, flags in opened if isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR)])
except LLMException as error:
    print(error)
"""


@pytest.mark.parametrize("proc", [True, False], ids=["with-proc", "without-proc"])
def test_the_derived_key_reaches_no_file_system(tmp_path: Path, proc: bool) -> None:
    secret_file(tmp_path / "secrets", a=SECRET)
    command = [sys.executable, "-Bc", _LOADED, str(tmp_path / "secrets")]
    if not proc:
        command = [*needs("unshare", "-Urm"), "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh", *command]
    done = run(*command)
    said = "[]\n" if proc else "llm.AuthSecretFile: a certificate needs memfd_create and /proc: "
    assert done.stdout.startswith(said), done.stderr


#: One thread makes certificates when the process exits, another one wants to later.
_EXITS = """
import atexit, sys, threading, time
from cryptography import x509

def number():
    issuing.set()
    time.sleep(0.3)
    print("issued", flush=True)
    return 7

def init(begin):
    begin.wait()
    World("w").start("DECODER", 1, make_config(extra={"llm.AuthSecretFile": sys.argv[1]}))

x509.random_serial_number = number
issuing, late, now = threading.Event(), threading.Event(), threading.Event()
now.set()
atexit.register(time.sleep, 0.2)
atexit.register(late.set)  # runs after what the library registers
from tests.support.world import World, make_config
for begin in (now, late):
    threading.Thread(target=init, args=(begin,), daemon=True).start()
issuing.wait()
"""


def test_the_exit_waits_for_certificates_of_daemon_threads_and_begins_none(tmp_path: Path) -> None:
    """Rust code makes them: a thread that the exit ends there aborts the process."""
    options = secret_file(tmp_path / "secrets", one=SECRET)
    ended = run(sys.executable, "-c", _EXITS, options["llm.AuthSecretFile"], cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "issued\n" * 2, "")


def test_a_derived_key_without_a_descriptor_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret_file(tmp_path / "secrets", a=SECRET)
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(OutOfMemory, match=r"llm\.AuthSecretFile: .*Too many open files"):
        Credentials(CredentialFiles(secrets=tmp_path / "secrets"))


ROTATIONS = 10


class Rotated:
    """The files of secrets of both ends, as an operator changes them."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "prompt", folder / "decoder"]
        self._now = new_secret(folder / "first", "0").read_text()
        for number in range(2):
            self.write(number, [self._now])

    def steps(self, number: int) -> list[tuple[int, list[str]]]:
        """Return what is written into which file: a new secret, then that one first, then it alone."""
        old = self._now
        self._now = new = new_secret(self.files[0].with_name(f"new{number}"), str(number)).read_text()
        return [(end, lines) for lines in ([old, new], [new, old], [new]) for end in range(2)]

    def write(self, number: int, lines: list[str]) -> None:
        replacement = self.files[number].with_suffix(".new")
        replacement.touch(mode=0o600)
        replacement.write_text("".join(lines))
        os.replace(replacement, self.files[number])


def test_a_bad_file_changes_nothing_until_it_is_good_and_ten_rotations_cost_no_pull(pair: Pair, tmp_path: Path) -> None:
    rotated = Rotated(tmp_path)
    start(pair, *({"llm.AuthSecretFile": str(file)} for file in rotated.files))
    pair.link()
    for bad in ("", "words that are no secret\n", 2 * rotated.files[0].read_text()):
        for file in rotated.files:
            file.write_text(bad)
        relink(pair)
    for file in rotated.files:
        file.unlink()
    relink(pair)
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    before = pair.decoder.do(make, "into", Spec(blocks=True), 2)
    for number in range(1, ROTATIONS + 1):
        for step in rotated.steps(number):
            rotated.write(*step)
            pair.decoder.do(call, "pull_blocks", BLOCKS, Use("into"), [0], [1])
            same_bytes(pair.decoder.do(show, "into"), moved(before, source, [(1, 0)]))
            relink(pair)
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_a_bad_file_is_logged_at_most_once_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = new_secret(tmp_path / "secrets", "0")
    credentials, references = Credentials(CredentialFiles(secrets=file)), ReferenceKeys(file)
    caplog.set_level("WARNING", "LLM_DATADIST")
    began = time.monotonic()
    for number in range(200):
        file.write_text("junk" * (1 + number % 2))
        credentials.session(server_side=False)
        references.sign(b"")
    most = 1 + int(time.monotonic() - began)
    for name in ("credentials", "secrets of references"):
        said = [each.getMessage() for each in caplog.records if f"the {name} cannot be loaded" in each.getMessage()]
        assert 1 <= len(said) <= most
        assert f"line 1 of {file} is not of the form" in said[0]


AGED = {"llm.MaxLinkAge": "1", "llm.PeerTimeout": "3"}


def wait_for_renewal(world: World) -> None:
    """Return once the peer has been authenticated again."""
    before = linking.statistics(world).links[0].authenticated_at
    wait_until(lambda: linking.statistics(world).links[0].authenticated_at > before)


def pull_until(world: World, stop: Path) -> int:
    """Pull again and again until this file is there; return how often."""
    pulls = 0
    while not stop.exists():
        call(world, "pull_blocks", BLOCKS, Use("into"), [0], [1])
        pulls += 1
    return pulls


@pytest.mark.parametrize(
    ("pair", "rotations"), [("inproc", 0), ("shm", 0), ("tcp", 0), ("tcp", ROTATIONS)], indirect=["pair"]
)
def test_a_link_is_authenticated_again_while_it_is_used(pair: Pair, tmp_path: Path, rotations: int) -> None:
    """No pull fails meanwhile, and the link is the same one."""
    rotated = Rotated(tmp_path)
    prompt, decoder = ({"llm.AuthSecretFile": str(file)} for file in rotated.files)
    start(pair, prompt | (AGED if rotations else {}), decoder | AGED)
    pair.link()
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    before = pair.decoder.do(make, "into", Spec(blocks=True), 2)
    number = pair.decoder.do(linking.link_number, 1)
    pair.decoder.do(linking.begin_there, "pulls", pull_until, stop := tmp_path / "stop")
    for rotation in range(1, rotations + 1):
        for step in rotated.steps(rotation):
            rotated.write(*step)
            time.sleep(0.1)
        pair.prompt.do(wait_for_renewal)
    pair.prompt.do(wait_for_renewal)
    pair.decoder.do(wait_for_renewal)
    stop.touch()
    pulls = pair.decoder.do(linking.result_there, "pulls")
    assert isinstance(pulls, int), pulls
    assert pulls > 0
    assert pair.decoder.do(linking.link_number, 1) == number
    same_bytes(pair.decoder.do(show, "into"), moved(before, source, [(1, 0)]))


def test_a_peer_whose_secret_was_taken_back_is_unlinked_until_it_has_a_new_one(pair: Pair, tmp_path: Path) -> None:
    files = [tmp_path / "prompt", tmp_path / "decoder"]
    prompt, decoder = (secret_file(file, a=SECRET) for file in files)
    start(pair, prompt | AGED, decoder)
    pair.link()
    secret_file(files[0], b=OTHER)
    linking.alone(pair.prompt, pair.decoder)
    linking.not_linked(pair.decoder, 1, "the link was lost", "is being dialled again")
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (FAILED, [FAILED])
    secret_file(files[1], b=OTHER)
    wait_until(lambda: linked(pair.prompt, pair.decoder), 30)
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_a_certificate_that_expires_ends_its_links(shm_pair: Pair, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    now = datetime.datetime.now(datetime.UTC)
    decoder = authority.issue("decoder", [2], expires=now + datetime.timedelta(seconds=5))
    start(shm_pair, authority.issue("prompt", [1]) | AGED, decoder)
    shm_pair.link()
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    linking.alone(shm_pair.prompt, shm_pair.decoder)
    assert datetime.datetime.now(datetime.UTC) > now + datetime.timedelta(seconds=4)
    decoder = authority.issue("decoder", [2], expires=NOW + datetime.timedelta(days=1))  # in place: it is read again
    wait_until(lambda: linked(shm_pair.prompt, shm_pair.decoder), 30)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize(
    ("prompt", "decoder", "folder", "transport"),
    [
        (str(USER), "root", False, "shm"),
        (f"7, {USER}", "0", True, "shm"),
        (None, "0", False, "tcp"),
        (str(USER), None, True, "tcp"),
        ("7", "0", False, "tcp"),
    ],
)
def test_memory_is_mapped_where_both_ends_admit_each_others_user(
    four: list[ChildEnd], socket_folder: Path, prompt: str | None, decoder: str | None, folder: bool, transport: str
) -> None:
    socket_folder.chmod(0o1777)
    owner, reader = four[:2]
    reader.do(become, USER)
    place = {"llm.ShmSocketDir": str(socket_folder)} if folder else {}
    for end, (role, number), users in ((owner, ("PROMPT", 1), prompt), (reader, ("DECODER", 2), decoder)):
        admitted = {} if users is None else {"llm.SameHostUsers": users}
        end.start(role, number, listen_ip_info="127.0.0.1:0", extra=place | admitted)
    assert reader.do(link, [info(1, owner.port)]) == SUCCESS
    said = reader.do(linking.explain, 1)
    assert said.transport == transport
    assert ("llm.SameHostUsers of both may admit" in said.reason) is (transport == "tcp"), said.reason
    bytes_move_both_ways(owner, reader)
    reader.stop()
    owner.stop()


ONLY = {"llm.SameUserOnly": "1", "llm.Insecure": "0"}
OTHERS_REFUSED = ["the peer runs as uid", "llm.SameHostUsers", "llm.AuthSecretFile", "--secrets", "llm.Insecure=1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
@pytest.mark.parametrize("by", ["listener", "dialer"])
def test_same_user_only_links_no_process_of_another_user(four: list[ChildEnd], by: str, transport: str) -> None:
    """Whichever side has the option; the dialer's error names what would admit the other, and nothing is linked."""
    owner, reader = four[:2]
    reader.do(become, USER)
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=ONLY if by == "listener" else {})
    reader.start("DECODER", 2, extra={"llm.Transport": transport} | (ONLY if by == "dialer" else {}))
    with pytest.raises(AuthFailed) as caught:
        reader.do(dial, owner.port)
    assert all(each in str(caught.value) for each in OTHERS_REFUSED), caught.value
    assert [end.do(links) for end in (owner, reader)] == [{}, {}]
    reader.stop()
    owner.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("admitted", ["same user", "llm.SameHostUsers", "llm.Insecure", "llm.AuthSecretFile"])
def test_same_user_only_links_its_own_and_admitted_users_and_yields_to_credentials(
    four: list[ChildEnd], socket_folder: Path, admitted: str
) -> None:
    owner, reader = four[:2]
    given = {"llm.SameHostUsers": {admitted: str(USER)}, "llm.Insecure": {admitted: "1"}}.get(
        admitted, dict[str, str]()
    )
    theirs: dict[str, str] = {}
    if admitted == "llm.AuthSecretFile":
        socket_folder.chmod(0o711)
        given, theirs = (secret_file(socket_folder / name, a=SECRET) for name in "ab")
        os.chown(theirs[admitted], USER, USER)
    if admitted != "same user":
        reader.do(become, USER)
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=ONLY | given)
    reader.start("DECODER", 2, extra=theirs)
    assert reader.do(link, [info(1, owner.port)]) == SUCCESS
    reader.stop()
    owner.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_same_user_only_refuses_another_user_that_dials_from_another_address_of_this_host(
    four: list[ChildEnd],
) -> None:
    owner, other = four[:2]
    other.do(become, USER)
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=ONLY)
    for source in ("127.0.0.9", own_address()):
        assert "the peer runs as uid" in other.do(refusal_from, source, owner.port)
    assert owner.do(links) == {}
    owner.stop()


def own_address() -> str:
    """Return an address of this host for other hosts, or a loopback one without any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.10"
        return str(probe.getsockname()[0])


def refusal_from(world: World, source: str, port: int) -> str:
    """Dial from a source address; return the text of the refusal."""
    hello = hello_of(70, bytes(range(16)), bytes(16))
    with socket.socket() as sock:
        sock.settimeout(60)
        sock.bind((source, 0))
        sock.connect(("127.0.0.1", port))
        sock.sendall(wire.CONTROL_PREAMBLE + wire.frame(hello))
        (size,) = wire.FRAME_HEADER.unpack(sock.recv(4, socket.MSG_WAITALL))
        told = wire.decode(sock.recv(size, socket.MSG_WAITALL))
    assert isinstance(told, wire.Refused)
    return told.text


ALL: dict[str, Any] = dict.fromkeys(("link", *("pull", "push", "locate", "consume")), True)
#: What moves the bytes of the caches -> llm.Transport.
ROUTES = {"inproc": "inproc", "tcp": "tcp", "shm": "auto", "cma": "auto"}
SOURCE_BLOCKS, TARGET_BLOCKS = [1, 6], [0, 3]
PAIRS = list(zip(TARGET_BLOCKS, SOURCE_BLOCKS, strict=True))


def rules(*verbs: str, **more: Any) -> dict[str, Any]:
    """Return what lets a peer link and do this."""
    return dict.fromkeys(("link", *verbs), True) | more


def with_policy(pair: Pair, folder: Path, policy: dict[str, Any], *, by: str = "prompt", rca: bool = False) -> None:
    """Start both ends with a shared secret, not linked; one of them has the policy."""
    secrets = secret_file(folder / "secrets", a=SECRET)
    theirs = secrets | {"llm.PeerPolicy": json.dumps(policy)}
    prompt, decoder = (theirs, secrets) if by == "prompt" else (secrets, theirs)
    start(pair, prompt, decoder, **({"enable_remote_cache_accessible": True} if rca else {}))


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, str]]:
    """Two ends, not started, and what is to move the bytes."""
    for pair in pair_of(request, "shm" if request.param == "cma" else request.param):
        pair.transport = ROUTES[request.param]
        yield pair, request.param


def send_raw(world: World, config: Any) -> Any:
    """Push blocks to addresses; raise what the transfer failed with."""
    task = world.cm.transfer_cache_async(world.caches["kv"], Always(), [config], SOURCE_BLOCKS, TARGET_BLOCKS)
    outcome(task)
    for error in filter(None, task.errors):
        raise error


#: With remote cache access or without, what is denied. Each verb at every server: tests/unit/test_access_matrix.py.
DENIED = [(True, ""), (True, "pull"), (True, "push"), (True, "consume")]
DENIED += [(False, ""), (False, "push"), (False, "locate"), (False, "consume")]


@pytest.mark.parametrize(("rca", "denied"), DENIED, ids=[f"{'rca' if rca else 'alone'}-{no}" for rca, no in DENIED])
def test_a_peer_does_what_it_may(route: tuple[Pair, str], tmp_path: Path, rca: bool, denied: str) -> None:
    """What is denied changes nothing at either end, and the link goes on; the owner may do all of it at its peer.

    A pull consumes the key of a row without RCA, a push with it; of registered memory no key is consumed.
    """
    pair, used = route
    memory = "private" if used == "cma" else "pool"
    with_policy(pair, tmp_path, {"2": ALL | ({denied: False} if denied else {}), "*": ALL}, rca=rca)
    pair.link()
    prompt, decoder, keys = pair.prompt, pair.decoder, (CacheKey(1, req_id=7), CacheKey(1, req_id=8))
    there: dict[str, Bytes] = {
        "kv": prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory=memory), 1),
        "row": prompt.do(make, "row", Spec(rows=1, keys=keys[:1]), 2),
        "kept": prompt.do(make, "kept", Spec(rows=1, keys=keys[1:], memory="private"), 3),
    }
    here: dict[str, Bytes] = {
        "kv": decoder.do(make, "kv", Spec(blocks=True, memory=memory), 4),
        "own": decoder.do(make, "own", Spec(rows=1, memory=memory), 5),
    }
    rows = [CacheKeyByIdAndIndex(1, prompt.do(moves.cache_id, name), 0) for name in ("row", "kept")] if rca else keys
    verb, to, blocks = "push" if rca else "pull", raw(prompt, "kv", range(2)), (Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS)

    def tries(verbs: set[str], function: Any, *args: Any) -> bool:
        """Return True if the call, which takes these verbs, goes well, as it has to where none of them is denied."""
        if denied in verbs:
            text = f"llm.PeerPolicy of the owner does not allow cluster 2 to {denied}"
            refused((decoder, prompt), [*there, *here], CacheMismatch, [text], function, *args)
            return False
        decoder.do(function, *args)
        return True

    if tries({"pull"}, call, "pull_blocks", BLOCKS, *blocks):
        here["kv"] = moved(here["kv"], there["kv"], PAIRS)
    prompt.do(grant, [0], LONG, "kv", bytes(16))
    if tries({"pull"}, claim, bytes(16)):
        decoder.do(tell, "claimed", "release")
        wait_until(lambda: not prompt.do(tell, "grant", "active"))
    if not rca and tries({"push", "locate"}, send_raw, to):
        there["kv"] = spanned(there["kv"], here["kv"], [(dst * 48, src * 48, 48) for dst, src in PAIRS])
    if rca and tries({"push"}, call, "push_blocks", BLOCKS, *blocks):
        there["kv"] = moved(there["kv"], here["kv"], PAIRS)
    if not denied:
        told = prompt.do(explain, 2)
        assert (told.private_transport if memory == "private" else told.transport) == used
    for verbs, name, row in (({verb, "consume"}, "row", rows[0]), ({verb}, "kept", rows[1])):
        if tries(verbs, call, f"{verb}_cache", row, Use("own")):
            there[name], here["own"] = (here["own"],) * 2 if rca else (there[name],) * 2
    consumed = not {verb, "consume"} & {denied}
    wait_until(lambda: len([key for key in prompt.do(picture).keys if "7" in key.key]) == 1 - consumed)
    mine = BlocksCacheKey(2, 9)
    source: Bytes = decoder.do(make, "mine", Spec(blocks=True, blocks_key=mine, memory=memory), 6)
    prompt.do(call, "pull_blocks", mine, Use("kv"), [2], [5])
    there["kv"] = moved(there["kv"], source, [(5, 2)])
    for end, held in ((prompt, there), (decoder, here)):
        for name, expected in held.items():
            same_bytes(end.do(show, name), expected)


@pytest.mark.parametrize("by", ["prompt", "decoder"])
def test_clusters_that_are_not_named_or_may_not_link_are_not_linked(pair: Pair, tmp_path: Path, by: str) -> None:
    """Whichever end dials; nothing changes at either end, and the peer is told nothing of the policy."""
    peer = "2" if by == "prompt" else "1"
    policies: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"3": ALL}, False),
        ({peer: ALL | {"link": False}, "*": ALL}, False),
        ({peer: {"pull": True, "push": True}}, False),
        ({peer: {"link": True}}, True),
        ({"3": {}, "*": ALL}, True),
    ]
    for policy, may in policies:
        with_policy(pair, tmp_path, policy, by=by)
        if may:
            pair.link()
        else:
            text = not_admitted(pair)
            assert "asks for authentication" in text or by == "decoder"
            assert ("PeerPolicy" in text) is (by == "decoder")
        pair.decoder.stop()
        pair.prompt.stop()


@pytest.mark.parametrize("by", ["prompt", "decoder"])
@pytest.mark.parametrize(
    ("transport", "verbs", "reason"),
    [
        ("shm", rules("push"), "llm.PeerPolicy allows cluster {} to push only"),
        ("cma", rules("pull", models=[0]), "llm.PeerPolicy allows cluster {} some models only"),
        ("cma", rules(), "the peer lets this side into none of its memory"),
    ],
)
def test_a_transport_that_a_peer_may_not_use_is_not_replaced_by_another(
    shm_pair: Pair, tmp_path: Path, by: str, transport: str, verbs: dict[str, Any], reason: str
) -> None:
    shm_pair.transport = transport
    with_policy(shm_pair, tmp_path, {"*": verbs}, by=by)
    with pytest.raises(LinkRefused) as caught:
        shm_pair.decoder.do(dial, shm_pair.prompt.port)
    text = str(caught.value)
    assert reason.format(2 if by == "prompt" else 1) in text or (
        "chose different transports" in text and verbs == rules()
    )
    assert [end.do(links) for end in (shm_pair.prompt, shm_pair.decoder)] == [{}, {}]


@pytest.mark.parametrize("rca", [False, True], ids=["alone", "rca"])
def test_models_bound_what_a_peer_finds_in_any_way(route: tuple[Pair, str], tmp_path: Path, rca: bool) -> None:
    pair, memory = route[0], "private" if route[1] == "cma" else "pool"
    with_policy(pair, tmp_path, {"2": ALL | {"models": [0, 3]}}, rca=rca)
    pair.link()
    used = [end.do(explain, peer) for end, peer in ((pair.prompt, 2), (pair.decoder, 1))]
    assert {each.transport for each in used} == {"tcp" if pair.transport == "auto" else pair.transport}
    if pair.transport == "auto":
        assert all("llm.PeerPolicy allows cluster 2 some models only" in each.reason for each in used)
    names = ["shut", "no key", "row", "open", "kv", "mine"]
    shut, key, row = BlocksCacheKey(1, 5), BlocksCacheKey(1, 3), CacheKey(1, req_id=1, model_id=5)
    pair.prompt.do(make, "shut", Spec(blocks=True, blocks_key=shut, memory=memory), 1)
    pair.prompt.do(make, "no key", Spec(rows=2), 2)
    pair.prompt.do(make, "row", Spec(rows=1, keys=(row,), memory=memory), 3)
    there: Bytes = pair.prompt.do(make, "open", Spec(blocks=True, blocks_key=key, memory=memory), 4)
    here: Bytes = pair.decoder.do(make, "kv", Spec(blocks=True, memory=memory), 5)
    pair.decoder.do(make, "mine", Spec(rows=2), 6)
    pair.prompt.do(grant, [0], LONG, "shut", bytes(16))
    ids = {name: CacheKeyByIdAndIndex(1, pair.prompt.do(moves.cache_id, name), 0) for name in names[:3]}
    blocks, mine = (Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS), Use("mine")
    model, cache = "to use model 5", "which has no key of its models"
    attempts: list[tuple[str, Any, *tuple[Any, ...]]] = [
        (model, call, "pull_blocks", shut, *blocks),
        (cache, call, "pull_cache", ids["no key"], mine),
        (cache, call, "pull_cache", ids["row"], mine),
        (cache, claim, bytes(16)),
    ]
    if rca:
        attempts += [
            (model, call, "push_blocks", shut, *blocks),
            (cache, call, "push_blocks", ids["shut"], *blocks),
            (cache, call, "push_cache", ids["no key"], mine),
            # How many rows it has is not told either.
            (cache, call, "push_cache", CacheKeyByIdAndIndex(1, ids["no key"].cache_id, 7), mine),
        ]
    else:
        attempts.append((model, call, "pull_cache", row, mine))
        attempts.append(("in none of the 1 caches", send_raw, raw(pair.prompt, "shut", range(2))))
    for text, *args in attempts:
        refused((pair.decoder, pair.prompt), names, CacheMismatch, [text], *args)
    pair.decoder.do(call, "pull_blocks", key, *blocks)
    here = moved(here, there, PAIRS)
    if rca:
        pair.decoder.do(call, "push_blocks", key, Use("kv"), [2], [5])
        there = moved(there, here, [(5, 2)])
    else:
        pair.decoder.do(send_raw, raw(pair.prompt, "open", range(2)))
        there = spanned(there, here, [(dst * 48, src * 48, 48) for dst, src in PAIRS])
    same_bytes(pair.decoder.do(show, "kv"), here)
    same_bytes(pair.prompt.do(show, "open"), there)


def pools(world: World) -> list[int]:
    """Return the inodes of the memfds behind the pools."""
    segments: list[Any] = list(world.probe.engine.caches.exports.regions.values())
    return [os.fstat(segment.fd).st_ino for segment in segments]


def mapped(world: World, inodes: list[int]) -> list[str]:
    """Return the permissions under which this process has mapped these files."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    return sorted(line[1] for line in lines if int(line[4]) in inodes and "memfd" in line[5])


@pytest.mark.parametrize("by", ["prompt", "decoder"])
@pytest.mark.parametrize(
    ("verbs", "permissions", "transports"),
    [
        (rules("pull", "push"), ["rw-s", "rw-s"], ("shm", "cma")),
        (rules("pull"), ["r--s", "r--s"], ("shm", "cma")),
        (rules("locate", "consume"), [], ("shm", None)),
        (rules("push"), [], ("tcp", "tcp")),
        (rules("pull", "push", models=[0]), [], ("tcp", "tcp")),
    ],
    ids=["both", "pull", "neither", "push", "models"],
)
def test_a_peer_maps_of_our_pools_what_it_may_use(
    shm_pair: Pair, tmp_path: Path, verbs: dict[str, Any], permissions: list[str], transports: Any, by: str
) -> None:
    """Whichever end dials; the end with the policy goes on reading its peer."""
    shm_pair.transport = "auto"
    with_policy(shm_pair, tmp_path, {"*": verbs}, by=by, rca=True)
    shm_pair.link()
    owner, peer = (shm_pair.prompt, shm_pair.decoder)[:: 1 if by == "prompt" else -1]
    assert peer.do(mapped, owner.do(pools)) == permissions
    assert owner.do(mapped, peer.do(pools)) == (["rw-s", "rw-s"] if transports[0] == "shm" else [])
    seen = peer.do(explain, owner.cluster_id)
    assert (seen.transport, seen.private_transport) == transports
    assert owner.do(explain, peer.cluster_id).transport == transports[0]
    key = BlocksCacheKey(peer.cluster_id, 0)
    source: Bytes = peer.do(make, "kv", Spec(blocks=True, blocks_key=key), 1)
    target: Bytes = owner.do(make, "kv", Spec(blocks=True), 2)
    owner.do(call, "pull_blocks", key, Use("kv"), SOURCE_BLOCKS, TARGET_BLOCKS)
    same_bytes(owner.do(show, "kv"), moved(target, source, PAIRS))


@contextmanager
def offered(name: str, hello: wire.Hello, exports: Exports) -> Iterator[Packet]:
    """Yield what the same-host listener answers to a stranger that says its token."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, MemoryOffer(exports, hello.token) as offer:
        sock.settimeout(20)
        sock.connect(name.replace("@", "\0", 1))
        while not readable(sock.fileno()):
            with suppress(PermissionError):  # until the listener has admitted this process
                offer.send(sock)
                break
        with Packet.receive(sock) as packet:
            yield packet


@pytest.fixture
def exports() -> Iterator[Exports]:
    """What a stranger offers."""
    made = new_exports(writable=False)
    yield made
    close_exports(made)


def test_a_stranger_gets_the_descriptors_that_it_may_use_and_no_others(end: LocalEnd, exports: Exports) -> None:
    """Strangers 66 to 69 link or not as the policy says; 70 is not named."""
    named: dict[int, dict[str, Any]] = {66: rules(), 67: rules("pull"), 68: rules("push")}
    named[69] = rules("pull", "push", models=[1])
    extra = {"llm.Insecure": "1", "llm.PeerPolicy": json.dumps({str(key): value for key, value in named.items()})}
    settings: dict[str, Any] = {"enable_remote_cache_accessible": True}
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **settings)
    inodes, name = set(end.do(pools)), ""
    for cluster_id, may in named.items():
        with Stranger(end.port, cluster_id) as stranger:
            hello = hello_of(cluster_id, exports.incarnation, exports.guards.cookie, remote_accessible=True)
            stranger.say(wire.CONTROL_PREAMBLE, hello)
            name = rendezvous_of(stranger.hear(wire.Welcome))
            with offered(name, hello, exports) as packet:
                answer = decode(packet.data)
                got = [fd for fd in packet.fds if os.fstat(fd).st_ino in inodes]
                assert len(got) == (2 if may == rules("pull") else 0)
                for fd in got:
                    mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
                    with pytest.raises(PermissionError):
                        mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                    with pytest.raises(OSError, match="Bad file descriptor") as caught:
                        os.pwrite(fd, b"x", 0)
                    assert caught.value.errno == errno.EBADF
                if cluster_id in (68, 69):
                    assert isinstance(answer, Refusal)
                    assert packet.fds == []
                else:
                    assert isinstance(answer, RendezvousHello)
                    assert (answer.cookie_address == 0) is (cluster_id == 66)
    with Stranger(end.port, 70) as stranger:
        hello = hello_of(70, exports.incarnation, exports.guards.cookie, remote_accessible=True)
        stranger.say(wire.CONTROL_PREAMBLE, hello)
        told = stranger.hear(wire.Refused)
        assert (told.code, told.text) == (FAILED, "this listener asks for authentication")
        assert stranger.is_hung_up_on()
        with offered(name, hello, exports) as packet:
            assert packet.fds == []
            assert isinstance(decode(packet.data), Refusal)
    assert end.do(links) == {}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            '{"7": {"read": true}}',
            "'7'.*unknown field `read`.*known are link, pull, .*, ask, tenant, models",
        ),
        ('{"7": {"ask": 1}}', r"'7'.*Expected `bool`, got `int` - at `\$.ask`"),
        ('{"7": {"tenant": ""}}', r"'7'.*Expected `str` of length >= 1 - at `\$.tenant`"),
        ('{"7": {"tenant": "' + 65 * "a" + '"}}', r"'7'.*Expected `str` of length <= 64 - at `\$.tenant`"),
        ('{"7": {"tenant": "a\\u001b"}}', r"'7': tenant: 'a\\x1b' has characters that cannot be printed"),
        ('{"7": {"pull": 1}}', r"'7'.*Expected `bool`, got `int` - at `\$.pull`"),
        ('{"7": {"pull": null}}', r"'7'.*Expected `bool`, got `null` - at `\$.pull`"),
        ('{"-1": {}}', "'-1' is not a cluster id"),
        ('{"07": {}}', "'07' is not a cluster id"),
        ('{"18446744073709551616": {}}', "'18446744073709551616' is not a cluster id.*at most 18446744073709551615"),
        ('{"7": {"models": 3}}', r"'7'.*Expected `array`, got `int` - at `\$.models`"),
        ('{"7": {"models": [true]}}', r"'7'.*Expected `int`, got `bool`"),
        ('{"7": {"models": [-1]}}', "'7'.*Expected `int` >= 0"),
        ('{"7": {"models": [18446744073709551616]}}', "'7': models: 18446744073709551616 is not a model id"),
        ('{"7": {"link": tru}}', "not a JSON object of cluster ids: .*JSON is malformed|Expecting value"),
        ('{"7": ' + "[" * 100_000, "not a JSON object of cluster ids|Expected `object`"),
        ("{folder}/latin", "latin': not a JSON object of cluster ids"),
        ('{"7": {}, "8": {}, "7": {"link": true}}', "'7' appears twice"),
        ('{"7": {"link": false, "link": true}}', "'link' appears twice"),
        ("", "neither JSON nor the path of a file"),
        ("{folder}/missing", "missing' cannot be read: No such file"),
        ("{folder}", "is not a regular file|cannot be read: Is a directory"),
        ("{folder}/list", "list': not a JSON object of cluster ids: Expected `object`, got `array`"),
        ("{folder}/verb", "verb': '7'.*unknown field `read`"),
        ("x\0y", "NUL and lone surrogates are not allowed"),
    ],
)
def test_errors_of_a_policy_are_named_at_init(end: LocalEnd, tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "list").write_text("[]")
    (tmp_path / "latin").write_bytes(b'{"7\xe9": {}}')
    (tmp_path / "verb").write_text('{"7": {"read": true}}')
    extra = secret_file(tmp_path / "secrets", a=SECRET) | {"llm.PeerPolicy": text.replace("{folder}", str(tmp_path))}
    with pytest.raises(ParamError, match=rule) as caught:
        end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    assert str(caught.value).startswith("llm.PeerPolicy")
    assert "\n" not in str(caught.value)


def test_a_policy_needs_peers_that_prove_who_they_are(
    end: LocalEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or ``llm.Insecure``, by which they are believed; a policy may be in a file."""
    monkeypatch.delenv("LLM_DATADIST_INSECURE", raising=False)
    path = tmp_path / "policy.json"
    path.write_text(' {"7": {"link": true}}')
    extra = {"llm.PeerPolicy": str(path)}
    needed = r"llm.PeerPolicy: without authentication .* llm.AuthSecretFile .*llm.Insecure"
    with pytest.raises(ParamError, match=needed):
        end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra | {"llm.Insecure": "1"})
    assert "llm.PeerPolicy without authentication: peers are believed" in caplog.text


def test_no_text_of_an_end_shows_a_secret(local_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_policy(local_pair, tmp_path, {"2": ALL})
    local_pair.link()
    secret = (tmp_path / "secrets").read_text().split()[1]
    for end in (local_pair.prompt, local_pair.decoder):
        texts = [*end.do(texts_of), caplog.text]
        assert [text for text in texts if secret in text or SECRET.decode() in text] == []
        assert any("statistics" in text.lower() for text in texts)


def texts_of(world: World) -> list[str]:
    """Return all that an end says of itself."""
    engine = world.probe.engine
    objects = [world.dd, world.dd.statistics(), engine, *world.probe.parts, engine.links.all()]
    return [form(each) for each in objects for form in (repr, str)]
