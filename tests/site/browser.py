"""A headless Chromium that looks at pages: what ``make test-site`` needs beside Sphinx.

``python -m tests.site.browser`` installs Debian's Chromium where there is none.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urldefrag

PROGRAMS: Final = {"chromium": "chromium", "chromedriver": "chromium-driver"}
#: Width and height of a desktop's window and of a phone's.
DESKTOP: Final = (1440, 900)
PHONE: Final = (390, 844)

#: What a page says about itself once it is loaded.
_LOOK: Final = """
const wide = document.documentElement.clientWidth, all = [...document.querySelectorAll("body *")];
const clipped = each => { for (let up = each.parentElement; up && up !== document.body; up = up.parentElement)
  if (getComputedStyle(up).overflowX !== "visible") return true; return false; };
const over = all.filter(each => each.getBoundingClientRect().right > wide + 1 && !clipped(each));
return {
  overflow: document.documentElement.scrollWidth - wide,
  over: over.slice(0, 3).map(each => each.tagName + "." + each.className + ": " + each.textContent.slice(0, 60)),
  pictures: [...document.images].filter(each => !each.naturalWidth).map(each => each.src),
  anchors: [...document.querySelectorAll("[id], a[name]")].map(each => each.id || each.name),
  links: [...document.querySelectorAll("a[href]")].map(each => each.href),
};
"""


class _Files(SimpleHTTPRequestHandler):
    """Serves files and keeps the log to itself."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this host; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser that reaches this host only; yield selenium's driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-component-update"):
        options.add_argument(f"--{flag}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, size: tuple[int, int]) -> None:
    """Give the page this width and height."""
    width, height = size
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


@dataclass
class Site:
    """Pages below an address, and what is wrong with them.

    Attributes:
        seen: Address of a page, its anchors and its links.
    """

    driver: Any
    folder: Path
    address: str

    def __post_init__(self) -> None:
        self.seen: dict[str, tuple[set[str], list[str]]] = {}

    def faults_of_pages(self, pages: list[str], size: tuple[int, int]) -> Iterator[str]:
        """Look at pages of this size; yield a line for whatever overflows, complains or is missing there."""
        resize(self.driver, size)
        for page in pages:
            url = f"{self.address}/{page}"
            self.driver.get(url)
            found = self.driver.execute_script(_LOOK)
            self.seen[url] = set(found["anchors"]), found["links"]
            if found["overflow"] > 0:
                yield f"{page}: {found['overflow']} pixels wider than {size[0]}: {found['over']}"
            yield from (f"{page}: no picture {picture}" for picture in found["pictures"])
            yield from (f"{page}: console: {entry['message']}" for entry in self.driver.get_log("browser"))

    def faults_of_links(self) -> Iterator[str]:
        """Yield a line for each link of the pages seen that leads nowhere on this site."""
        for url, (_, links) in self.seen.items():
            for link in sorted(set(links)):
                target, anchor = urldefrag(link)
                if target.startswith(self.address) and not self._leads(target, unquote(anchor)):
                    yield f"{url}: {link} leads nowhere"

    def _leads(self, target: str, anchor: str) -> bool:
        if target in self.seen:
            return anchor in {"", "top"} | self.seen[target][0]
        path = self.folder / unquote(target.removeprefix(self.address)).partition("?")[0].lstrip("/")
        return path.exists() and not anchor


def install() -> None:
    """Install the Debian packages whose programs are missing.

    Raises:
        OSError: That is not possible here; the text names them.
    """
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not missing:
        return
    command = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", *missing]
    try:
        if os.geteuid() != 0:
            raise PermissionError("only root may")
        subprocess.run(["apt-get", "-qq", "update"], check=True)  # a new container has no lists of packages
        subprocess.run(command, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    except (OSError, subprocess.CalledProcessError) as error:
        raise OSError(f"install the Debian packages {' '.join(missing)} ({error})") from error


if __name__ == "__main__":
    try:
        install()
    except OSError as failure:
        sys.exit(f"make test-site: {failure}")
