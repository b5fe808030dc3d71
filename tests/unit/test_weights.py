"""Digests of files of weights: where each comes from, when it counts no more, and who computes it."""

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llm_datadist.integrations import weights
from tests.support.moves import wait_until

SAID = "5a" * 32
#: Digests files as an engine does, and names those that it computes.
PROGRAM = """
import sys
from pathlib import Path
from llm_datadist.integrations import weights
weights._SETTLED_S, weights._KEPT_BYTES, keep = -1, 1, weights._keep
weights._keep = lambda path, *rest: (print(f"computed {path.name}\\n", end=""), keep(path, *rest))
print(*weights.digests_of([Path(each) for each in sys.argv[1:]]))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the user an empty cache folder; digests are kept at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_SETTLED_S", -1)
    monkeypatch.setattr(weights, "_KEPT_BYTES", 1)
    weights._warn.cache_clear()
    yield tmp_path / "cache" / "open-datadist"
    weights._warn.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "model"
    folder.mkdir()
    files = [folder / f"{number}.safetensors" for number in range(6)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 1000)
    return files


def true_digests(files: list[Path]) -> list[str]:
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]


def plant(file: Path) -> None:
    """Make the kept digest of a file another one, which shows where a digest comes from."""
    kept = weights._place(file)
    kept.write_text(f"{kept.read_text()[:-64]}{SAID}")


def is_read(file: Path) -> bool:
    """Return True if the digest of a file is computed from its bytes."""
    found = weights.digest_of(file)
    assert found in (SAID, *true_digests([file]))
    return found != SAID


@pytest.mark.parametrize("size", [0, 1, 1 << 18, (1 << 18) + 1, 700_000])
def test_a_digest_is_sha256_of_every_byte(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    assert weights.digest_of(file) == true_digests([file])[0]


# --- blobs of a hub ---------------------------------------------------------------------------------------------------
def linked(folder: Path, name: str = SAID, blobs: str = "blobs") -> Path:
    """Return a link as a hub makes it, to a blob of another digest than its name says."""
    for each in (blobs, "snapshots/commit"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    (folder / blobs / name).write_bytes(b"x")
    link = folder / "snapshots/commit/model.safetensors"
    link.symlink_to(f"../../{blobs}/{name}")
    return link


def test_the_name_of_a_hubs_blob_is_its_digest_and_it_is_not_read(tmp_path: Path) -> None:
    assert not is_read(linked(tmp_path))


def test_a_blob_that_is_newer_than_its_link_is_read(tmp_path: Path) -> None:
    link = linked(tmp_path)
    born = link.lstat().st_mtime_ns
    os.utime(link.resolve(), ns=(born, born))
    assert not is_read(link)
    os.utime(link.resolve(), ns=(born + 1, born + 1))
    assert is_read(link)


@pytest.mark.parametrize("changes", [{"name": "5a" * 20}, {"name": "5A" * 32}, {"blobs": "files"}])
def test_a_link_to_something_else_is_read(tmp_path: Path, changes: dict[str, str]) -> None:
    assert is_read(linked(tmp_path, **changes))


def test_a_blob_that_is_a_link_itself_is_read(tmp_path: Path) -> None:
    link = linked(tmp_path)
    blob = link.resolve()
    blob.rename(tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere", (1, 1))
    blob.symlink_to(tmp_path / "elsewhere")
    assert is_read(link)


# --- kept digests -----------------------------------------------------------------------------------------------------
def test_a_kept_digest_is_used_and_the_file_not_read(model: list[Path]) -> None:
    assert weights.digests_of(model) == true_digests(model)
    for file in model:
        plant(file)
    assert weights.digests_of(model) == [SAID] * len(model)
    assert not any(is_read(file) for file in model)


def test_a_file_that_is_changed_in_place_with_its_size_and_time_is_read_again(model: list[Path]) -> None:
    file = model[0]
    assert is_read(file)
    plant(file)
    about = file.stat()
    while file.stat().st_ctime_ns == about.st_ctime_ns:  # the clock of the file system may be slow
        with file.open("r+b") as opened:
            opened.write(b"y")
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (about.st_mtime_ns, about.st_size)
    assert is_read(file)


def test_another_file_at_the_same_path_is_read(model: list[Path]) -> None:
    assert is_read(model[0])
    plant(model[0])
    model[0].rename(model[0].with_name("old"))
    model[1].rename(model[0])
    assert is_read(model[0])


def test_a_digest_is_kept_only_when_no_further_change_can_have_the_same_time(
    model: list[Path], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(weights, "_SETTLED_S", 1e6)
    assert is_read(model[0])
    assert is_read(model[0])
    assert not cache.exists() or not list(cache.iterdir())


def test_digests_of_small_files_are_not_kept_because_every_adapter_would_leave_one(
    model: list[Path], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(weights, "_KEPT_BYTES", 1001)
    assert weights.digests_of(model) == true_digests(model)
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"(1, 2) " + SAID.encode()])
def test_a_kept_digest_that_is_damaged_does_not_count(model: list[Path], content: bytes) -> None:
    assert is_read(model[0])
    weights._place(model[0]).write_bytes(content)
    assert is_read(model[0])


def test_a_path_keeps_one_digest_however_often_its_file_changes(model: list[Path], cache: Path) -> None:
    for number in range(5):
        model[0].write_bytes(b"%d" % number)
        assert is_read(model[0])
    assert len(list(cache.iterdir())) == 1


def test_nothing_is_written_beside_the_weights(model: list[Path]) -> None:
    folder = model[0].parent
    before = sorted(folder.iterdir())
    folder.chmod(0o500)
    assert weights.digests_of(model) == true_digests(model)
    assert sorted(folder.iterdir()) == before


def test_without_a_cache_folder_each_digest_is_computed_and_one_warning_says_so(
    model: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert weights.digests_of(model) == true_digests(model)
    (warning,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "digests cannot be kept" in warning.getMessage()


def test_a_cache_folder_that_nobody_needs_is_no_reason_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert weights.digests_of([linked(tmp_path)]) == [SAID]
    assert not caplog.records


# --- computed digests -------------------------------------------------------------------------------------------------
def changes(monkeypatch: pytest.MonkeyPatch, file: Path, times: int) -> None:
    """Let a file grow, so many times, when its first bytes have been digested."""
    left = list(range(times))

    def stamp_of(about: os.stat_result) -> weights.Stamp:
        if left:
            left.pop()
            with file.open("ab") as opened:
                opened.write(b"more")
        return true_stamp_of(about)

    true_stamp_of = weights.stamp_of
    monkeypatch.setattr(weights, "stamp_of", stamp_of)


def test_a_file_that_changes_while_it_is_read_is_read_again(model: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    changes(monkeypatch, model[0], 1)
    found = weights.digest_of(model[0])
    assert found == true_digests(model[:1])[0]


def test_a_file_that_changes_each_time_it_is_read_is_refused(
    model: list[Path], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    changes(monkeypatch, model[0], 100)
    with pytest.raises(OSError, match=r"0\.safetensors: changes while it is read"):
        weights.digest_of(model[0])
    assert not list(cache.iterdir())


def test_a_file_that_cannot_be_read_is_an_error_of_all(model: list[Path]) -> None:
    model[3].unlink()
    model[3].symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        weights.digests_of(model)


def test_one_process_of_several_computes_a_file(model: list[Path]) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, model)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [each.communicate(timeout=100)[0].splitlines() for each in running]
    assert {lines[-1] for lines in said} == {" ".join(true_digests(model))}
    computed = [line for lines in said for line in lines[:-1]]
    assert sorted(computed) == sorted(f"computed {file.name}" for file in model)


def test_who_waits_goes_on_as_soon_as_all_digests_are_kept(model: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with weights._place(model[0].parent).with_suffix(".lock").open("w") as lock, ThreadPoolExecutor(1) as thread:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = thread.submit(weights.digests_of, model)
        wait_until(lambda: "another process digests those in" in caplog.text)
        for file in model:
            assert is_read(file)
            plant(file)
        assert waiting.result(10) == [SAID] * len(model)


def test_a_process_that_stands_still_does_not_hold_the_others_for_ever(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_TURNS", 3)
    with weights._place(model[0].parent).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert weights.digests_of(model) == true_digests(model)
