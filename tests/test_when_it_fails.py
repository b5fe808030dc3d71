"""docs/when-it-fails.md: each symptom is made to happen, and what is printed is compared with the text of the page."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace as replace_fields

from faults.gated import stopped
from faults.midcopy import release, set_trap, trapped
from faults.page_trap import trap_denied
from faults.relay import Relay, Rewriter
from faults.strangers import full_port, listener, silent_port
from llm_datadist import BlocksCacheKey, CacheKey, DataType, LLMDataDist, LLMRole, errors
from llm_datadist.config import INSECURE_VARIABLE
from llm_datadist.types.grant import Grant
from tests.support.authority import secret_file
from tests.support.ends import Call, ChildEnd, Family, LocalEnd, freeze, frozen, one_family
from tests.support.grants import at_owner, grant
from tests.support.linking import explain, finalize, free_port, info, link, links_of, statistics, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, refill, wait_until
from tests.support.pairs import Pair
from tests.support.source import ROOT, run
from tests.support.users import USER, become
from tests.support.wire import messages, offering
from tests.support.world import World, make_config, residue_of, small_pool

T = TypeVar("T")
PAGED: Final = Spec(blocks=True, blocks_key=BLOCKS)
PLAIN: Final = Spec(blocks=True)
ROWS: Final = Spec(keys=(CacheKey(1, 10),))
PULL: Final = ("pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
ACCESSIBLE, INPROC = {"llm.EnableRemoteCacheAccessible": "1"}, {"llm.Transport": "inproc"}
KINDS: Final = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}


def faults(cell: str, printed: list[str]) -> list[str]:
    """Return what of a cell was not printed: names, and a text ("..." is anything) as a whole line, behind its kind."""
    spans = re.findall("`([^`]+)`", cell)
    kinds, texts = [span for span in spans if span in KINDS], [span for span in spans if " " in span]
    kind = rf"(?:.*[ .])?(?:{'|'.join(kinds)}): " if kinds else ""
    either = "|".join(re.escape(text).replace(r"\.\.\.", ".*") for text in texts)
    wrong = [span for span in spans if " " not in span and not any(span in line for line in printed)]
    if texts and not any(re.fullmatch(f"{kind}(?:{either})", line) for line in printed):
        wrong += texts
    return wrong


#: The first cell of each row.
SYMPTOMS: Final = [
    line.split("|")[1].strip()
    for line in (ROOT / "docs" / "when-it-fails.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| you see |"))
]


def secrets(stage: Stage, name: str) -> dict[str, str]:
    return secret_file(stage.folder / name, a=name.encode() * 32)


class Stage:
    """Where a symptom is made: ends that are gone after ``leaving``, and what was printed."""

    def __init__(
        self, request: pytest.FixtureRequest, folder: Path, log: pytest.LogCaptureFixture, patch: pytest.MonkeyPatch
    ) -> None:
        self._request, self.folder, self.log, self.patch = request, folder, log, patch
        self.printed: list[str] = []
        self.leaving = ExitStack()

    def fails(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call it; what it raises is printed, as Python prints what a program does not catch."""
        with pytest.raises(Exception) as caught:  # noqa: PT011 (compared with the page)
            function(*args, **kwargs)
        self.printed += [line.rstrip("\n") for line in traceback.format_exception_only(caught.value)]

    @property
    def end(self) -> LocalEnd:
        """An end in this process."""
        end: LocalEnd = self._request.getfixturevalue("end")
        return end

    def call_fails(self, *args: Any, **settings: Any) -> None:
        """The decoder of a :meth:`pair` calls; what it raises is printed."""
        self.fails(self.pair(**settings).decoder.do, call, *args)

    def pair(self, transport: str = "inproc", *, source: Spec = PAGED, target: Spec = PLAIN, **settings: Any) -> Pair:
        """Two linked ends; each has a cache "kv"."""
        name = {"inproc": "local_pair", "shm": "shm_pair", "tcp": "tcp_pair"}[transport]
        pair: Pair = self._request.getfixturevalue(name)
        pair.start(**settings)
        pair.prompt.do(make, "kv", source, 1)
        pair.decoder.do(make, "kv", target, 2)
        return pair

    def listens(self, **extra: str) -> int | None:
        """Start one more end in this process, cluster 1; return its port."""
        self.end.do(residue_of)  # it sees what is left here afterwards
        world = World("prompt")
        self.leaving.callback(world.stop)
        return world.start("PROMPT", 1, make_config(listen_ip_info="127.0.0.1:0", extra=extra, **small_pool()))

    def believes(self, name: str) -> int | None:
        """Start one more end, with secrets of its own; return its port."""
        return self.listens(**secrets(self, name))

    def family(self, transport: str = "shm") -> Family:
        """Processes that may be killed and frozen."""
        return self.enter(one_family(transport))

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enter it until the scene is over."""
        self.end.do(residue_of)  # it sees what is left here afterwards
        return self.leaving.enter_context(context)

    def links(
        self, port: int | None, cluster_id: int = 1, timeout: int = 60_000, ip: str = "127.0.0.1", /, **extra: str
    ) -> None:
        """Link an end of this process to that port, in ``timeout`` ms; the log says what came of it."""
        end = self.end
        end.start("DECODER", 2, extra=extra, **small_pool())
        end.do(link, [info(cluster_id, port, ip=ip)], timeout)


#: Those of one call; :func:`scene` has the others. By a part of the cell of the page.
SCENES: Final[dict[str, Callable[[Stage], None]]] = {
    "not initialized": lambda stage: stage.fails(getattr, LLMDataDist(LLMRole.PROMPT, 1), "cache_manager"),
    "not valid JSON": lambda stage: init(stage, mem_pool_cfg='{"memory_size": 1048576'),
    "cannot listen there": lambda stage: init(stage, listen_ip_info=f"127.0.0.1:{stage.listens()}"),
    "memory_size is": lambda stage: init(stage, mem_pool_cfg=f'{{"memory_size": {1 << 46}}}'),
    "unknown to this version": lambda stage: stage.end.start("PROMPT", 1, extra={"llm.Tranport": "shm"}),
    "Connection refused": lambda stage: stage.links(free_port()),
    "nothing answers": lambda stage: stage.links(stage.enter(full_port()), 1, 500),
    "says nothing": lambda stage: stage.links(stage.enter(silent_port()), 1, 500),
    "the listener at": lambda stage: stage.links(stage.listens(), 3),
    "RemoteCacheAccessible differs": lambda stage: stage.links(stage.listens(**ACCESSIBLE)),
    "cannot reach the peer": lambda stage: stage.links(stage.family("auto").born("PROMPT", 1).port, **INPROC),
    "in the handshake": lambda stage: stage.links(stage.enter(listener(lambda sock: sock.close()))),
    "does not speak this protocol": lambda stage: stage.links(
        stage.enter(listener(lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")))
    ),
    "secrets of the two sides differ": lambda stage: stage.links(stage.believes("theirs"), **secrets(stage, "ours")),
    "this listener asks": lambda stage: stage.links(stage.believes("theirs")),
    "rejected this instance's credentials": lambda stage: stage.links(stage.listens(), **secrets(stage, "ours")),
    "block sizes differ": lambda stage: stage.call_fails(*PULL, target=Spec(blocks=True, stride=96)),
    "num_tensors differ": lambda stage: stage.call_fails(*PULL, target=Spec(tensors=2, blocks=True)),
    "push_blocks needs": lambda stage: stage.call_fails("push_blocks", BLOCKS, Use("kv"), [0], [1]),
    "but got None": lambda stage: stage.call_fails("pull_blocks", None, Use("kv"), [0], [1]),
    "no such grant": lambda stage: stage.call_fails("claim_grant", 1, bytes(16), 1, False),
    "cannot hold": lambda stage: stage.fails(stage.pair().prompt.do, make, "big", Spec(stride=1 << 30), 1),
    "is bound to cache": lambda stage: stage.fails(stage.pair(source=ROWS).prompt.do, make, "again", ROWS, 1),
    "outside its pools": lambda stage: stage.call_fails(
        *PULL, transport="shm", source=replace(PAGED, memory="private")
    ),
}


def scene(part: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """The function makes the symptom whose cell has this part."""

    def keep(function: Callable[[Stage], None]) -> Callable[[Stage], None]:
        SCENES[part] = function
        return function

    return keep


# --- at the start -----------------------------------------------------------------------------------------------------
def init(stage: Stage, /, **settings: Any) -> None:
    stage.fails(stage.end.start, "PROMPT", 1, **settings)


@scene("beyond this host")
def _(stage: Stage) -> None:
    stage.patch.delenv(INSECURE_VARIABLE)
    init(stage, listen_ip_info="10.0.0.1:26000")


@scene("must have no access")
def _(stage: Stage) -> None:
    secrets = secret_file(stage.folder / "secrets", a=b"s" * 32)
    (stage.folder / "secrets").chmod(0o640)
    init(stage, extra=secrets)


@scene("package cryptography")
def _(stage: Stage) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "cryptography"]:
        stage.patch.delitem(sys.modules, name)
    stage.patch.setitem(sys.modules, "cryptography", None)
    init(stage, extra=secret_file(stage.folder / "secrets", a=b"s" * 32))


# --- linking ----------------------------------------------------------------------------------------------------------
@scene("cannot resolve")
def _(stage: Stage) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    stage.patch.setattr(socket, "getaddrinfo", unknown)
    stage.links(26000, 1, 60_000, "prefill.test")


@scene("looking up")
def _(stage: Stage) -> None:
    over = threading.Event()
    stage.leaving.callback(over.set)
    stage.patch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait() and [])
    stage.links(26000, 1, 500, "prefill.test")


@scene("there are")
def _(stage: Stage) -> None:
    family, port = stage.family(), stage.listens(**{"llm.MaxLinks": "1"})
    other = family.born("DECODER", 3)
    other.do(link, [info(1, port)])
    stage.links(port)


@scene("no common protocol version")
def _(stage: Stage) -> None:
    prompt = stage.family("tcp").born("PROMPT", 1)
    stage.enter(offering((98, 99)))
    stage.links(prompt.port)


@scene("greetings were changed")
def _(stage: Stage) -> None:
    def change(message: messages.Message) -> messages.Message:
        return replace_fields(message, features=[]) if isinstance(message, messages.Hello) else message

    ways = Rewriter(change), Rewriter(change)
    stage.links(stage.enter(Relay(("127.0.0.1", stage.listens() or 0), ways)).port)


@scene("handshake with")
def _(stage: Stage) -> None:
    with socket.create_connection(("127.0.0.1", stage.listens() or 0)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            scanner.recv(1)


@scene("already linked to")
def _(stage: Stage) -> None:
    pair = stage.pair()
    overall, _ = pair.decoder.do(link, [info(1, pair.prompt.port)])
    stage.printed.append(f"{type(overall.error).__name__}: {overall.error}")


@scene("must have another cluster id")
def _(stage: Stage) -> None:
    port = stage.listens()
    stage.family().born("DECODER", 2).do(link, [info(1, port)])
    stage.links(port)


@scene("where you expected")
def _(stage: Stage) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    port, other = stage.listens(), stage.family("auto").child("of another user")
    other.do(become, USER)
    other.start("DECODER", 2)
    other.do(link, [info(1, port)])
    said = other.do(explain, 1)
    stage.printed.append(f"explain() {said.transport}: {said.reason}")


# --- pulling and pushing ----------------------------------------------------------------------------------------------
BY_KEY: Final = ("pull_cache", CacheKey(1, 10), Use("kv"))


@scene("is not linked; ")
def _(stage: Stage) -> None:
    pair = stage.pair()
    pair.decoder.do(unlink, [info(1, pair.prompt.port)])
    stage.fails(pair.decoder.do, call, *PULL)


@scene("is not bound")
def _(stage: Stage) -> None:
    pair = stage.pair(source=ROWS, target=Spec())
    pair.decoder.do(call, *BY_KEY)
    stage.fails(pair.decoder.do, call, *BY_KEY)


def revoked(world: World) -> bytes:
    grant = world.caches["kv"].grant([1, 6], 30.0)
    grant.revoke()
    return grant.to_bytes()


@scene("has ended: ...")
def _(stage: Stage) -> None:
    pair = stage.pair()
    grant = Grant.from_bytes(pair.prompt.do(revoked))
    stage.fails(pair.decoder.do, partial(call, grant=grant), *PULL)


@scene("link again to recover")
def _(stage: Stage) -> None:
    family, decoder = stage.family(), stage.end
    prompt = family.born("PROMPT", 1)
    prompt.do(make, "kv", ROWS, 1)
    decoder.start("DECODER", 2, sync_kv_timeout=60_000)
    decoder.do(link, [info(1, prompt.port)])
    decoder.do(make, "kv", Spec(), 2)
    freeze(prompt)
    pull = Call(decoder.do, call, *BY_KEY)
    wait_until(lambda: links_of(decoder.world).get(1).requests.waiting == 1)
    family.kill(prompt)
    stage.fails(pull.result)


@scene("raise sync_kv_timeout")
def _(stage: Stage) -> None:
    pair = stage.pair("shm", source=ROWS, target=Spec(), sync_kv_timeout=200)
    with frozen(pair.prompt):
        stage.fails(pair.decoder.do, call, *BY_KEY)


@scene("during the copy")
def _(stage: Stage) -> None:
    if (denied := trap_denied()) is not None:
        pytest.skip(f"no page can be trapped here: {denied}")
    large = Spec(rows=8, stride=1 << 20, blocks=True)
    pool = f'{{"memory_size": {64 << 20}, "page_shift": 16}}'
    pair = stage.pair(source=replace(large, blocks_key=BLOCKS), target=large, mem_pool_cfg=pool)
    with stopped(pair.decoder, "before copy", stage.folder, *PULL) as pull:
        pair.decoder.do(set_trap, "kv", large.tensors - 1, PULL[-1][-1] << 20)
        pull.gate.open()
        wait_until(lambda: pair.decoder.do(trapped))
        pair.prompt.do(forget, "kv")
        pair.decoder.do(release)
        stage.fails(pull.finish)


@scene("was given up")
def _(stage: Stage) -> None:
    pair = stage.pair()
    with stopped(pair.decoder, "before copy", stage.folder, *PULL) as pull:
        pair.decoder.do(unlink, [info(1, pair.prompt.port)], 100, True)
        stage.fails(pull.finish)


@scene("checksum mismatch")
def _(stage: Stage) -> None:
    pair = stage.pair(extra={"llm.Checksum": "1"})
    with stopped(pair.decoder, "after copy", stage.folder, *PULL) as pull:
        pair.prompt.do(refill, "kv", 9)
        stage.fails(pull.finish)


@scene("has failed in this process")
def _(stage: Stage) -> None:
    code = """if True:
        import os
        os.environ.pop("FAKECUDA_REPORT", None)  # what a lost GPU has cannot be given back
        from llm_datadist import LLMDataDist, LLMRole, CacheDesc, DataType, Placement
        from tests.support import fakecuda
        from tests.support.world import make_config
        fake, engine = fakecuda.load(), LLMDataDist(LLMRole.DECODER, 2)
        engine.init(make_config(extra={"llm.DeviceMemory": "cuda"}))
        one = CacheDesc(1, [2, 16], DataType.DT_FLOAT, Placement.DEVICE)
        cache = engine.cache_manager.allocate_blocks_cache(one)
        fake.fail("cuMemcpyAsync", 700)
        for _ in range(2):
            try:
                engine.cache_manager.copy_blocks(cache, {0: [1]})
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
        engine.finalize()"""
    stage.printed += run(sys.executable, "-c", code).stdout.splitlines()


@scene("rows or blocks are")
def _(stage: Stage) -> None:
    halves = Spec(blocks=True, data_type=DataType.DT_FLOAT16)
    pair = stage.pair(target=halves)
    pair.decoder.do(call, *PULL)
    pair.decoder.stop()
    pair.decoder.start("DECODER", 2, extra={"llm.StrictTypes": "1"})
    pair.link()
    pair.decoder.do(make, "kv", halves, 2)
    stage.fails(pair.decoder.do, call, *PULL)


# --- memory -----------------------------------------------------------------------------------------------------------
@scene("quarantined_bytes")
def _(stage: Stage) -> None:
    owner, pusher = stage.end, stage.family("shm").child("decoder")
    for end, role, number in ((owner, "PROMPT", 1), (pusher, "DECODER", 2)):
        extra = {"llm.Transport": "shm", "llm.PeerTimeout": "600"}
        end.start(role, number, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True, extra=extra)
        end.do(make, "kv", Spec(blocks=True, blocks_key=BlocksCacheKey(number, 0)), number)
    pusher.do(link, [info(1, owner.port)])
    with stopped(pusher, "before write", stage.folder, "push_blocks", BLOCKS, Use("kv"), [0], [1]) as push:
        with frozen(pusher):
            owner.do(forget, "kv")
            stage.printed.append(f"quarantined_bytes={owner.do(statistics).quarantined_bytes}")
            assert owner.do(statistics).quarantined_bytes > 0
        with pytest.raises(errors.CacheNotFound):
            push.finish()
    wait_until(lambda: owner.do(statistics).quarantined_bytes == 0)


@scene("a handle of")
def _(stage: Stage) -> None:
    pair = stage.pair()
    cache = pair.prompt.do(lambda world: world.caches["kv"])
    stage.fails(pair.decoder.do, call, "pull_blocks", BLOCKS, cache, [0], [1])


@scene("is a fork")
def _(stage: Stage) -> None:
    pair = stage.pair("shm")
    pair.prompt.do(grant, [1, 2])
    kind, text = pair.prompt.do(at_owner, "revoke")
    stage.printed.append(f"{kind}: {text}")


@scene("is still in use")
def _(stage: Stage) -> None:
    pair = stage.pair(target=Spec(blocks=True, memory="private"), sync_kv_timeout=200)
    with stopped(pair.decoder, "before copy", stage.folder, *PULL):
        stage.fails(pair.decoder.do, forget, "kv")


def truncate_under_a_cache(world: World, path: str) -> None:
    with open(path, "w+b") as file:
        file.truncate(8 * PAGESIZE)
        world.memory["file"] = mapped = mmap(file.fileno(), 0)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        desc = Spec(1, 8, PAGESIZE, blocks=True).desc
        world.caches["file"] = world.cm.register_blocks_cache(desc, [address])
        file.truncate(0)


@scene("SIGBUS")
def _(stage: Stage) -> None:
    end = ChildEnd("prompt")
    stage.leaving.callback(end.kill)
    end.start("PROMPT", 1)
    end.do(truncate_under_a_cache, str(stage.folder / "mapped"))
    end.begin(call, "copy_blocks", Use("file"), {0: [1]})
    wait_until(lambda: end.code is not None)
    stage.printed.append(signal.Signals(-(end.code or 0)).name)


# --- the program ------------------------------------------------------------------------------------------------------
@scene("belongs to a finalized")
def _(stage: Stage) -> None:
    stage.end.start("PROMPT", 1)
    manager = stage.end.world.cm
    stage.end.do(finalize)
    stage.fails(manager.remove_cache_key, CacheKey(1, 10))


@scene("is illegal when")
def _(stage: Stage) -> None:
    stage.end.start("PROMPT", 1)
    world = stage.end.world
    kept, freed = (world.cm.allocate_blocks_cache(PLAIN.desc) for _ in range(2))
    find = world.probe.engine.caches.registry.find
    life, over = (find(cache_id=each.cache_id)[0].life for each in (kept, freed))
    world.cm.deallocate_blocks_cache(freed)
    live, life.state = life.state, over.state
    stage.fails(world.cm.deallocate_blocks_cache, kept)
    life.state = live


@scene("ended: the peer")
def _(stage: Stage) -> None:
    family, port = stage.family(), stage.listens()
    decoder = family.born("DECODER", 2)
    decoder.do(link, [info(1, port)])
    family.kill(decoder)
    wait_until(lambda: "ended: " in stage.log.text)


@scene("silent for")
def _(stage: Stage) -> None:
    family = stage.family("auto")
    prompt = family.born("PROMPT", 1)
    stage.links(prompt.port, **{"llm.PeerTimeout": "30"})
    with frozen(prompt):
        wait_until(lambda: "silent for" in stage.log.text, 30)


@scene("llm-datadist needs")
def _(stage: Stage) -> None:
    code = "import sys; sys.modules['typer'] = None; from llm_datadist.tools.cli import main; sys.exit(main())"
    stage.printed += run(sys.executable, "-c", code).stderr.splitlines()


# --- the page ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda each: each[:60])
def test_a_symptom_of_the_page_happens_and_is_printed_as_the_page_says(
    symptom: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (make_it,) = (function for part, function in SCENES.items() if part in symptom)
    caplog.set_level(logging.INFO)
    stage = Stage(request, tmp_path, caplog, monkeypatch)
    with stage.leaving:
        make_it(stage)
    printed = stage.printed + caplog.messages
    assert faults(symptom, printed) == [], "\n".join(printed)


def test_the_page_has_every_exception_and_a_row_for_each_scene_and_what_is_not_printed_is_found() -> None:
    seen = {word for symptom in SYMPTOMS for word in re.findall(r"\w+", symptom)}
    assert KINDS - seen == {"TransferAborted"}, "of which a transfer makes NotLinked or PeerLost"
    assert [part for part in SCENES if sum(part in symptom for symptom in SYMPTOMS) != 1] == []
    for line, count in (
        ("llm_datadist.errors.KeyInUse: key 1 is bound to cache 1", 0),
        ("link 1: KeyInUse: key 1 is bound to cache 1", 0),
        ("CacheError: key 1 is bound to cache 1", 2),
        ("KeyInUse: key 1 is bound", 1),
    ):
        assert len(faults("`KeyInUse`: `... is bound to ...`", [line])) == count
