"""Every page of the site in headless Chromium, at the width of a desktop and of a phone."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.site.browser import DESKTOP, PHONE, PROGRAMS, Site, chromium, resize, served
from tests.support.source import ROOT

_MISSING = [each for each in ("sphinx", "myst_parser", "furo", "selenium") if find_spec(each) is None]
_MISSING += [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}: make test-site")

BUILT = ROOT / "build" / "docs"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def site(driver: Any) -> Iterator[Site]:
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-b", "html", "docs", str(BUILT)]
    subprocess.run(build, cwd=ROOT, check=True)
    with served(BUILT) as address:
        yield Site(driver, BUILT, address)


def pages(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))


@pytest.mark.timeout(600)  # a minute on a quiet machine
def test_every_page_fits_its_window_and_each_link_anchor_and_picture_is_there(site: Site) -> None:
    names = [name for name in pages(BUILT) if not name.startswith("_static")]
    assert len(names) > 30
    for size in (DESKTOP, PHONE):
        assert list(site.faults_of_pages(names, size)) == []
    assert list(site.faults_of_links()) == []
    assert sum(len(links) for _, links in site.seen.values()) > 1000


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_search_finds_the_pages_that_have_a_word(site: Site, size: tuple[int, int]) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    resize(site.driver, size)
    site.driver.get(f"{site.address}/search.html?q=quarantine")
    script = "return [...document.querySelectorAll('#search-results li a')].map(each => each.pathname)"
    WebDriverWait(site.driver, 60).until(lambda driver: "/architecture.html" in driver.execute_script(script))
    assert site.driver.get_log("browser") == []


def test_a_page_that_is_wrong_in_each_of_these_ways_is_found(driver: Any, tmp_path: Path) -> None:
    page = "<!doctype html><link rel=icon href='data:,'><body><h1 id=here>x</h1>{}</body>"
    wrong = {
        "good": "<a href='#here'>x</a><div style='overflow-x: auto'><div style='width: 2000px'>x</div></div>",
        "wide": "<div style='width: 400px'>x</div>",
        "picture": "<img src='data:image/png;base64,AA'>",
        "script": "<script>throw Error('broken')</script>",
        "anchor": "<a href='good.html#nowhere'>x</a>",
        "link": "<a href='nowhere.html'>x</a>",
    }
    for name, body in wrong.items():
        (tmp_path / f"{name}.html").write_text(page.format(body))
    with served(tmp_path) as address:
        seen = Site(driver, tmp_path, address)
        on_pages = list(seen.faults_of_pages(pages(tmp_path), PHONE))
        assert sorted(line.partition(".")[0] for line in on_pages) == ["picture", "script", "wide"]
        assert "wider than 390: ['DIV" in next(line for line in on_pages if line.startswith("wide"))
        assert list(seen.faults_of_pages(["wide.html"], DESKTOP)) == []
        links = sorted(seen.faults_of_links())
        assert [line.rpartition("/")[2] for line in links] == [
            "good.html#nowhere leads nowhere",
            "nowhere.html leads nowhere",
        ]
