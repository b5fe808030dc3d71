"""Claims what an offer grants, as a decode engine does, says so, and goes on holding it: a program to be killed."""

from __future__ import annotations

import json
import sys
import time

from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file
from llm_datadist.integrations.vllm.offers import KvOffer


def main() -> None:
    """Read the params from standard input, once all is imported: that takes longer than many an offer lasts."""
    print("ready", flush=True)
    keys = ReferenceKeys(runtime_secret_file())
    offer, token = KvOffer.read(json.load(sys.stdin)["datadist"], keys)
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    datadist = LLMDataDist(LLMRole.DECODER, 7)
    datadist.init(config.generate_options())
    endpoint = offer.ranks[0]
    info = LLMClusterInfo()
    info.remote_cluster_id = endpoint.cluster_id
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(endpoint.host, endpoint.port)
    datadist.link_clusters([info], 5_000)
    grant = datadist.cache_manager.claim_grant(info.remote_cluster_id, token)
    print(f"claimed {grant}", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
