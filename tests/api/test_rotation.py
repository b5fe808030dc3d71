"""Secrets and certificates that change while links are made, used and lost."""

from __future__ import annotations

import datetime
import os
import threading
import time
from typing import TYPE_CHECKING

from llm_datadist import LLMStatusCode
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist.config import CredentialFiles
from llm_datadist.integrations.references import ReferenceKeys
from tests.support.authority import NOW, Authority, secret_file
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    bytes_move_both_ways,
    info,
    link,
    link_number,
    linked,
    not_linked,
    result_there,
    unlink,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.support.pairs import Pair
    from tests.support.world import World

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
    extra = {"llm.Transport": pair.transport}
    ends = (pair.prompt, pair.decoder)
    for end, (role, number), file in zip(ends, (("PROMPT", 1), ("DECODER", 2)), rotated.files, strict=True):
        end.start(role, number, listen_ip_info="127.0.0.1:0", extra=extra | {"llm.AuthSecretFile": str(file)})
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
    bytes_move_both_ways(*ends)


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
    began = time.monotonic()
    new_secret(file, "other")  # both ends read it: still the same at both
    assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
    shm_pair.link()
    assert time.monotonic() - began < 60


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


SECRET, OTHER = b"s" * 32, b"o" * 32
AGED = {"llm.MaxLinkAge": "1", "llm.PeerTimeout": "3"}


def start(pair: Pair, prompt: dict[str, str], decoder: dict[str, str]) -> None:
    """Start both ends with these options, and link them."""
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra | prompt)
    pair.decoder.start("DECODER", 2, listen_ip_info="127.0.0.1:0", extra=extra | decoder)
    pair.link()


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
    pair.decoder.do(begin_there, "pulls", pull_until_told)
    until()
    pair.decoder.do(tell_to_stop)
    pulls = pair.decoder.do(result_there, "pulls")
    assert isinstance(pulls, int), pulls
    assert pulls > 0
    assert pair.decoder.do(link_number, 1) == number
    same_bytes(pair.decoder.do(show, "into"), moved(before, source, [(1, 0)]))


def test_a_link_is_authenticated_again_while_it_is_used(pair: Pair, tmp_path: Path) -> None:
    secrets = secret_file(tmp_path / "secrets", a=SECRET)
    start(pair, secrets, secrets | AGED)
    renewed_while_it_is_used(pair, lambda: pair.prompt.do(wait_for_renewal))
    pair.decoder.do(wait_for_renewal)


def test_ten_rotations_cost_no_pull_of_a_link_that_is_authenticated_again(tcp_pair: Pair, tmp_path: Path) -> None:
    rotated = Rotated(tmp_path)
    prompt, decoder = ({"llm.AuthSecretFile": str(file)} | AGED for file in rotated.files)
    start(tcp_pair, prompt, decoder)

    def rotate() -> None:
        for number in range(1, ROTATIONS + 1):
            for step in rotated.steps(number):
                rotated.do(step)
                time.sleep(0.1)
            tcp_pair.prompt.do(wait_for_renewal)

    renewed_while_it_is_used(tcp_pair, rotate)


def test_a_peer_whose_secret_was_taken_back_is_unlinked_and_comes_back_with_a_new_one(
    pair: Pair, tmp_path: Path
) -> None:
    files = [tmp_path / "prompt", tmp_path / "decoder"]
    prompt, decoder = (secret_file(file, a=SECRET) for file in files)
    start(pair, prompt | AGED, decoder)
    secret_file(files[0], b=OTHER)
    alone(pair.prompt, pair.decoder)
    not_linked(pair.decoder, 1, "the link was lost", "is being dialled again")
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
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    alone(shm_pair.prompt, shm_pair.decoder)
    assert datetime.datetime.now(datetime.UTC) > now + datetime.timedelta(seconds=4)
    decoder = authority.issue("decoder", [2], expires=NOW + datetime.timedelta(days=1))  # in place: it is read again
    wait_until(lambda: linked(shm_pair.prompt, shm_pair.decoder), 30)
