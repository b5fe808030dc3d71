"""Credentials: secrets and certificates, what links, what each end says of a refusal, files that are wrong; and those
that change while links are made, used and lost."""

from __future__ import annotations

import datetime
import errno
import os
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from faults.strangers import Stranger
from llm_datadist import LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages as wire
from llm_datadist._links.credentials import Credentials, Secret, new_secret
from llm_datadist.cli import keys as cli_keys
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, OutOfMemory, ParamError
from llm_datadist.integrations.references import ReferenceKeys
from tests.doctor.hosts import needs
from tests.support import linking
from tests.support.authority import DAY, NOW, Authority, secret_file
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, link_number, linked, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.users import USER, become

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.kinds import ChildEnd, LocalEnd, Pair, World


FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET, OTHER = b"s" * 32, b"o" * 32


def dial(world: World, cluster_id: int, port: int) -> None:
    """Link as ``link_clusters`` does, which turns what is raised here into a status."""
    linking.links_of(world).link(cluster_id, ("127.0.0.1", port), Deadline(10_000))


def start(pair: Pair, there: dict[str, str], here: dict[str, str]) -> None:
    """Start both ends, not linked, with these options."""
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra | there)
    pair.decoder.start("DECODER", 2, listen_ip_info="127.0.0.1:0", extra=extra | here)


@pytest.mark.parametrize("here", ["plain", "secret", "certificate"])
@pytest.mark.parametrize("there", ["plain", "secret", "certificate"])
def test_two_ends_link_only_if_they_authenticate_the_same_way(
    pair: Pair, tmp_path: Path, there: str, here: str
) -> None:
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


def not_admitted(pair: Pair) -> None:
    """The decoder is refused, and nothing changes at either end."""
    ends = (pair.prompt, pair.decoder)
    before = [end.do(picture) for end in ends]
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (FAILED, [FAILED])
    with pytest.raises(AuthFailed):
        pair.decoder.do(dial, 1, pair.prompt.port)
    assert [end.do(picture) for end in ends] == before
    assert [end.do(links) for end in ends] == [{}, {}]


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
            cli_keys._new_authority(folder, ["*"])
        there, here = (_pem(folder) for folder in folders)
        if refuses == "listener":
            (folders[1] / "ca.pem").write_text("".join((folder / "ca.pem").read_text() for folder in folders))
        words = ["the CAs of the two ends differ"] * 2
    start(local_pair, there, here)
    caplog.clear()
    with pytest.raises(AuthFailed) as caught:
        local_pair.decoder.do(dial, 1, local_pair.prompt.port)
    said = f"link to 127.0.0.1:{local_pair.prompt.port}: not authenticated: the "
    assert str(caught.value).startswith(said), caught.value
    wait_until(lambda: len(caplog.messages) == 1)
    assert "is not admitted: AuthFailed: the " in caplog.messages[0]
    for text, word, files in zip((caplog.messages[0], str(caught.value)), words, (there, here), strict=True):
        assert word in text
        assert all(f"{option}={path}" in text for option, path in files.items() if option != "llm.TlsKey"), text
        assert not re.search("c3Nz|b29v", text), "of the secrets only digests"


def _pem(folder: Path) -> dict[str, str]:
    files = {"llm.TlsCert": "any.pem", "llm.TlsKey": "any.key", "llm.TlsCa": "ca.pem"}
    return {option: str(folder / name) for option, name in files.items()}


#: What is wrong with the certificate of one side: the clusters that it names, when it ends, or who made it.
CERTIFICATES: dict[str, list[Any]] = {
    "none": [],
    "another": [3],
    "alike": ["2x", "22", ""],
    "expired": ["*"],
    "foreign": ["*"],
}


@pytest.mark.parametrize("side", ["prompt", "decoder"])
@pytest.mark.parametrize("fault", CERTIFICATES)
def test_a_certificate_is_good_for_the_clusters_it_names_in_its_time_by_its_ca(
    shm_pair: Pair, tmp_path: Path, side: str, fault: str
) -> None:
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
        stranger.say(wire.SEALED_PREAMBLE, stranger.hello())
        assert stranger.is_hung_up_on()
    shm_pair.link()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"llm.AuthSecretFile": "{folder}/missing"}, "cannot be read: No such file"),
        ({"llm.AuthSecretFile": "{folder}"}, "no regular file|Is a directory"),
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
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    said = "[]\n" if proc else "llm.AuthSecretFile: a certificate needs memfd_create and /proc: "
    assert done.stdout.startswith(said), done.stderr


def test_a_derived_key_without_a_descriptor_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    secret_file(tmp_path / "secrets", a=SECRET)
    monkeypatch.setattr(os, "memfd_create", exhausted)
    with pytest.raises(OutOfMemory, match=r"llm\.AuthSecretFile: .*Too many open files"):
        Credentials(CredentialFiles(secrets=tmp_path / "secrets"))


ROTATIONS = 10


class Rotated:
    """The files of secrets of both ends, as an operator changes them."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "prompt", folder / "decoder"]
        first = new_secret(folder / "first", "0").read_text()
        self._lines = [first]
        for number in range(len(self.files)):
            self._write(number, [first])

    def steps(self, number: int) -> list[tuple[int, list[str]]]:
        """Return what is written into which file: a new secret, then that one first, then it alone."""
        old = self._lines[-1]
        scratch = self.files[0].with_name(f"new{number}")
        new = new_secret(scratch, str(number)).read_text()
        self._lines.append(new)
        return [(end, lines) for lines in ([old, new], [new, old], [new]) for end in range(2)]

    def do(self, step: tuple[int, list[str]]) -> None:
        self._write(*step)

    def _write(self, number: int, lines: list[str]) -> None:
        replacement = self.files[number].with_suffix(".new")
        replacement.touch(mode=0o600)
        replacement.write_text("".join(lines))
        os.replace(replacement, self.files[number])


def test_ten_rotations_cost_no_pull_and_no_new_link(pair: Pair, tmp_path: Path) -> None:
    rotated = Rotated(tmp_path)
    start(pair, *({"llm.AuthSecretFile": str(file)} for file in rotated.files))
    pair.link()
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    before = pair.decoder.do(make, "into", Spec(blocks=True), 2)
    for number in range(1, ROTATIONS + 1):
        for step in rotated.steps(number):
            rotated.do(step)
            pair.decoder.do(call, "pull_blocks", BLOCKS, Use("into"), [0], [1])
            same_bytes(pair.decoder.do(show, "into"), moved(before, source, [(1, 0)]))
            assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
            assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_a_bad_file_changes_nothing_until_it_is_good_again(shm_pair: Pair, tmp_path: Path) -> None:
    file = new_secret(tmp_path / "secrets", "0")
    good = file.read_text()
    extra = {"llm.AuthSecretFile": str(file)}
    shm_pair.start(extra=extra)
    for bad in ("", "words that are no secret\n", good + good):
        file.write_text(bad)
        assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
        shm_pair.link()
    file.unlink()
    assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
    shm_pair.link()
    new_secret(file, "other")  # both ends read it: still the same at both
    assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
    shm_pair.link()


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
        said = [each.getMessage() for each in caplog.records if f"the {name} cannot be read again" in each.getMessage()]
        assert 1 <= len(said) <= most
        assert f"line 1 of {file} is not of the form" in said[0]


AGED = {"llm.MaxLinkAge": "1", "llm.PeerTimeout": "3"}


def authenticated(world: World) -> float:
    """Return when the peer was authenticated."""
    (there,) = world.dd.statistics().links
    assert there.authenticated_at is not None
    return there.authenticated_at


def wait_for_renewal(world: World) -> None:
    """Return once the peer has been authenticated again."""
    before = authenticated(world)
    wait_until(lambda: authenticated(world) > before)


def pull_until_told(world: World) -> int:
    """Pull again and again until told to stop; return how often."""
    world.memory["stop"], pulls = threading.Event(), 0
    while not world.memory["stop"].is_set():
        call(world, "pull_blocks", BLOCKS, Use("into"), [0], [1])
        pulls += 1
    return pulls


def tell_to_stop(world: World) -> None:
    world.memory["stop"].set()


def renewed_while_it_is_used(pair: Pair, until: Callable[[], None]) -> None:
    """Pull all the time, until that returns: no pull fails, and the link is the same one."""
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    before = pair.decoder.do(make, "into", Spec(blocks=True), 2)
    number = pair.decoder.do(link_number, 1)
    pair.decoder.do(linking.begin_there, "pulls", pull_until_told)
    until()
    pair.decoder.do(tell_to_stop)
    pulls = pair.decoder.do(linking.result_there, "pulls")
    assert isinstance(pulls, int), pulls
    assert pulls > 0
    assert pair.decoder.do(link_number, 1) == number
    same_bytes(pair.decoder.do(show, "into"), moved(before, source, [(1, 0)]))


def test_a_link_is_authenticated_again_while_it_is_used(pair: Pair, tmp_path: Path) -> None:
    secrets = secret_file(tmp_path / "secrets", a=SECRET)
    start(pair, secrets, secrets | AGED)
    pair.link()
    renewed_while_it_is_used(pair, lambda: pair.prompt.do(wait_for_renewal))
    pair.decoder.do(wait_for_renewal)


def test_ten_rotations_cost_no_pull_of_a_link_that_is_authenticated_again(tcp_pair: Pair, tmp_path: Path) -> None:
    rotated = Rotated(tmp_path)
    prompt, decoder = ({"llm.AuthSecretFile": str(file)} | AGED for file in rotated.files)
    start(tcp_pair, prompt, decoder)
    tcp_pair.link()

    def rotate() -> None:
        for number in range(1, ROTATIONS + 1):
            for step in rotated.steps(number):
                rotated.do(step)
                time.sleep(0.1)
            tcp_pair.prompt.do(wait_for_renewal)

    renewed_while_it_is_used(tcp_pair, rotate)


def test_a_peer_whose_secret_was_taken_back_is_unlinked_until_it_has_a_new_one(pair: Pair, tmp_path: Path) -> None:
    files = [tmp_path / "prompt", tmp_path / "decoder"]
    prompt, decoder = (secret_file(file, a=SECRET) for file in files)
    start(pair, prompt | AGED, decoder)
    pair.link()
    secret_file(files[0], b=OTHER)
    alone(pair.prompt, pair.decoder)
    linking.not_linked(pair.decoder, 1, "the link was lost", "is being dialled again")
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (failed, [failed])
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
    alone(shm_pair.prompt, shm_pair.decoder)
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
