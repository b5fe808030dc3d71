"""Status codes as in the original's native module: ``kSuccess``, ``kFailed``, ... (interface R23, §1.1).

The page names the first two; the others follow from them: ``LLM_KV_CACHE_NOT_EXIST`` is ``kKvCacheNotExist``.
"""

from __future__ import annotations

from llm_datadist.errors import LLMStatusCode

_CODES = {
    "k" + "".join(word.capitalize() for word in code.name.removeprefix("LLM_").split("_")): int(code)
    for code in LLMStatusCode
}
__all__ = list(_CODES)


def __getattr__(name: str) -> int:
    try:
        return _CODES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_CODES})
