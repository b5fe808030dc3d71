"""Entry point of a child end: ``python -m tests.support.child NAME FD``."""

from __future__ import annotations

import sys

from tests.support.serving import serve

if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
