"""Draw docs/pictures/top.svg: the screen of ``llm-datadist top`` while two processes move data.

python -m scripts.picture_top
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from pathlib import Path

from benchmarks.profile_pull import publish
from benchmarks.two_ends import two_ends
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist._statistics_page import instances
from llm_datadist.tools.cli.top_screen import Top

_PICTURE = Path(__file__).parent.parent / "docs/pictures/top.svg"
_SECONDS = 4.0
_NBYTES = 64 << 10


async def _draw(pids: set[int]) -> None:
    app = Top(lambda _: [each for each in instances() if each["pid"] in pids])
    async with app.run_test(size=(100, 20)) as pilot:
        await asyncio.sleep(_SECONDS)  # rates need two pages
        await pilot.press("e")
        await pilot.pause()
        _PICTURE.parent.mkdir(exist_ok=True)
        _PICTURE.write_text(app.export_screenshot(title="llm-datadist top"))


def main() -> int:
    """Draw while a thread pulls."""
    stop = threading.Event()
    with two_ends() as (target, here):
        target.do(publish, _NBYTES)
        cache = here.cm.allocate_blocks_cache(CacheDesc(1, [64, _NBYTES], DataType.DT_UINT8))

        def pull() -> None:
            while not stop.is_set():
                here.cm.pull_blocks(BlocksCacheKey(1, 0), cache, [3], [5])

        puller = threading.Thread(target=pull)
        puller.start()
        try:
            asyncio.run(_draw({target.pid, os.getpid()}))
        finally:
            stop.set()
            puller.join()
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("scripts.picture_top").main())
