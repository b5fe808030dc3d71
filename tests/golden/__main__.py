"""Golden frames: ``frames.json`` has the bytes of every encoding for fixed values, in groups, each with its version.

This command writes the file again. An encoding may change only with the version of its group.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.golden.encodings import Group, groups

FILE: Final = Path(__file__).with_name("frames.json")
Stored = dict[str, dict[str, Any]]
"""By group ``version``, and ``frames`` by name."""


def load(path: Path = FILE) -> Stored:
    stored: Stored = json.loads(path.read_text()) if path.exists() else {}
    return stored


def text_of(stored: Stored) -> str:
    return json.dumps(stored, indent=1) + "\n"


def updated(groups: Mapping[str, Group], stored: Stored) -> Stored:
    """Return the new content. Raises ValueError, which tells what changed without a version or cannot be read."""
    wrong = [f"{name}: the group is gone, the file has it" for name in stored if name not in groups]
    new = {}
    for name, group in groups.items():
        was = stored.get(name, {"version": group.version, "frames": {}})
        new[name] = _updated(group, was, lambda text, name=name: wrong.append(f"{name}: {text}"))  # type: ignore[misc]
    if wrong:
        raise ValueError("\n".join(wrong))
    return new


def _updated(group: Group, stored: Mapping[str, Any], wrong: Callable[[str], None]) -> dict[str, Any]:
    was, now, frames = stored["version"], group.version, {}
    for name, frame in group.frames.items():
        try:
            frames[name] = (data := frame.write(frame.value)).hex()
            value = frame.value if frame.read is None else frame.read(data)
            if value != frame.value or frame.write(value) != data:
                wrong(f"{name}: {data.hex()} is read as {value}, not as {frame.value}")
        except Exception as error:  # noqa: BLE001 (any error of a changed encoding is a difference)
            wrong(f"{name}: {frame.value} cannot be written and read: {error!r}")
    changed = {name: data for name, data in stored["frames"].items() if frames.get(name) != data}
    rule = f"restore the encoding, or raise {group.constant} above {now} and run `python -m tests.golden`"
    if now < was:
        wrong(f"version: {was} in the file, {now} in {group.constant}: versions only rise")
    elif now == was:
        for name, data in changed.items():
            wrong(f"{name}: {data} became {frames.get(name)}, and the version is {now}: {rule}")
    return {"version": now, "frames": frames}


def main(path: Path = FILE) -> None:
    try:
        text = text_of(updated(groups(), load(path)))
    except ValueError as refused:
        sys.exit(f"{path.name} is as before:\n{refused}")
    path.write_text(text)


if __name__ == "__main__":
    main()
