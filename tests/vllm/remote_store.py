"""A prefix store in a process: ``python -m tests.vllm.remote_store BYTES NAMESPACES``. For each line, its figures."""

from __future__ import annotations

import json
import sys

from llm_datadist.store import StoreServer


def main() -> None:
    with StoreServer(int(sys.argv[1]), namespaces=int(sys.argv[2])) as server:
        print(server.port, flush=True)
        for _ in sys.stdin:
            server.check_integrity()
            found = [{name: getattr(each, name) for name in FIGURES} for each in server.statistics().namespaces]
            print(json.dumps(found), flush=True)


FIGURES = ("slots", "free", "filling", "published", "loads", "found", "stored", "failed")

if __name__ == "__main__":
    main()
