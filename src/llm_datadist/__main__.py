"""``python -m llm_datadist`` is ``llm-datadist``."""

from llm_datadist.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
