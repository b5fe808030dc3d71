"""The tests with two builds run in `make test-compat`, which compiles the releases among them."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.compat.builds import RELEASES, made, releases
from tests.support.ends import ChildEnd
from tests.support.source import ROOT

#: This tree's name among builds.
THIS = "this"
Born = Callable[..., ChildEnd]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder in other runs."""
    for item in items:
        if os.environ.get("LLM_DATADIST_COMPAT") != "required" and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="two builds: make test-compat"))


@pytest.fixture(scope="session")
def born(tmp_path_factory: pytest.TempPathFactory) -> Born:
    """Return a function that starts an end of a build, by its name."""
    folder = tmp_path_factory.mktemp("builds")
    folders = {THIS: ROOT}

    def start(build: str) -> ChildEnd:
        if build not in folders:
            folders[build] = made(build, folder)
        return ChildEnd(build, fresh=build in RELEASES, build=folders[build])

    return start


@pytest.fixture(
    scope="module",
    params=[each for other in ("newer", "plain", *releases("speaks")) for each in ((other, THIS), (THIS, other))],
    ids=lambda builds: f"{builds[0]}-prompt-{builds[1]}-decoder",
)
def children(request: pytest.FixtureRequest, born: Born) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """A prompt and a decoder of two builds, for all tests of a file."""
    with closing(born(request.param[0])) as prompt, closing(born(request.param[1])) as decoder:
        yield prompt, decoder
