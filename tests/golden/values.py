"""The fixed values behind the golden frames: every field set, no two alike, by keyword, so that no order is implied."""

from typing import Final, NamedTuple

import msgspec
import numpy as np

from llm_datadist import metrics
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.registry import FIRST_NAMED_PIN
from llm_datadist._links import messages as m
from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist._transfer.handles import Handle, KeyHandle
from llm_datadist._transport import nixl
from llm_datadist._transport.nixl_agent import Address
from llm_datadist._transport.rendezvous import Refusal, RendezvousHello


def some(first: int, count: int = 16) -> bytes:
    return bytes(range(first, first + count))


def words(*numbers: int, size: str = "<u8") -> bytes:
    return np.array(numbers, size).tobytes()


GEOMETRY: Final = Geometry(
    kind=CacheKind.BLOCKS,
    num_tensors=6,
    rows=40,
    stride=4096,
    tensor_bytes=163_840,
    shape=(40, 8, 256),
    data_type=1,
    placement=0,
)
COMMUNICATOR: Final = m.CommunicatorId(name="prefill", members=[(1, 0), (2**63, 3)], table=some(0x30), token=some(0x40))
#: Greetings with all fields of 0.2.0; those of later releases stay as if missing.
HELLO: Final = m.Hello(
    versions=(11, 12),
    features=["reads-by-key", "of a later release"],
    cluster_id=2**64 - 1,
    incarnation=some(0x50),
    remote_accessible=True,
    pid=4711,
    host="höst-1",
    transport="shm",
    nonce=some(0x60),
    share=some(0x70, 32),
    offers={"shm": b"cookie", "tcp": b""},
    wanted=2,
    reconnects=True,
    token=some(0x90),
    communicator=COMMUNICATOR,
)
LEAST_HELLO: Final = m.Hello(
    versions=(11, 11),
    features=[],
    cluster_id=1,
    incarnation=some(0x51),
    remote_accessible=False,
    pid=2,
    host="",
    transport=None,
    nonce=some(0x61),
    share=b"",
    offers={},
    wanted=None,
    reconnects=False,
    token=some(0x91),
)
WELCOME: Final = m.Welcome(
    versions=(11, 13),
    features=["reads-by-key"],
    cluster_id=2,
    incarnation=some(0xA0),
    remote_accessible=True,
    pid=4712,
    host="host-2",
    transport="tcp",
    nonce=some(0xB0),
    share=some(0xC0, 32),
    offers={"nixl": b"rdma"},
    proof=some(0xE0, 32),
)
LEAST_WELCOME: Final = m.Welcome(
    versions=(11, 11),
    features=[],
    cluster_id=3,
    incarnation=some(0xA1),
    remote_accessible=False,
    pid=5,
    host="",
    transport=None,
    nonce=some(0xB1),
    share=b"",
    offers={},
    proof=b"",
)
REFUSED: Final = m.Refused(code=5_011, text="no röom", authentication=True)
GUARDS: Final = [m.Guarded(slot=3, generation=2**64 - 2), m.Guarded(slot=4, generation=9)]

#: By name in the file: the kind, and what distinguishes it.
MESSAGES: Final[dict[str, m.Message]] = {
    "Hello": msgspec.structs.replace(HELLO),  # with the fields of later releases
    "Hello, least": LEAST_HELLO,
    "Welcome": msgspec.structs.replace(WELCOME),  # as above
    "Welcome, least": LEAST_WELCOME,
    "Refused": REFUSED,
    "TransportChoice": m.TransportChoice(
        transport="shm",
        reason="one höst",
        sequence=7,
        agreed=some(0x10),
        present=True,
        proof=some(0x20, 32),
        share=some(0x40, 32),
        private="cma",
    ),
    "TransportChoice, least": m.TransportChoice(transport="tcp", reason="", sequence=0, agreed=some(0x11)),
    "Linked": m.Linked(sequence=8, agreed=some(0x12), share=some(0x60, 32)),
    "Beat": m.Beat(count=70_000),
    "Ping": m.Ping(id=2**63 - 1),
    "Pong": m.Pong(id=255),
    "Authenticate": m.Authenticate(data=b"\x16\x03\x01 hello"),
    "Authenticated": m.Authenticated(data=b"\x16\x03\x03 hello"),
    "UnlinkRequest": m.UnlinkRequest(id=1),
    "UnlinkAck": m.UnlinkAck(id=2),
    "UnlinkCancel": m.UnlinkCancel(),
    "Resolve": m.Resolve(id=3, push=False, key=(-1, 2**64 - 1, 12), cache_id=0, row=4, budget_ms=1500, consumes=True),
    "Resolve, by id": m.Resolve(id=4, push=True, key=None, cache_id=17, row=5, budget_ms=1600),
    "Resolved": m.Resolved(
        id=5,
        cache_id=18,
        geometry=msgspec.Raw(msgspec.msgpack.encode(GEOMETRY)),
        row=6,
        regions=words(1, 2, size="<u4"),
        offsets=words(4096, 2**40),
        guards=GUARDS,
        pin=77,
    ),
    "Failed": m.Failed(id=6, code=5_012, text="no such cäche"),
    "Release": m.Release(pin=78, first=2, count=40),
    "Consumed": m.Consumed(cache_id=19, row=7, first=3, count=41),
    "Locate": m.Locate(id=7, addresses=words(2**47 - 4096, 8192), nbytes=512),
    "Located": m.Located(
        id=8, cache_ids=words(20, 21), tensors=words(0, 5, size="<u4"), offsets=words(64, 128), allocated=True
    ),
    "Verify": m.Verify(
        id=9,
        cache_id=22,
        pin=79,
        guards=GUARDS[:1],
        push=True,
        extent=163_840,
        first=4,
        count=42,
        runs=words(0, 4096, 8192, 100),
        each_run=False,
        nonce=some(0x80),
        budget_ms=1700,
    ),
    "Verify, each run": m.Verify(
        id=16,
        cache_id=29,
        pin=0,
        guards=GUARDS,
        push=False,
        extent=4096,
        first=5,
        count=1,
        runs=words(0, 1),
        each_run=True,
        nonce=some(0x81),
        budget_ms=2200,
    ),
    "Verified": m.Verified(id=10, digests=some(0xD0, 32)),
    "SocketsDropped": m.SocketsDropped(),
    "TransportAsk": m.TransportAsk(id=11, data=b"\x93\x02\x05\xc3"),
    "TransportSaid": m.TransportSaid(id=12, data=b"\x92\x04\xa0"),
    "Claim": m.Claim(id=13, token=some(0x21), readers=1024, budget_ms=1800),
    "Claimed": m.Claimed(id=14, grant=b"\x01\x97"),
    "ClaimOver": m.ClaimOver(id=15, why="its time was over", ms=1900),
    "ClaimEnded": m.ClaimEnded(token=some(0x22), released=True),
}

HANDLES: Final = {
    "Handle": Handle(cache_id=23, pin=80, guards=GUARDS),
    "KeyHandle": KeyHandle(
        key=(1, 2**64 - 3, 13), geometry=GEOMETRY, pin=FIRST_NAMED_PIN + 1, budget_ms=2000, reported=3
    ),
}

RECEIVER: Final = Address(name="receiver-1", version=2, metadata=b"nixl metadata", package="1.5.1")
#: Asks, then answers.
NIXL: Final[tuple[dict[str, msgspec.Struct], dict[str, msgspec.Struct]]] = (
    {
        "Ask": nixl.Ask(
            move=1,
            write=False,
            direct=True,
            meta=b"a request",
            receiver=RECEIVER,
            bases=words(2**47),
            offsets=words(0, 4096),
            loaded="receiver-2/7",
            budget_ms=2100,
        ),
        "Ask, least": nixl.Ask(
            move=2, write=True, direct=False, meta=b"", receiver=None, bases=b"", offsets=b"", loaded="", budget_ms=0
        ),
        "Done": nixl.Done(move=3, good=True),
        "Meet": nixl.Meet(receiver=RECEIVER),
    },
    {
        "Ready": nixl.Ready(move=4, receiver=RECEIVER, bases=words(2**46), offsets=words(64)),
        "Moved": nixl.Moved(loaded="receiver-3/8"),
        "NixlRefused": nixl.NixlRefused(code=101, text="its time was över", touched=True),
    },
)

RENDEZVOUS_HELLO: Final = RendezvousHello(
    version=6,  # replaced by the present one
    token=some(0x31),
    incarnation=some(0x41),
    cookie=some(0x51),
    guards_nbytes=1 << 26,
    regions=[
        RegionDescriptor(region=1, nbytes=1 << 30, name="device", writable=True),
        RegionDescriptor(region=2, nbytes=1 << 21, name="höst", writable=False),
    ],
    cookie_address=2**46,
    canaries=(2**45, 2**44),
    shut_out=True,
)
REFUSAL: Final = Refusal(reason="of another üser")


class Page(NamedTuple):
    """One page of statistics, and what its header says."""

    pid: int
    cluster_id: int
    published_at: float
    role: str
    truncated: bool
    statistics: metrics.Statistics


PAGE: Final = Page(
    pid=4713,
    cluster_id=2**64 - 3,
    published_at=1_800_000_000.25,
    role="DECODER",
    truncated=False,
    statistics=metrics.Statistics(
        pools=(
            metrics.PoolStatistics(
                name="device",
                capacity_bytes=100,
                used_bytes=61,
                free_bytes=39,
                largest_hole_bytes=30,
                live_allocations=6,
                page_bytes=4096,
                peak_used_bytes=70,
                quarantined_bytes=5,
            ),
        ),
        caches=metrics.CacheStatistics(live=1, deferred=2, draining=3, allocated=4, registered=5, nbytes=6),
        keys=(metrics.KeyStatistics(key="CacheKey(1)", cache_id=7, row=8, age_seconds=9.5, unconsumed_bytes=10),),
        pins=11,
        unknown_releases=12,
        quarantined_bytes=13,
        lost_writers=14,
        grants=metrics.GrantStatistics(active=15, claimed=16, waiting=17, released=18, expired=19, revoked=20, lost=21),
        swap=metrics.SwapStatistics(workers=22, staging_bytes=23),
        links=(
            metrics.LinkStatistics(
                remote_cluster_id=24,
                state="READY",
                transport="shm",
                private_transport="cma",
                reason="one höst",
                peer_pid=25,
                peer_host="host-2",
                read_bytes=26,
                written_bytes=27,
                resolved=28,
                verified_bytes=29,
                sealed=True,
                authenticated_at=30.5,
                progress_seconds=31.5,
                peer_incarnation="ab",
                protocol=11,
            ),
        ),
        redials=(metrics.RedialStatistics(remote_cluster_id=32, address="10.0.0.1:26000", attempts=33, reason="no"),),
        communicators=(
            metrics.CommunicatorStatistics(
                comm_id=34, name="prefill", status="OK", reason="", members=(35, 36), waiting_for=(37,)
            ),
        ),
        operations=(
            metrics.OperationStatistics(
                name="pull_blocks",
                count=38,
                errors=39,
                nbytes=40,
                seconds=41.5,
                failures={"PeerLost": 42},
                transports=(
                    metrics.DurationStatistics(transport="shm", count=43, nbytes=44, seconds=45.5, buckets=(46, 47)),
                ),
            ),
        ),
        links_lost={"silent": 48},
        reconnects=49,
    ),
)
