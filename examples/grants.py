"""Grants: the blocks of one request, lent to a decoder for a while; what each side sees until they end.

An extension of the interface: docs/howto-grants.md. Not part of the published interface.
"""

from __future__ import annotations

import secrets
import time

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMDataDist, LLMRole
from llm_datadist.errors import DeadlineExceeded, GrantEnded
from llm_datadist.types.grant import Grant
from llm_datadist.views import tensor_views

BLOCKS, ELEMENTS = 8, 1 << 16
KEY = BlocksCacheKey(1, model_id=0)
FIRST, SECOND = [2, 3], [5, 6]
"""The blocks of two requests."""


def desc() -> CacheDesc:
    """Return one float tensor of 8 blocks of 256 KiB."""
    return CacheDesc(1, [BLOCKS, ELEMENTS], DataType.DT_FLOAT)


def prompt(end: End) -> None:
    """Lend blocks, and use them again only when their grant has ended."""
    dd = LLMDataDist(LLMRole.PROMPT, cluster_id=1)
    dd.init(options(listen_ip_info=end.listen))
    cache = dd.cache_manager.allocate_blocks_cache(desc(), KEY)
    (kv,) = tensor_views(cache)
    kv[:] = np.arange(BLOCKS, dtype=np.float32)[:, np.newaxis]
    token = bytes.fromhex(end.exchange(ip=end.ip, port=dd.listen_port)["decoder"]["token"])
    end.exchange()  # the decoder has looked for a grant that is not given yet

    first = cache.grant(FIRST, ttl=30.0, token=token)
    end.exchange()
    end.exchange()  # the decoder has claimed it, and pulled
    assert first.claimed()
    first.renew(30.0)
    end.say("renewed the first grant: a reader holds it")
    end.exchange()
    while first.active:
        time.sleep(0.001)
    end.say(f"the first grant has ended: {first.end}; its blocks are free")
    end.exchange()

    second = cache.grant(SECOND, ttl=30.0)
    end.exchange(grant=second.to_bytes().hex())  # or pickled, in a message of yours
    end.exchange()  # the decoder has pulled
    second.revoke()
    kv[SECOND] = -1.0  # another request has the blocks from now on
    end.say(f"the second grant has ended: {second.end}; its blocks were used again")
    end.exchange()
    end.exchange()
    dd.cache_manager.deallocate_blocks_cache(cache)
    dd.finalize()


def decoder(end: End) -> None:
    """Pull what is lent: by a claim, then by a message."""
    dd = LLMDataDist(LLMRole.DECODER, cluster_id=2)
    dd.init(options())
    manager = dd.cache_manager
    cache = manager.allocate_blocks_cache(desc())
    (kv,) = tensor_views(cache)
    token = secrets.token_bytes(16)  # whoever routes the request may draw it, before its blocks are there
    peer = end.exchange(token=token.hex())["prompt"]
    prompts = [cluster(1, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(prompts, timeout=5000))

    try:
        manager.claim_grant(1, token, wait=False)
    except DeadlineExceeded:
        end.say("the first grant is not given yet")
    end.exchange()
    end.exchange()  # it is given now; a claim that waits needs no such word
    first = manager.claim_grant(1, token)
    manager.pull_blocks(KEY, cache, src_blocks=FIRST, dst_blocks=[0, 1], grant=first)
    same("blocks of the first request", kv[:2], np.array(FIRST)[:, np.newaxis])
    end.say(f"claimed the first grant, pulled blocks {FIRST}")
    end.exchange()
    end.exchange()  # it was renewed
    first.release()
    end.exchange()  # the prompt has heard of it
    refused(end, "released", dd, cache, first, FIRST)

    second = Grant.from_bytes(bytes.fromhex(end.exchange()["prompt"]["grant"]))
    manager.pull_blocks(KEY, cache, src_blocks=SECOND, dst_blocks=[2, 3], grant=second)
    same("blocks of the second request", kv[2:4], np.array(SECOND)[:, np.newaxis])
    end.say(f"got the second grant by message, pulled blocks {SECOND}")
    end.exchange()
    end.exchange()  # it was revoked
    refused(end, "revoked", dd, cache, second, SECOND)
    same("blocks of both requests", kv[:4], np.array(FIRST + SECOND)[:, np.newaxis])

    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    end.exchange()
    manager.deallocate_blocks_cache(cache)
    dd.finalize()


def refused(end: End, why: str, dd: LLMDataDist, cache: Cache, grant: Grant, blocks: list[int]) -> None:
    """Pull once more, into other blocks: never the bytes of whoever has the blocks now."""
    try:
        dd.cache_manager.pull_blocks(KEY, cache, src_blocks=blocks, dst_blocks=[6, 7], grant=grant)
    except GrantEnded as error:
        if why not in str(error):
            raise
        end.say(f"GrantEnded: {why}")
    else:
        raise SystemExit("a grant that has ended was good for a pull")


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
