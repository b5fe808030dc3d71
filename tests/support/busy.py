"""A thread that is busy with pure Python."""

import threading


class Busy:
    """A thread ``busy`` that counts in pure Python until :meth:`end`."""

    def __init__(self) -> None:
        self._ended = False
        self._thread = threading.Thread(target=self._count, name="busy", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop and join the thread."""
        self._ended = True
        self._thread.join()

    def _count(self) -> None:
        count = 0
        while not self._ended:
            count += 1
