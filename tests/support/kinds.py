"""The types that tests name in annotations."""

from tests.support.ends import ChildEnd, End, Family, LocalEnd, Processes
from tests.support.moves import Bytes
from tests.support.pairs import Pair
from tests.support.world import World

__all__ = ["Bytes", "ChildEnd", "End", "Family", "LocalEnd", "Pair", "Processes", "World"]
