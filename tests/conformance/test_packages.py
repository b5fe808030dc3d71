"""Transports of other packages: the toy as a package, what imports it, and the errors of others."""

import ast
import logging
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist._option_kinds import transport_entries
from llm_datadist._transport.registry import imported
from llm_datadist.errors import ParamError
from tests.support.ends import ChildEnd, End, Processes
from tests.support.linking import SUCCESS, bytes_move_both_ways, dialled, explain, info, link
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show
from tests.support.source import ROOT
from tests.support.world import World

PAGE: Final = (ROOT / "docs" / "transports.md").read_text()
TOY: Final = Path(__file__).with_name("toy.py").read_text()
(DECLARED,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROJECT: Final = tomllib.loads(DECLARED)["project"]
LOGGED: Final[list[str]] = []  # at an end
NOT_ENABLED: Final = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def installed(folder: Path, source: str = TOY, name: str = PROJECT["name"], **transports: str) -> Path:
    """Make a folder in which a package is installed: its module ``toy``, and the page's metadata unless told others."""
    ((group, declared),) = PROJECT["entry-points"].items()
    metadata = folder / f"{name.replace('-', '_')}-{PROJECT['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {PROJECT['version']}\n")
    lines = [f"{key} = {value}" for key, value in (transports or declared).items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    (folder / "toy.py").write_text(source)
    return folder


# --- what an end is asked to do ---------------------------------------------------------------------------------------
def find(world: World, *folders: Path) -> None:
    sys.path[:0] = map(str, folders)


def lose_own_metadata(world: World) -> None:
    """Leave the folders that have this library's metadata; what the library needs has been imported."""
    sys.path[:] = [each for each in sys.path if not [*Path(each).glob("open_datadist-*.dist-info")]]


def toy_is_imported(world: World) -> bool:
    return "toy" in sys.modules


def module_of(world: World, transport: str) -> str:
    return imported(transport).__module__


def packages_were_read(world: World) -> bool:
    return transport_entries.cache_info().currsize > 0


def listen_to_log(world: World) -> None:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: LOGGED.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("LLM_DATADIST").addHandler(handler)


def logged(world: World) -> list[str]:
    return LOGGED


def name_of(world: World) -> str:
    return world.name


# --- ends -------------------------------------------------------------------------------------------------------------
@contextmanager
def two_ends(*folders: Path) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """Yield a prompt and a decoder in processes that find packages in these folders."""
    processes = Processes()
    ends = processes.child("prompt"), processes.child("decoder")
    for end in ends:
        end.do(find, *folders)
    yield ends
    processes.part()


def start(end: End, transport: str, *, rca: bool = False) -> None:
    role, cluster_id = {"prompt": ("PROMPT", 1), "decoder": ("DECODER", 2)}[end.do(name_of)]
    extra = {"llm.Transport": transport}
    end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", extra=extra, enable_remote_cache_accessible=rca)


def linked(prompt: End, decoder: End, transport: str, *, rca: bool = False) -> None:
    for end in (prompt, decoder):
        start(end, transport, rca=rca)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS


# --- the program and its page -----------------------------------------------------------------------------------------
def test_the_toy_imports_no_name_with_an_underscore() -> None:
    imports = [node for node in ast.walk(ast.parse(TOY)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [f"{getattr(node, 'module', '')}.{alias.name}" for node in imports for alias in node.names]
    assert "llm_datadist.transport.Transport" in names
    assert [name for name in names if "._" in name or name.startswith("_")] == []


def test_the_page_shows_parts_of_the_toy() -> None:
    parts = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(parts) == 3
    assert [part for part in parts if part not in TOY] == []


def test_a_package_moves_bytes_between_two_processes(tmp_path: Path) -> None:
    with two_ends(installed(tmp_path)) as (prompt, decoder):
        linked(prompt, decoder, "toy", rca=True)
        said = decoder.do(explain, 1)
        assert (said.transport, said.private_transport, said.reason) == ("toy", "toy", "toys on both sides")
        bytes_move_both_ways(prompt, decoder)
        large = Spec(tensors=2, rows=8, stride=100_000, blocks=True, memory="private")
        theirs = prompt.do(make, "kv", Spec(**vars(large) | {"blocks_key": BLOCKS}), 1)
        mine = decoder.do(make, "kv", large, 2)
        decoder.do(call, "push_blocks", BLOCKS, Use("kv"), [0, 3, 5, 6], [7, 1, 2, 4])
        same_bytes(prompt.do(show, "kv"), moved(theirs, mine, [(7, 0), (1, 3), (2, 5), (4, 6)]))
        same_bytes(decoder.do(show, "kv"), mine)


# --- what imports a package's transport -------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_an_installed_transport_that_is_not_named_is_never_imported(tmp_path: Path, transport: str) -> None:
    with two_ends(installed(tmp_path)) as (prompt, decoder):
        linked(prompt, decoder, transport)
        bytes_move_both_ways(prompt, decoder)
        assert not prompt.do(toy_is_imported)
        assert not decoder.do(toy_is_imported)
        assert transport == "auto" or not decoder.do(packages_were_read)


@pytest.mark.parametrize(
    ("listener", "dialer", "why"),
    [
        ("auto", "toy", "'toy' cannot reach the peer: not toy: the peer has no toy of this version"),
        ("toy", "auto", "the peer asks for llm.Transport='toy'; this side has inproc, .*, and imports no other"),
    ],
)
def test_no_peer_has_a_transport_imported(tmp_path: Path, listener: str, dialer: str, why: str) -> None:
    with two_ends(installed(tmp_path)) as (prompt, decoder):
        start(prompt, listener)
        start(decoder, dialer)
        assert prompt.port
        assert re.search(f"^LinkRefused: .*{why}", decoder.do(dialled, prompt.port))
        assert [end.do(toy_is_imported) for end in (prompt, decoder)] == [listener == "toy", dialer == "toy"]


def test_a_package_cannot_take_the_place_of_a_transport_of_this_library(tmp_path: Path) -> None:
    broken = installed(tmp_path, "raise RuntimeError", tcp="toy:ToyTransport", nixl="toy:ToyTransport")
    with two_ends(broken) as (prompt, decoder):
        linked(prompt, decoder, "tcp")
        bytes_move_both_ways(prompt, decoder)
        assert decoder.do(module_of, "nixl") == "llm_datadist._transport.nixl.transport"


# --- errors -----------------------------------------------------------------------------------------------------------
def test_an_unknown_name_is_a_wrong_option_and_the_error_has_the_known_ones(tmp_path: Path) -> None:
    with two_ends(installed(tmp_path)) as (_, decoder):
        known = "auto, inproc, shm, cma, nixl, tcp, toy"
        with pytest.raises(ParamError, match=f"llm.Transport: 'pigeon' is unknown, known: {known}$"):
            start(decoder, "pigeon")
        assert not decoder.do(toy_is_imported)


@pytest.mark.parametrize(
    ("source", "declared", "why"),
    [
        ("raise RuntimeError('no such card')", "toy:ToyTransport", "toy:ToyTransport: RuntimeError: no such card"),
        ("import no_such_module", "toy:ToyTransport", "No module named 'no_such_module'"),
        (TOY, "toy:Nothing", "AttributeError: module 'toy' has no attribute 'Nothing'"),
        (TOY, "toy:ToyServer", "is not a Transport of that name"),
        (TOY, "toy:gather", "issubclass"),
        (TOY.replace('name = "toy"', 'name = "tow"'), "toy:ToyTransport", "is not a Transport of that name"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_a_typed_error(
    tmp_path: Path, source: str, declared: str, why: str
) -> None:
    with two_ends(installed(tmp_path, source, toy=declared)) as (_, decoder):
        with pytest.raises(LLMException, match=f"^llm.Transport=toy: .*{re.escape(why)}") as caught:
            start(decoder, "toy")
        assert caught.value.status_code is NOT_ENABLED


def test_names_that_two_packages_declare_or_that_the_handshake_needs_are_refused(tmp_path: Path) -> None:
    folders = installed(tmp_path / "one"), installed(tmp_path / "two", name="another", toy="toy:B", device="toy:C")
    with two_ends(*folders) as (_, decoder):
        for name, why in (("toy", "several packages: toy:ToyTransport, toy:B"), ("device", "the name is taken")):
            with pytest.raises(LLMException, match=why) as caught:
                start(decoder, name)
            assert caught.value.status_code is NOT_ENABLED


# --- without metadata of this library ---------------------------------------------------------------------------------
def test_all_but_nixl_works_where_the_metadata_of_this_library_are_missing(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    with two_ends(tmp_path) as (prompt, decoder):
        for end in (prompt, decoder):
            end.do(lose_own_metadata)
        with pytest.raises(LLMException, match=r"llm\.Transport=nixl: the metadata .* install the package again") as no:
            start(decoder, "nixl")
        assert no.value.status_code is NOT_ENABLED
        decoder.do(listen_to_log)
        linked(prompt, decoder, "auto")
        assert [text for text in decoder.do(logged) if "links do not use NIXL, which is installed" in text]
        bytes_move_both_ways(prompt, decoder)
