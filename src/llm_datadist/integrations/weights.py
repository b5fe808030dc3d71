"""SHA-256 of files of models and adapters: a blob of a hub has it as its name, another file's is computed, and kept.

It is kept in the user's cache folder, and counts while the file has the same device, inode, size and times. Four
threads compute, in one process of the host at a time: the others wait for what that one keeps. Threads: any.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Final

logger = logging.getLogger("vllm.datadist.weights")  # vLLM shows logs below its name

_TOLD_S: Final = 5.0
_TURN_S, _TURNS = 0.1, 36000  # how often, and how many times, to look whether another process has ended
_SETTLED_S: Final = 2.0  # a change of that age cannot be followed by one with the same time
_KEPT_BYTES: Final = 16 << 20  # smaller files are digested at once
_DIGEST: Final = re.compile("[0-9a-f]{64}")

_warn: Final = cache(partial(logger.warning, "each start digests the weights, because digests cannot be kept: %s"))

Stamp = tuple[int, int, int, int, int]  # device, inode, size, times of the last change of content and of any


def stamp_of(about: os.stat_result) -> Stamp:
    """Return what tells a changed file apart."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def digests_of(files: list[Path]) -> list[str]:
    """Return the digest of each file of a folder. Raises OSError as :func:`digest_of` does."""
    pool = ThreadPoolExecutor(4, "lldd-vllm-digest")
    with ExitStack() as at_end:
        at_end.callback(pool.shutdown, cancel_futures=True)
        if not all(map(_known, files)):
            _wait_for_others(files, at_end)
        running = [pool.submit(digest_of, file) for file in files]
        while (state := wait(running, _TOLD_S, FIRST_EXCEPTION)).not_done:
            done = [each.result() for each in state.done]  # or raise
            logger.info("weights: %d of %d files are digested", len(done), len(files))
        return [each.result() for each in running]


def digest_of(path: Path) -> str:
    """Return a file's digest. Raises OSError for one that cannot be read, or changes each time it is."""
    if known := _known(path):
        return known
    for _ in range(3):
        with path.open("rb", buffering=0) as file:
            before = stamp_of(os.fstat(file.fileno()))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = stamp_of(os.fstat(file.fileno()))
        if before == after:
            _keep(path, after, digest)
            return digest
    raise OSError(f"{path}: changes while it is read")


def _known(path: Path) -> str | None:
    """Return the digest of a file without reading it, or None."""
    with suppress(OSError):  # no link
        blob = path.parent / path.readlink()
        named = blob.parent.name == "blobs" and _DIGEST.fullmatch(blob.name) and not blob.is_symlink()
        if named and blob.stat().st_mtime_ns <= path.lstat().st_mtime_ns:  # an edit in place makes it newer
            return blob.name
    with suppress(OSError, UnicodeDecodeError):
        stamp, _, digest = _place(path).read_text().rpartition(" ")
        if stamp == str(stamp_of(path.stat())) and _DIGEST.fullmatch(digest):
            return digest
    return None


def _keep(path: Path, stamp: Stamp, digest: str) -> None:
    if stamp[2] >= _KEPT_BYTES and time.time() - stamp[-1] / 1e9 > _SETTLED_S:
        try:
            new = _place(path).with_suffix(f".{threading.get_native_id()}")
            new.write_text(f"{stamp} {digest}")
            new.replace(new.with_suffix(""))
        except OSError as error:
            _warn(str(error))


def _place(path: Path) -> Path:
    """Return the file of the cache folder that belongs to a path. Raises OSError if there can be no such folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "open-datadist")
    folder.mkdir(0o700, parents=True, exist_ok=True)
    return folder / hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()


def _wait_for_others(files: list[Path], at_end: ExitStack) -> None:
    """Wait while another process digests files of this folder; not for ever, because it may stand still."""
    try:
        lock = at_end.enter_context(_place(files[0].parent).with_suffix(".lock").open("w"))
        for turn in range(_TURNS):
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if all(map(_known, files)):
                return
            if turn % 100 == 0:
                logger.info("weights: another process digests those in %s, this one waits", files[0].parent)
            time.sleep(_TURN_S)
    except OSError as error:
        _warn(str(error))
