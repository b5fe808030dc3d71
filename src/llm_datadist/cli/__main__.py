"""Entry of ``python -m llm_datadist.cli``."""

from __future__ import annotations

import sys

from llm_datadist.cli import main

if __name__ == "__main__":
    sys.exit(main())
