"""Mutation testing: does a test fail when the code is wrong? See docs/notes/mutation.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        key: Module, function, operator, the line as it was, and a count of equals: the same after changes elsewhere.
        code: The whole module with the change.
    """

    module: str
    key: str
    code: str
