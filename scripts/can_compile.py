"""Exit with what this host lacks to compile the library, and how to get it; ``make`` runs it before anything else.

With ``--with-zig`` no compiler is looked for: `make wheels` brings its own. Any Python from 3.7 on can run it.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec

COMPILERS = {"C++": ("CXX", "c++", "g++", "clang++"), "C": ("CC", "cc", "gcc", "clang")}


def lacking(*, with_zig: bool) -> list[str]:
    """Return a line for each thing that is missing."""
    found = []
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one is to say so)
        found.append(f"Python >= 3.11: this is {sys.version.split()[0]}; `make PYTHON=/path/to/another/python3 ...`")
    for language, (variable, *names) in {} if with_zig else COMPILERS.items():
        wanted = os.environ.get(variable, "").split()[:1] or names
        if not any(map(shutil.which, wanted)):
            found.append(f"a {language} compiler: no {' or '.join(wanted)} on the path")
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        found.append(f"the headers of this Python: no {header}")
    if find_spec("ensurepip") is None:
        found.append("the modules that make a virtual environment: no ensurepip")
    return found


if __name__ == "__main__":
    missing = lacking(with_zig="--with-zig" in sys.argv)
    if missing:
        sys.exit(
            "This host cannot compile open-datadist. It lacks\n"
            + "".join(f"  {line}\n" for line in missing)
            + "Install it (Debian, Ubuntu: apt-get install g++ python3-dev python3-venv; Fedora: dnf install gcc-c++\n"
            + "python3-devel), or a wheel, which needs no compiler: `make wheels`, then see docs/dependencies.md."
        )
