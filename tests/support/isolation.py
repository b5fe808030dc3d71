"""The table of docs/howto-hosts.md that says which isolation costs two containers which transport."""

import re
from dataclasses import dataclass
from typing import Final

from tests.support.source import ROOT

PAGE: Final = ROOT / "docs" / "howto-hosts.md"
_HEAD: Final = "| apart | both set | pools | registered | as in |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Isolation:
    """A line of the table: what two containers do not share, which options both set, and what they get.

    ``pools`` has a second transport where kernels before Linux 6.5 get another one.
    """

    apart: frozenset[str]
    options: frozenset[str]
    pools: tuple[str, ...]
    registered: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join([*sorted(self.apart), *sorted(self.options)])


def isolations() -> list[Isolation]:
    found = []
    for line in PAGE.read_text().partition(_HEAD)[2].partition("\n\n")[0].splitlines():
        apart, options, pools, (registered,), where = (re.findall("`([^`]+)`", cell) for cell in line.split("|")[1:-1])
        files = tuple(each for each in where if each.startswith("deploy/"))
        found.append(Isolation(frozenset(apart), frozenset(options), tuple(pools), registered, files))
    return found
