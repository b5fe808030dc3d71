"""What the link tests send to an end: linking and unlinking by plain numbers, states, proof that a link works."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMClusterInfo, LLMRole, LLMStatusCode
from llm_datadist.errors import LinkError, NotLinked
from tests.support.ends import Call, End, begin_there, result_there, runs_there
from tests.support.moves import Spec, Use, call, forget, make, moved, same_bytes, show, wait_until
from tests.support.probe import deadline, socket_of
from tests.support.wire import FEATURES, VERSIONS, offer
from tests.support.world import World
from tests.support.world import cluster_info as info

__all__ = ["begin_there", "info", "result_there", "runs_there"]  # as if they were made here

OK = LLMStatusCode.LLM_SUCCESS
SUCCESS = (OK, [OK])
Codes = tuple[LLMStatusCode, list[LLMStatusCode]]


def link(world: World, clusters: list[LLMClusterInfo], timeout: int = 10_000) -> Codes:
    return world.dd.link_clusters(clusters, timeout)


def dialled(world: World, port: int) -> str:
    """Link to cluster 1; return the kind and text of the error, or nothing."""
    try:
        links_of(world).link(1, ("127.0.0.1", port), deadline(10_000))
    except LinkError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def speaks(world: World, spoken: tuple[int, int], features: Sequence[str]) -> None:
    """From now on this process offers this range of versions and these features."""
    offer(spoken, features)


@contextmanager
def speaking(*ends: End, spoken: tuple[int, int] = VERSIONS, features: Sequence[str] = FEATURES) -> Iterator[None]:
    """The ends offer other versions or features for a while."""
    for end in ends:
        end.do(speaks, spoken, features)
    try:
        yield
    finally:
        for end in ends:
            end.do(speaks, VERSIONS, FEATURES)


def language(world: World, peer: int) -> str:
    """Return the version and the features of a link."""
    version, features = links_of(world).get(peer).spoken
    assert [each.protocol for each in world.dd.statistics().links] == [version]
    return f"{version}: {' '.join(sorted(features))}"


def unlink(world: World, clusters: list[LLMClusterInfo], timeout: int = 10_000, force: bool = False) -> Codes:
    return world.dd.unlink_clusters(clusters, timeout, force)


def switch(world: World, role: str, options: dict[str, Any] | None = None) -> int | None:
    """Switch the role; return the port it listens on now."""
    world.dd.switch_role(LLMRole[role], options)
    return world.dd.listen_port


def link_when(world: World, start: Path, cluster: LLMClusterInfo, threads: int = 1) -> list[LLMStatusCode]:
    """Spin until the file is there, then link, from several threads at once."""

    def run() -> LLMStatusCode:
        wait_until(start.exists)
        return world.dd.link_clusters([cluster], 20_000)[0]

    return [each.result() for each in [Call(run) for _ in range(threads)]]


def links(world: World) -> dict[int, str]:
    """Return the state of every link, by cluster id."""
    return {each.remote_cluster_id: each.state for each in world.dd.statistics().links}


def linked(prompt: End, decoder: End) -> bool:
    """Return True if 1 and 2 have a link with each other that can be used, and no other."""
    return (prompt.do(links), decoder.do(links)) == ({2: "ready"}, {1: "ready"})


def redials(world: World) -> tuple[Any, ...]:
    return world.dd.statistics().redials


def statistics(world: World) -> Any:
    return world.dd.statistics()


def explain(world: World, cluster_id: int) -> Any:
    return world.dd.explain(cluster_id)


def finalize(world: World) -> None:
    world.dd.finalize()


def vanish(world: World) -> None:
    """Finalize after the network broke: peers hear no goodbye. For an end that dialled no link."""
    manager = links_of(world)
    manager.listen(None, even_if_linked=True)
    for peer in links(world):
        lose(world, peer)
    wait_until(lambda: not links(world))
    world.dd.finalize()


def links_of(world: World) -> Any:
    """Return what the end's engine knows of its links."""
    return world.probe.engine.links


def link_number(world: World, peer: int) -> int:
    """Return the number of the link, which a later one exceeds; 0 where there is none that can be used."""
    there = links_of(world).peek(peer)
    return 0 if there is None or not there.usable else int(there.origin.sequence)


def lose(world: World, peer: int) -> None:
    """Cut the control channel, as a network would: neither side meant it."""
    control = socket_of(world.probe.link(peer))
    with suppress(OSError):  # it may just have been lost
        control.shutdown(socket.SHUT_RDWR)


def not_linked(end: End, peer: int, *parts: str) -> str:
    """Pulling from the peer and a question for its link are NOT_YET_LINK; return the text of the pull."""
    with pytest.raises(NotLinked, match=str(peer)):
        end.do(explain, peer)
    with pytest.raises(NotLinked) as caught:
        end.do(pull_from, peer)
    assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    text = str(caught.value)
    assert [part for part in (str(peer), *parts) if part not in text] == [], text
    assert "\n" not in text
    return text


def pull_from(world: World, peer: int) -> None:
    """Pull a block from the peer into a new cache."""
    cache = world.cm.allocate_blocks_cache(Spec().desc)
    try:
        world.cm.pull_blocks(BlocksCacheKey(peer, 0), cache, [0], [0])
    finally:
        world.cm.deallocate_blocks_cache(cache)


def free_port() -> int:
    """Return a port that nothing listens at now, and that the kernel gives to no connection meanwhile."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def reachable(port: int | None, ip: str = "127.0.0.1") -> bool:
    """Return True if something listens there now."""
    with socket.socket() as sock:
        return sock.connect_ex((ip, port or 0)) == 0


def alone(*ends: End) -> None:
    """Wait until no end has a link."""
    for end in ends:
        wait_until(lambda end=end: end.do(links) == {})  # type: ignore[misc]


def start_both(prompt: End, decoder: End, transport: str, **settings: Any) -> None:
    """Start cluster 1 and cluster 2, both listening, over one transport."""
    for end, role, cluster_id in ((prompt, "PROMPT", 1), (decoder, "DECODER", 2)):
        extra = {"llm.Transport": transport} | settings.get("extra", {})
        end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", **(settings | {"extra": extra}))


def bytes_move_both_ways(first: End, second: End) -> None:
    """Each end pulls blocks from the other; every byte of both caches is compared at both ends."""
    for here, there in ((first, second), (second, first)):
        key = BlocksCacheKey(there.cluster_id, 7)
        source = there.do(make, "proof source", Spec(blocks=True, blocks_key=key), there.cluster_id)
        target = here.do(make, "proof target", Spec(blocks=True), 10 + here.cluster_id)
        here.do(call, "pull_blocks", key, Use("proof target"), [1, 6], [0, 3])
        same_bytes(here.do(show, "proof target"), moved(target, source, [(0, 1), (3, 6)]))
        same_bytes(there.do(show, "proof source"), source)
        there.do(forget, "proof source")
        here.do(forget, "proof target")


def has_ipv6() -> bool:
    """Return True if this machine has the loopback address of IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False
