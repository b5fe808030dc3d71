"""Runs one check in a process whose surroundings were made for it, and returns its finding."""

import os
import platform
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from llm_datadist.tools.doctor.finding import Finding, Severity
from tests.support.seccomp import known
from tests.support.source import ROOT, run

_CHECK: Final = """
import sys, os, msgspec
from llm_datadist.tools.doctor import kernel, limits, peer, versions
from llm_datadist.tools.doctor.finding import run_checks
{preparation}
checks = [each for module in (kernel, limits, versions) for each in module.CHECKS if each.__name__ == {name!r}]
sys.stdout.buffer.write(msgspec.json.encode(run_checks(checks)))
"""


def forbid(call: str) -> str:
    """Return Python that forbids a system call to its process by seccomp."""
    if not known():
        pytest.skip(f"the numbers of system calls on {platform.machine()} are not known here")
    return f"import errno; from tests.support.seccomp import fail; fail({call!r}, errno.EPERM)"


def found(
    name: str, preparation: str = "", *, inside: tuple[str, ...] = (), shell: str = "", path: str = ""
) -> Finding:
    """Return the finding of check ``name``.

    Python ``preparation`` runs in its process; ``shell`` before that, inside the command ``inside``. ``path`` goes
    before the module path.
    """
    code = _CHECK.format(preparation=preparation, name=name)
    command = [sys.executable, "-c", code]
    if shell:
        command = ["sh", "-ec", f'{shell}\nexec "$@"', "sh", *command]
    paths = os.pathsep.join(filter(None, [path, str(ROOT / "src"), str(ROOT)]))
    done = run(*inside, *command, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    (finding,) = msgspec.json.decode(done.stdout, type=list[Finding])
    assert finding.name == name
    return finding


def is_(finding: Finding, state: Severity, value: str, mend: str) -> None:
    assert finding.state is state, finding
    assert value in finding.value, finding
    assert mend in finding.mend, finding
    assert finding.meaning or state is Severity.OK, finding


def needs(*command: str) -> tuple[str, ...]:
    """Return a command that wraps another one; skip the test where this host does not let us run it."""
    done = run(*command, "true")
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not permitted here: {done.stderr.strip()}")
    return command


def distribution(folder: Path, name: str, version: str) -> str:
    """Write the metadata of a distribution, as an installer does; return the folder for the module path."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)
