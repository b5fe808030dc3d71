"""Engine: the parts of one ``init``, built in order and closed in reverse.

If a part cannot be built, those before it are closed and ``init`` fails.
"""

from __future__ import annotations

import errno
import secrets
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_datadist import _native
from llm_datadist._cache.local_caches import LocalCaches
from llm_datadist._checks import is_loopback, typed_memory_error
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages
from llm_datadist._links.communicators import CommunicatorPlan
from llm_datadist._links.credentials import Credentials
from llm_datadist._links.handshake import Endpoint
from llm_datadist._links.listener import bind
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.manager import LinkManager
from llm_datadist._links.ranktable import RankTable
from llm_datadist._links.versions import VERSIONS, release
from llm_datadist._log import logger
from llm_datadist._memory.cuda import CudaDevice
from llm_datadist._memory.device import Device, HostDevice
from llm_datadist._statistics_page import StatisticsPage
from llm_datadist._transfer import wire
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.addresses import LocateTarget
from llm_datadist._transfer.checksum import ChecksumTarget
from llm_datadist._transfer.grants import Grants, on_late_claim
from llm_datadist._transfer.initiator import Initiator
from llm_datadist._transfer.layerwise import Tasks
from llm_datadist._transfer.local_copy import LocalCopies, SwapEngine
from llm_datadist._transfer.meters import Meters
from llm_datadist._transfer.questions import Questions
from llm_datadist._transfer.target import Target
from llm_datadist._transfer.workers import Workers
from llm_datadist._transport.registry import Transports
from llm_datadist._transport.transport import Context
from llm_datadist.config import LISTEN
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, StateError
from llm_datadist.metrics import Statistics
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._cache.local_caches import Storage
    from llm_datadist._links.link import Link
    from llm_datadist.config import Options
    from llm_datadist.types import LLMRole


def _device_of(options: Options, given: Device | None) -> Device:
    """Return the device behind Placement.DEVICE; LLMException (``LLM_FEATURE_NOT_ENABLED``): it is not there."""
    if options.device_memory == "host" and (given is None or given.ordinal < 0):
        return given or HostDevice()
    if isinstance(given, CudaDevice) and options.device_mover in ("auto", given.mover):
        return given
    return CudaDevice(options.device_id if given is None else given.ordinal, options.device_mover)


class Engine:
    """Parts of an instance; ``alive`` until ``finalize``. Threads: any."""

    def __init__(self, cluster_id: int, options: Options, device: Device | None = None) -> None:
        self.cluster_id = cluster_id
        self.options = options
        self.meters = Meters()
        if options.tracing:
            from llm_datadist._transfer.tracing import TracedMeters

            self.meters = TracedMeters()
        self.alive = True
        try:
            with typed_memory_error("init"):
                found = _device_of(options, device)
                if options.listen is not None:
                    options.check_reach(LISTEN, options.listen[0])
                self._credentials = None if options.credentials is None else Credentials(options.credentials)
                self._build(found)
        except LLMException:
            raise
        except (OSError, RuntimeError) as error:  # mostly no descriptors or threads left
            raise LLMException(f"init: {error}", status_code=LLMStatusCode.LLM_FAILED) from error

    def _build(self, device: Device) -> None:
        """Build the parts, with their ends on the stack that :meth:`close` unwinds."""
        options = self.options
        with ExitStack() as undo:
            own = undo.enter_context
            # The port before the parts, because it may be busy.
            listening = None if options.listen is None else own(closing(bind(options.listen)))
            self.caches = own(closing(LocalCaches(options, device, HostDevice(), secrets.token_bytes(16))))
            threads = options.copy_threads or _native.usable_cpus()
            self._copy_pool = own(closing(_native.CopyPool(threads))) if threads > 1 else None
            self._access = access = AccessPolicy(self.caches, options.peer_policy)
            self.swap = own(closing(SwapEngine()))
            self.local = LocalCopies(self.caches, self.swap, self._copy_pool)
            publishes = options.statistics_page
            self.page = own(closing(StatisticsPage(self.cluster_id, self._published))) if publishes else None
            self._control = ControlLoop()
            undo.callback(self._control.stop)
            self.grants = own(closing(Grants(self.cluster_id, self.caches, access, self._call_at)))
            self.caches.freed = self.grants.drop_cache
            self.questions = Questions(access)
            self.checksums = own(closing(ChecksumTarget(self.caches, access, self._copy_pool)))
            self.target = Target(self.caches, access, self._control.expect)
            self.transports = own(closing(Transports(Context(options, self.caches.exports, self.target, wire))))
            self.caches.quiesce = self._quiesce
            # Joined after the links have ended, which ends what the threads wait for.
            self.workers = own(closing(Workers()))
            self.tasks = Tasks(options.sync_kv_timeout_ms)
            undo.callback(self.tasks.join)
            self.links = self._make_links()
            self.grants.link_to = self.links.get
            undo.callback(self.links.stop, "finalized")
            self.initiator = Initiator(self.links, self._copy_pool, options.checksum, options.strict_types)
            undo.callback(self.tasks.stop)
            undo.callback(self.workers.stop)
            self._control.start()
            undo.callback(self._control.call, self.transports.stop)
            self._control.call(self.transports.start, self._control.loop)
            self.links.start(listening)
            if self.page is not None:
                self._control.call(self.page.start, self._control.loop)
                undo.callback(self._control.call, self.page.stop)
            self._undo = undo.pop_all()
        self._warn_if_open()

    def deadline(self) -> Deadline:
        return Deadline(self.options.sync_kv_timeout_ms)

    def _quiesce(self, storage: Storage) -> None:
        """Stop transports from using memory whose guards have advanced."""
        self.transports.quiesce(storage.tag, storage.tensors.bases if storage.non_pool else None)

    def _call_at(self, when: float, function: Callable[[], None]) -> None:
        with suppress(StateError):  # finalized, which ends all grants
            self._control.post(self._control.loop.call_at, when, function)

    def _make_links(self) -> LinkManager:
        options = self.options
        handlers: dict[type[messages.Message], Callable[[Link, Any], None]] = {
            messages.Resolve: self.target.on_resolve,
            messages.Resolved: self.target.on_late_answer,
            messages.Release: self.target.on_release,
            messages.Consumed: self.target.on_consumed,
            messages.SocketsDropped: wire.on_sockets_dropped,
            messages.TransportAsk: wire.on_ask,
            messages.TransportSaid: wire.on_late_answer,
            messages.Verify: self.checksums.on_verify,
            messages.Claim: self.grants.on_claim,
            messages.Claimed: on_late_claim,
            messages.ClaimEnded: self.grants.on_claim_ended,
            messages.Question: self.questions.on_question,
            messages.Locate: LocateTarget(self.caches, self._access, allowed=options.write_by_address).on_locate,
        }
        endpoint = Endpoint(
            self.cluster_id,
            options.remote_accessible,
            self.transports,
            self._credentials,
            check_reach=partial(options.check_reach, "link"),
            require_link=self._access.require_link,
            offered_to=self._access.offered_to,
            role=lambda: self.options.role.name,
            users=options.linked_users,
        )
        return LinkManager(self._control, endpoint, options, handlers, self._on_link_end, self._on_tick)

    def open_communicator(self, name: str, ranks: dict[int, int], rank_table: str) -> int:
        self.links.refuse_new()
        table = RankTable.parse(rank_table)
        addresses = {cluster_id: table.address(rank, cluster_id) for cluster_id, rank in ranks.items()}
        options = self.options
        for host in addresses.values():
            options.check_reach("rank_table", host)
        plan = CommunicatorPlan(name, ranks, addresses, table.digest, options.link_total_time, options.link_retry_count)
        return self.links.communicators.open(plan)

    def switch(self, role: LLMRole, listen: tuple[str, int] | None) -> None:
        """Change the role; listen at ``listen``, or not at all if None (interface §3.6).

        Raises:
            StateError: A link exists or is being made (``LLM_EXIST_LINK``).
            LinkError: The new address cannot be bound. The role and the old listener stay; the text says if that was
                lost.
        """
        self.links.await_unlinks()
        self.links.refuse_if_linked()
        now = self.links.listen_address
        same = now is None if listen is None else now is not None and listen in (now, self.options.listen)
        if not same:
            self._listen_at(listen, now)
        self.options = replace(self.options, role=role, listen=listen)

    def _listen_at(self, wanted: tuple[str, int] | None, now: tuple[str, int] | None) -> None:
        """Bind the new address before closing the old listener, unless that one occupies it."""
        if wanted is None:
            self.links.listen(None)
            return
        self.options.check_reach(LISTEN, wanted[0])
        try:
            listening = bind(wanted)
        except LinkError as error:
            busy = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if now is None or now[1] != wanted[1] or not busy:
                raise
            self._listen_in_place(wanted, now)
        else:
            try:
                self.links.listen(listening)
            except StateError:
                listening.close()
                raise
        self._warn_if_open()

    def _listen_in_place(self, wanted: tuple[str, int], now: tuple[str, int]) -> None:
        """Close the old listener, then bind the new address, which conflicts on the same port.

        No link made since stops the new listener, because there would be none.
        """
        self.links.listen(None)
        try:
            listening = bind(wanted)
        except LinkError as error:
            try:
                old = bind(now)
            except LinkError as again:
                self.options = replace(self.options, listen=None)
                raise LinkError(
                    f"{error}; and the old address cannot be bound again, this instance no longer listens: {again}",
                    status_code=error.status_code,
                ) from error
            self.links.listen(old, even_if_linked=True)
            raise
        self.links.listen(listening, even_if_linked=True)

    def _warn_if_open(self) -> None:
        address = self.links.listen_address
        if self._credentials is None and address is not None and not is_loopback(address[0]):  # llm.Insecure
            logger.warning(
                "listening on %s without authentication: any process that reaches this port can read, and may write, "
                "published caches",
                show_address(address),
            )

    def close(self) -> None:
        """Close all parts in reverse order without telling peers (interface §3.2). Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._undo.close()

    def abandon(self) -> None:
        """Mark the engine as dead in a forked child, which has none of its threads."""
        self.alive = False
        self.links.abandon()
        if self.page is not None:
            self.page.close()
        self.transports.abandon()

    def _on_link_end(self, link: Link) -> None:
        for part in (self.target, self.checksums, self.grants, self.questions):
            part.drop_peer(link)
        self.caches.sweep()

    def _on_tick(self, now: float) -> None:
        self.caches.apply(self.caches.registry.expire(now))
        self.grants.expire_claims(now)
        self.caches.sweep()

    def _published(self) -> tuple[str, Statistics]:
        return self.options.role.name, self.statistics()

    def statistics(self) -> Statistics:
        caches, keys, pins = self.caches.registry.statistics()
        quarantined = self.caches.quarantined_bytes()  # before the pools are read, because it sweeps
        return Statistics(
            pools=tuple(pool.statistics() for pool in self.caches.pools),
            caches=caches,
            keys=keys,
            pins=pins,
            unknown_releases=self.caches.registry.unknown_releases,
            quarantined_bytes=quarantined,
            lost_writers=self.caches.writers.lost,
            grants=self.grants.statistics(),
            swap=self.swap.statistics(),
            links=tuple(link.statistics() for link in self.links.all()),
            redials=self.links.reconnects(),
            communicators=self.links.communicators.statistics(),
            operations=self.meters.totals(),
            links_lost=self.links.lost,
            lost_peers=self.links.lost_peers,
            reconnects=self.links.reconnected,
            devices=(device.statistics(),) if isinstance(device := self.caches.device, CudaDevice) else (),
            tables={"ended_grants": self.grants.ended, "peer_secrets": len(self.links.endpoint.peer_secrets)},
            release=release(),
            role=self.options.role.name,
            protocol=VERSIONS[1],
            transport=self.transports.asked or "",
        )

    def check_integrity(self) -> None:
        self.caches.check_integrity()
        self.links.check_integrity()
        self.grants.check_integrity()
