"""Entry of ``python -m llm_datadist.bench.worker``, by which comparisons of builds run the worker of either build."""

import sys

from llm_datadist.tools.bench.worker import main

if __name__ == "__main__":
    main(*sys.argv[1:])
