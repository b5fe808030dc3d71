"""What an HTTP client may write into ``kv_transfer_params``."""

import random
from typing import Any

__all__ = ["odd_params"]

ODD: list[Any] = [None, True, False, 0, -1, 2**63, 1e308, "", "x", "\ud800", [], [[]], {}, {"a": 1}, [[1, 2]]]


def odd_params(source: random.Random, true: dict[str, Any]) -> Any:
    """Return what is no params, true ones with odd values, or a reference in which something was changed."""
    kind = source.randrange(4)
    if kind == 0:
        return source.choice([*ODD, {source.choice(list(true)): source.choice(ODD)}])
    params = dict(true)
    if kind == 1:
        text = params["datadist"]
        place = source.randrange(len(text))
        params["datadist"] = text[:place] + source.choice("0a.=\x00\ud800") + text[place + source.randrange(2) :]
    else:
        for name in source.sample(list(params), source.randint(1, 4)):
            params[name] = source.choice(ODD)
    if source.random() < 0.5:
        params["do_remote_decode"] = source.choice(ODD)
    return params
