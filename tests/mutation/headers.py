"""Mutants of a C++ header: a word of one line changed. Textual, so some do not compile."""

import re
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Final

from tests.mutation import Mutant

#: What is found in a line of code -> what stands there instead.
_CHANGES: Final = (
    (r"==", "!="),
    (r"!=", "=="),
    (r" <= ", " < "),
    (r" >= ", " > "),
    (r" < ", " <= "),
    (r" > ", " >= "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \+= ", " -= "),
    (r" -= ", " += "),
    (r"(?<=\()!(?=\w)", ""),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"(?<![\w.])0(?![\w.])", "1"),
    (r"(?<![\w.])1(?![\w.])", "2"),
    (r"\bbreak;", ";"),
    (r"\bcontinue;", ";"),
    (r"(?<=^    )\s*\w[\w.>-]*\([^{}]*\);$", ";"),  # a call whose result nobody takes
)
#: Lines that are no code, or that the compiler alone reads.
_NO_CODE: Final = re.compile(r"^\s*(?://|#|static_assert|template|using |namespace |$)")


def mutants(module: str, source: str, sample: int | None, seed: int) -> Iterator[Mutant]:
    """Yield mutants of a header in the order of the source, or ``sample`` of them, chosen by the seed alone."""
    places = list(_places(module, source))
    if sample is not None:
        places = sorted(Random(f"{seed} {module}").sample(places, min(sample, len(places))))
    for start, end, key, text in places:
        yield Mutant(module, key, source[:start] + text + source[end:])


def _places(module: str, source: str) -> Iterator[tuple[int, int, str, str]]:
    equals: Counter[str] = Counter()
    at = 0
    for line in source.splitlines(keepends=True):
        code = "" if _NO_CODE.match(line) else line.split("//")[0].rstrip()
        for pattern, text in _CHANGES:
            for found in re.finditer(pattern, code):
                key = f"{module}: {found[0].strip()} -> {text.strip()}: {line.strip()}"
                equals[key] += 1
                yield at + found.start(), at + found.end(), f"{key} #{equals[key]}", text
        at += len(line)
