"""Check the models of this folder: what ``make model`` runs (docs/notes/memory-order.md).

First the models are compared with the source: each step that a model quotes has to be there, and in that order. Then
Relacy runs each model, which must pass, and each model without one of its steps, which must fail.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scripts import check_pages
from tests.native.drivers import NATIVE, ROOT, Unsupported, compiler
from tests.support import debian

HERE: Final = Path(__file__).parent
MODELS: Final = ("guards", "write_intents", "reply_cache", "device")
BUILD: Final = ROOT / "build" / "model"

#: A step of the source: function, file, what its body says.
_STEP: Final = re.compile(r"^ *// (\w+) \(([\w/]+\.(?:[ch]pp|py))\): `(.+)`$", re.MULTILINE)
#: Everything in these files that orders memory has to be in a model.
_MODELLED: Final = ("generation.hpp", "write_intents.hpp")
_ORDERS: Final = re.compile(r"^.*(?:__atomic_|_fence\(\);).*$", re.MULTILINE)
#: What only x86 has.
_X86: Final = re.compile(r"#if defined\(__x86_64__\)\n.*?#endif\n", re.DOTALL)


def main() -> int:
    """Print a line for each case; return 0 if all are as they should be."""
    wrong = mistakes()
    print("\n".join(wrong) or "the models quote the source as it is")
    started = time.monotonic()
    try:
        # Last, not -isystem: where that is /usr/include, the headers of the compiler come before those of C.
        flags = [f"-idirafter{_relacy()}", "-std=c++14", "-O1"]
        for name in MODELS:
            binary = BUILD / name
            subprocess.run([compiler(), *flags, str(HERE / f"{name}.cpp"), "-o", str(binary)], check=True)
            if subprocess.run([binary], check=False).returncode != 0:
                wrong.append(name)
    except Unsupported as missing:
        print(f"make model: {missing}", file=sys.stderr)
        return 1
    print(f"{'NOT as expected, see above' if wrong else 'all as expected'}, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def mistakes() -> list[str]:
    """Return where the models and the source differ, one line each."""
    sources = {name: (HERE / f"{name}.cpp").read_text() for name in MODELS}
    known = check_pages.headings(ROOT / "docs")
    found = [
        f"{name}.cpp:{line}: {what}"
        for name, text in sources.items()
        for line, what in check_pages.mistakes(text, known)
    ]
    for name, text in sources.items():
        found += [f"{name}.cpp: {what}" for what in _misquoted(text)]
    for name in _MODELLED:
        found += [f"{name}: in no model: {line}" for line in _unmodelled(name, "".join(sources.values()))]
    return found


def _misquoted(model: str) -> Iterator[str]:
    """Yield the steps that are not in their function, or stand there before a step that the model does earlier."""
    reached: dict[tuple[str, str], int] = {}
    for function, name, quote in _STEP.findall(model):
        body = _body(_source(name).read_text(), function)
        at = body.find(_plain(quote), reached.get((name, function), 0))
        if at < 0:
            where = "in another order" if _plain(quote) in body else "not"
            yield f"{function} of {name} says {where}: {quote}"
        reached[name, function] = max(at, 0)


def _unmodelled(name: str, models: str) -> Iterator[str]:
    """Yield the lines of a file that order memory and that no model quotes. A quotation counts once."""
    quotes = sorted({(function, _plain(quote)) for function, file, quote in _STEP.findall(models) if file == name})
    for line in _ORDERS.findall(_X86.sub("", _source(name).read_text())):
        code = _plain(line.split("//")[0])
        quote = next((each for each in quotes if each[1] in code), None)
        if quote is not None:
            quotes.remove(quote)
        elif code:
            yield code


def _source(name: str) -> Path:
    """Return a file of the native code by its name, or one of the package by its path."""
    return next(NATIVE.rglob(name), NATIVE.parent / name)


def _body(source: str, function: str) -> str:
    """Return the definitions of that name, of C++ or of Python, in one line."""
    start = rf"^(?P<indent> *)(?:def |(?!return)[\w:<>&*, ]*?[\s&*]|(?=[A-Z])){function}\("
    cpp, python = r"[^;\n]*\{(?:[^\n]*\}|.*?\n(?P=indent)\})$", r".*?(?=\n(?P=indent)?\S|\n(?P=indent)def |\Z)"
    wanted = f"{start}(?:{cpp if '#pragma once' in source else python})"
    return _plain("\n".join(match[0] for match in re.finditer(wanted, source, re.MULTILINE | re.DOTALL)))


def _plain(text: str) -> str:
    return " ".join(text.split())


def _relacy() -> Path:
    """Return the folder that holds Relacy's."""
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        return debian.get("relacy-dev", "usr/include/relacy/relacy.hpp").parent.parent
    except OSError as error:
        raise Unsupported(f"no Relacy Race Detector: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
