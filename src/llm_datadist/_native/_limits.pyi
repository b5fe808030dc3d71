import numpy as np
from numpy.typing import NDArray

def streaming_bits() -> int:
    """Return the width in bits of ``limit_memcpy``'s streaming stores, 0 without any."""

def limit_memcpy(
    dst: NDArray[np.uint64], src: NDArray[np.uint64], block_bytes: int, threads: int, streaming: bool
) -> None: ...
def limit_process(
    pid: int, write: bool, near: NDArray[np.uint64], far: NDArray[np.uint64], block_bytes: int, threads: int
) -> None: ...
def limit_stream(
    fd: int, send: bool, addresses: NDArray[np.uint64], block_bytes: int, wait: int, key: bytes, first: int
) -> int: ...
def limit_cipher(records: int) -> None:
    """Encrypt so many records of 64 KiB by AES-256-GCM, in one thread."""

def cipher_library() -> tuple[str, str]:
    """Return the version and the path of the OpenSSL that encrypts lanes; ParamError if there is none."""
