"""Write the golden frames again, if the versions allow it; docs/notes/golden-frames.md has the rules."""

import sys
from pathlib import Path

from tests.golden.frames import FILE, load, text_of, updated
from tests.golden.groups import groups


def main(path: Path = FILE) -> None:
    try:
        text = text_of(updated(groups(), load(path)))
    except ValueError as refused:
        sys.exit(f"{path.name} is as before:\n{refused}")
    path.write_text(text)


if __name__ == "__main__":
    main()
