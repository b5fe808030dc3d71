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
import stat
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("vllm.datadist.weights")  # vLLM shows logs below its name

_THREADS: Final = 4
_CHUNK: Final = 4 << 20
_TOLD_S: Final = 5.0
#: A process looks so often, and so many times, whether another one has ended.
_TURN_S, _TURNS = 0.1, 3000
#: A change of that age cannot be followed by one with the same time.
_SETTLED_S: Final = 2.0
_DIGEST: Final = re.compile("[0-9a-f]{64}")

#: Device, inode, size, and the times of the last change of content and of any change.
Stamp = tuple[int, int, int, int, int]


def stamp_of(about: os.stat_result) -> Stamp:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def digests_of(files: Sequence[Path]) -> list[str]:
    """Return the digest of each file of a folder. Raises OSError as :func:`digest_of` does."""
    pool, read = ThreadPoolExecutor(_THREADS, "lldd-vllm-digest"), dict.fromkeys(files, 0)
    with _turn(files):
        try:
            running = [pool.submit(digest_of, file, read) for file in files]
            while (state := wait(running, _TOLD_S, FIRST_EXCEPTION)).not_done:
                for each in state.done:
                    each.result()  # or raise
                total = sum(file.stat().st_size for file in files)
                logger.info("weights: %.1f of %.1f GB are digested", sum(read.values()) / 1e9, total / 1e9)
            return [each.result() for each in running]
        finally:
            pool.shutdown(cancel_futures=True)


def digest_of(path: Path, read: dict[Path, int]) -> str:
    """Return a file's digest; ``read`` counts the bytes that are read for it.

    Raises OSError for a file that cannot be read, or changes each time it is.
    """
    if known := _known(path):
        return known
    buffer = memoryview(bytearray(_CHUNK))
    for _ in range(3):
        digest, read[path] = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            before = stamp_of(os.fstat(file.fileno()))
            while size := file.readinto(buffer):
                digest.update(buffer[:size])
                read[path] += size
            after = stamp_of(os.fstat(file.fileno()))
        if before == after:
            _keep(path, after, digest.hexdigest())
            return digest.hexdigest()
    raise OSError(f"{path}: changes while it is read")


def _known(path: Path) -> str | None:
    """Return the digest of a file without reading it, or None."""
    with suppress(OSError):  # no link
        blob = path.parent / path.readlink()
        about = blob.lstat()
        named = blob.parent.name == "blobs" and _DIGEST.fullmatch(blob.name) and stat.S_ISREG(about.st_mode)
        if named and about.st_mtime_ns <= path.lstat().st_mtime_ns:  # an edit in place makes it newer
            return blob.name
    with suppress(OSError, UnicodeDecodeError):
        stamp, _, digest = _place(path).read_text().rpartition(" ")
        if stamp == str(stamp_of(path.stat())) and _DIGEST.fullmatch(digest):
            return digest
    return None


def _place(path: Path) -> Path:
    """Return the file of the cache folder that belongs to a path. Raises OSError if there can be no such folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "open-datadist")
    if not folder.is_absolute():
        raise FileNotFoundError("the user has no home folder")
    folder.mkdir(0o700, parents=True, exist_ok=True)
    return folder / hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()


def _keep(path: Path, stamp: Stamp, digest: str) -> None:
    if time.time() - stamp[-1] / 1e9 > _SETTLED_S:
        try:
            new = _place(path).with_suffix(f".{threading.get_native_id()}")
            new.write_text(f"{stamp} {digest}")
            new.replace(new.with_suffix(""))
        except OSError as error:
            _warn(str(error))


@cache
def _warn(reason: str) -> None:
    logger.warning("each process digests its weights, at each start, because it cannot keep digests: %s", reason)


@contextmanager
def _turn(files: Sequence[Path]) -> Iterator[None]:
    """Wait while another process digests files of this folder; not for ever, because it may stand still."""
    with ExitStack() as at_end:
        try:
            lock = at_end.enter_context(_place(files[0].parent).with_suffix(".lock").open("w"))
            for turn in range(_TURNS):
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if all(map(_known, files)):
                    break
                if turn % 100 == 0:
                    logger.info("weights: another process digests those in %s, this one waits", files[0].parent)
                time.sleep(_TURN_S)
        except OSError as error:
            _warn(str(error))
        yield
