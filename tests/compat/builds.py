"""Other builds of this library, for one side of a test.

A build is a folder that comes first on PYTHONPATH: the package with its native modules, and the tests whose words its
ends understand. Releases are compiled from their commit, once, in build/compat. Others are copies of this tree with
another range of versions or other features.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.source import PACKAGE, ROOT, compiled
from tests.support.wire import FEATURES, VERSIONS

_COMPAT: Final = Path(__file__).parent
_MADE: Final = ROOT / "build" / "compat"
NEXT: Final = VERSIONS[1] + 1
#: Copies of this tree: their versions and features.
COPIES: Final = {
    "newer": ((VERSIONS[0], NEXT), [*FEATURES, "of-a-later-release"]),
    "older": ((VERSIONS[0], VERSIONS[1] - 1), FEATURES),
    "plain": (VERSIONS, []),
    "far": ((NEXT, NEXT), FEATURES),
}
#: By name: commit, and `speaks` or `refused`.
RELEASES: Final = {
    line.split()[0]: (line.split()[1], line.split()[2])
    for line in (_COMPAT / "releases.txt").read_text("ascii").splitlines()
    if line[0] != "#"
}
#: An installed tree has import hooks that come before PYTHONPATH.
_NO_HOOKS: Final = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
"""


def releases(expected: str) -> list[str]:
    return [name for name, (_, found) in RELEASES.items() if found == expected]


def made(name: str, folder: Path) -> Path:
    """Return the folder of a build; a copy of this tree is made in ``folder``."""
    build = _copy(name, folder / name) if name in COPIES else _MADE / name
    assert name in COPIES or _is_compiled(name), f"{name} is not there: make test-compat compiles it"
    (build / "sitecustomize.py").write_text(_NO_HOOKS, "ascii")
    here = build / "tests" / "compat"
    here.mkdir(exist_ok=True)
    for each in ("__init__.py", "words.py"):
        shutil.copy(_COMPAT / each, here)
    return build


def _copy(name: str, build: Path) -> Path:
    unneeded = shutil.ignore_patterns("__pycache__", "*.cpp", "*.hpp", "*.ptx", "*.so")
    shutil.copytree(ROOT / "src", build, ignore=unneeded)
    natives = list(compiled("_native").parent.glob("*.so"))
    assert natives, "the native modules are not there"
    for path in natives:
        shutil.copy(path, build / PACKAGE / "_native")
    wire = build / PACKAGE / "_links" / "versions.py"
    text = wire.read_text("utf-8")
    for constant, value in zip(("VERSIONS", "FEATURES"), COPIES[name], strict=True):
        text, count = re.subn(rf"(?m)^{constant}: Final = .*$", f"{constant}: Final = {value}", text)
        assert count == 1, f"{wire.name} has another form now"
    wire.write_text(text, "utf-8")
    shutil.copytree(ROOT / "tests" / "support", build / "tests" / "support", ignore=unneeded)
    shutil.copy(ROOT / "tests" / "__init__.py", build / "tests")
    return build


def _is_compiled(name: str) -> bool:
    stamp = _MADE / name / "commit"
    return stamp.is_file() and stamp.read_text("ascii") == RELEASES[name][0]


def _compile(name: str) -> None:
    build, commit = _MADE / name, RELEASES[name][0]
    shutil.rmtree(build, ignore_errors=True)
    tree = build / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x"], cwd=tree, check=True, input=archive.stdout)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", build, tree], check=True)
    shutil.move(tree / "tests", build)
    shutil.rmtree(tree)
    (build / "commit").write_text(commit, "ascii")


if __name__ == "__main__":
    for each in RELEASES:
        if not _is_compiled(each):
            sys.stdout.write(f"build/compat/{each}: compiling it from its commit (once)\n")
            sys.stdout.flush()
            _compile(each)
