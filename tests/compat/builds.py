"""Other builds of this library, for one side of a test.

A build is a folder that comes first on PYTHONPATH: the package with its native modules, and the tests whose words its
ends understand. Releases are compiled from their commit, once, in build/compat; ``python -m tests.compat.builds`` does
it. Until there is a second release, others are copies of this tree with another range of versions or other features.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from llm_datadist._links.versions import FEATURES, VERSIONS
from llm_datadist._native import _native
from tests.support.source import PACKAGE, ROOT

_MADE: Final = ROOT / "build" / "compat"
_COMPAT: Final = Path(__file__).parent
UNKNOWN_FEATURE: Final = "of-a-later-release"
NEXT: Final = VERSIONS[1] + 1
#: Copies of this tree: what they say in their greetings.
COPIES: Final = {
    "newer": ((VERSIONS[0], NEXT), [*FEATURES, UNKNOWN_FEATURE]),
    "plain": (VERSIONS, []),
    "far": ((NEXT, NEXT), FEATURES),
}
#: An installed tree has import hooks that come before PYTHONPATH.
_NO_HOOKS: Final = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
"""


class Release(NamedTuple):
    """A line of releases.txt."""

    name: str
    commit: str
    expected: str

    @property
    def folder(self) -> Path:
        return _MADE / self.name

    @property
    def is_made(self) -> bool:
        stamp = self.folder / "commit"
        return stamp.is_file() and stamp.read_text("ascii") == self.commit


_LINES: Final = [line.split() for line in (_COMPAT / "releases.txt").read_text("ascii").splitlines()]
RELEASES: Final = [Release(*words) for words in _LINES if words[0] != "#"]
#: Builds that speak with this tree, and those that it refuses.
SPEAKING: Final = [each.name for each in RELEASES if each.expected == "speaks"]
REFUSED: Final = [each.name for each in RELEASES if each.expected == "refused"]


def made(name: str, folder: Path) -> Path:
    """Return the folder of a build; a copy of this tree is made in ``folder``."""
    if name in COPIES:
        return _copy(name, folder / name)
    (release,) = (each for each in RELEASES if each.name == name)
    assert release.is_made, f"{name} is not there: make test-compat compiles it"
    return _completed(release.folder)


def _copy(name: str, folder: Path) -> Path:
    unneeded = shutil.ignore_patterns("__pycache__", "*.cpp", "*.hpp", "*.so")
    shutil.copytree(ROOT / "src", folder, ignore=unneeded)
    natives = list(Path(_native.__file__).parent.glob("*.so"))  # an installed tree has them elsewhere than its source
    assert natives, "the native modules are not there"
    for path in natives:
        shutil.copy(path, folder / PACKAGE / "_native")
    wire = folder / PACKAGE / "_links" / "versions.py"
    text = wire.read_text("utf-8")
    for constant, value in zip(("VERSIONS", "FEATURES"), COPIES[name], strict=True):
        text, count = re.subn(rf"(?m)^{constant}: Final = .*$", f"{constant}: Final = {value}", text)
        assert count == 1, f"{wire.name} has another form now"
    wire.write_text(text, "utf-8")
    shutil.copytree(ROOT / "tests" / "support", folder / "tests" / "support", ignore=unneeded)
    return _completed(folder)


def _completed(folder: Path) -> Path:
    """Add the words of this folder, which ask only what is public."""
    (folder / "sitecustomize.py").write_text(_NO_HOOKS, "ascii")
    here = folder / "tests" / "compat"
    here.mkdir(exist_ok=True)
    for name in ("__init__.py", "words.py"):
        shutil.copy(_COMPAT / name, here)
    (folder / "tests" / "__init__.py").touch()
    return folder


def compile_release(release: Release) -> None:
    """Install a commit of this repository into its folder, beside its tests."""
    shutil.rmtree(release.folder, ignore_errors=True)
    tree = release.folder / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", release.commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x"], cwd=tree, check=True, input=archive.stdout)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(release.folder), str(tree)], check=True)
    shutil.move(tree / "tests", release.folder / "tests")
    shutil.rmtree(tree)
    (release.folder / "commit").write_text(release.commit, "ascii")


if __name__ == "__main__":
    for each in RELEASES:
        if not each.is_made:
            sys.stdout.write(
                f"{each.folder.relative_to(ROOT)}: compiling {each.name}, commit {each.commit[:7]} (once)\n"
            )
            sys.stdout.flush()
            compile_release(each)
