"""Secrets and certificates that change while links are made, used and lost."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from llm_datadist._links.credentials import new_secret
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair

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
