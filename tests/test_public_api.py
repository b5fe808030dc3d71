"""What a newcomer imports (interface R23): the star-import with nothing else installed, the older module paths, and the
documented signatures."""

import inspect
import json
import logging
import os
import pydoc
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import pytest

import llm_datadist
import llm_datadist_wrapper
from llm_datadist import errors
from llm_datadist.cache_manager import CacheManager
from llm_datadist.data_type import DataType
from llm_datadist.errors import LLMStatusCode
from llm_datadist.types.enums import LLMRole, Memtype, Placement, PushType, RegisterMemStatus
from llm_datadist.types.grant import Grant
from tests.support.source import ROOT, SOURCE, run

pytestmark = pytest.mark.covers(
    "__all__", "v2_list", "llm_datadist.*", "llm_datadist_*", "LLMDataDist.kv_cache_manager", "compat.check_positive*"
)

_PAGE: Final = (ROOT / "docs" / "interface.md").read_text()
#: The names that interface §1.1 says are exported.
DOCUMENTED: Final = re.findall(r"[A-Z]\w+", _PAGE.partition(" exports 26 names: ")[2].partition(". `v2_list`")[0])

#: interface §6: names, order, defaults and keyword-only parameters of the published pages; no ruling changes them.
CACHE_MANAGER: Final = {
    "allocate_cache": "(self, cache_desc, cache_keys=())",
    "deallocate_cache": "(self, cache)",
    "remove_cache_key": "(self, cache_key)",
    # granted_only: an extension, by keyword only
    "allocate_blocks_cache": "(self, cache_desc, blocks_cache_key=None, *, granted_only=False)",
    "deallocate_blocks_cache": "(self, cache)",
    "copy_cache": "(self, dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)",
    "register_cache": "(self, cache_desc, addrs, cache_keys=(), remote_accessible=None)",
    "register_tensors": "(self, tensors, key=None, *, blocks=None, placement=None, remote_accessible=None, "
    "granted_only=False)",
    "register_blocks_cache": "(self, cache_desc, addrs, blocks_cache_key=None, remote_accessible=None, *, "
    "granted_only=False)",
    "unregister_cache": "(self, cache_id)",
    "copy_blocks": "(self, cache, copy_block_info)",
    "swap_blocks": "(self, src_cache, dst_cache, src_to_dst)",
    "pull_cache": "(self, cache_key, cache, batch_index=0, size=-1, *, src_layer_range=None, dst_layer_range=None, "
    "tensor_num_per_layer=2)",
    # grant: an extension, by keyword only
    "pull_blocks": "(self, src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), *, src_layer_range=None, "
    "dst_layer_range=None, tensor_num_per_layer=2, grant=None)",
    "push_cache": "(self, dst_cache_key, src_cache, src_batch_index=0, src_layer_range=None, dst_layer_range=None, "
    "size=-1, tensor_num_per_layer=2)",
    "push_blocks": "(self, dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), src_layer_range=None, "
    "dst_layer_range=None, tensor_num_per_layer=2)",
    "remap_registered_memory": "(self, mem_infos)",
    "check_cache_key": "(cache_key)",
    "transfer_cache_async": "(self, src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, "
    "dst_block_indices=None, dst_block_memory_size=None)",
}
#: Ours: the same calls, to be awaited.
AWAITED: Final = ["pull_cache", "pull_blocks", "push_cache", "push_blocks", "copy_cache", "copy_blocks", "swap_blocks"]
#: Those that KvCacheManager has too.
COMMON: Final = (
    "allocate_cache allocate_blocks_cache deallocate_cache remove_cache_key copy_cache copy_blocks check_cache_key "
    "transfer_cache_async"
)

#: interface §8; offsets and batch indexes may be left out as in v2.
KV_CACHE_MANAGER: Final = {name: CACHE_MANAGER[name] for name in COMMON.split()} | {
    "allocate_blocks_cache": "(self, cache_desc, blocks_cache_key=None)",
    "is_initialized": "(self)",
    "pull_cache": "(self, cache_key, kv_cache, batch_index=0, size=-1, *, src_layer_range=None, dst_layer_range=None, "
    "src_cache_offset=None, dst_cache_offset=None, tensor_num_per_layer=2)",
    "pull_blocks": "(self, prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, *, src_layer_range=None, "
    "dst_layer_range=None, tensor_num_per_layer=2)",
    "get_cache_tensors": "(self, cache, tensor_index=0)",
    "swap_blocks": "(self, src, dst, src_to_dst)",
}

#: interface §3.
DATADIST: Final = {
    "init": "(self, options)",
    "finalize": "(self)",
    "link_clusters": "(self, clusters, timeout=3000)",
    "unlink_clusters": "(self, clusters, timeout=3000, force=False)",
    "check_link_status": "(self, remote_cluster_id)",
    "link": "(self, comm_name, cluster_rank_info, rank_table)",
    "unlink": "(self, comm_id)",
    "query_register_mem_status": "(self, comm_id)",
    "switch_role": "(self, role, switch_options=None)",
}
#: The last one is an extension.
DATADIST_PROPERTIES: Final = {"cluster_id", "cache_manager", "incarnation", "kv_cache_manager", "listen_port"}

#: Ours: extensions, as docs/interface.md says.
DATADIST_EXTENSIONS: Final = {
    "connect": "(self, address, cluster_id=None, timeout=3000)",
    "drain": "(self, timeout_ms=10000)",
    "statistics": "(self)",
    "explain": "(self, remote_cluster_id)",
    "explain_communicator": "(self, comm_id)",
    "check_integrity": "(self)",
    "ask": "(self, remote_cluster_id, name, body, timeout=3000)",
    "answer_questions": "(self, name, handler)",
    "on_peer_lost": "(self, callback)",
    "link_clusters_async": DATADIST["link_clusters"],
    "unlink_clusters_async": DATADIST["unlink_clusters"],
}

#: interface §1.1: path -> the modules here, and what of each must be importable from it.
PATHS: Final = {
    "llm_datadist.configs": {
        "llm_datadist.config": "LlmConfig LLMConfig",
        "llm_datadist": "LLMRole LLMClusterInfo",
        "llm_datadist.types.cluster": "trans_str_ip",
    },
    "llm_datadist.status": {
        "llm_datadist": "LLMException LLMStatusCode Status",
        "llm_datadist.errors": "code_2_status",
        "llm_datadist.compat": "handle_llm_status raise_if_false raise_if_true",
    },
    "llm_datadist.data_type": {"llm_datadist": "DataType"},
    "llm_datadist.utils.utils": {
        "llm_datadist._checks": "check_uint64 check_uint32 check_uint16 check_uint8 check_int64 check_int32",
        "llm_datadist.compat": "check_isinstance check_dict check_list_uint64 check_list_int32 "
        "check_positive_or_set_default",
    },
    "llm_datadist.v2.llm_types": {
        "llm_datadist": "RegisterMemStatus Cache TransferWithCacheKeyConfig",
        "llm_datadist.types.enums": "PushType",
        "llm_datadist.compat": "check_layer_range",
    },
    "llm_datadist.v2.llm_datadist": {"llm_datadist": "LLMDataDist", "llm_datadist.datadist": "_shutdown_handler"},
    "llm_datadist.v2.llm_utils": {
        "llm_datadist.compat": "layer_range_to_tensor_indices",
        "llm_datadist.config": "parse_listen_ip_info",
    },
    "llm_datadist.v2.cache_manager": {"llm_datadist.cache_manager": "CacheManager"},
    "llm_datadist.v2.config": {"llm_datadist.config": "Options"},
    "llm_datadist_v1": {"llm_datadist": "KvCacheManager KvCache Tensor TensorDesc"},
}

#: Put before a script: imports of anything but the standard library, numpy, msgspec and ourselves fail, as they would
#: where nothing else is installed.
_BARE: Final = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | {"numpy", "msgspec", "llm_datadist", "llm_datadist_v1"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Bare())
for name in ("torch", "typer", "rich", "pytest", "prometheus_client"):
    sys.modules[name] = None
"""

#: A fork for each path, before anything of the library is imported: which of them cannot be imported first?
_EACH_FIRST: Final = """
import json, os, sys
import numpy
wrong = []
for path in PATHS:
    child = os.fork()
    if child == 0:
        __import__(path)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        wrong.append(path)
print(json.dumps(wrong))
"""


def _run(script: str, **environment: str) -> Any:
    """Run a script in a fresh interpreter that complains of nothing; return the JSON it prints last."""
    paths = {"PYTHONPATH": str(SOURCE.parent)}
    done = run(sys.executable, "-W", "error", "-c", textwrap.dedent(script), env=os.environ | paths | environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[-1])


def _strip(function: Callable[..., object]) -> str:
    """Return a signature without its annotations."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _own(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, attribute) of everything public that a class of ours defines or inherits from one of ours."""
    for base in cls.__mro__:
        if base.__module__.startswith("llm_datadist"):
            yield from ((name, value) for name, value in vars(base).items() if not name.startswith("_"))


# --- interface R23 ----------------------------------------------------------------------------------------------------
def test_r23_star_import_and_a_whole_life_work_with_nothing_else_installed() -> None:
    script = """
    import json
    refused = []
    for name in ("torch", "typer", "rich", "pytest", "hypothesis"):
        try:
            __import__(name)
        except ModuleNotFoundError:
            refused.append(name)
    from llm_datadist import *
    names = [name for name in dir() if name[:2] != "__"]
    config = LLMConfig()
    config.device_id, config.enable_cache_manager, config.listen_ip_info = 0, True, "127.0.0.1:0"
    config.mem_pool_cfg = '{"memory_size": 1048576}'
    end = LLMDataDist(LLMRole.MIX, 1)
    end.init(config.generate_options())
    cache = end.cache_manager.allocate_blocks_cache(CacheDesc(2, [4, 8], DataType.DT_FLOAT), BlocksCacheKey(1))
    end.cache_manager.copy_blocks(cache, {0: [1, 2]})
    end.check_integrity()
    operations = {each.name: each.nbytes for each in end.statistics().operations}
    end.finalize()
    print(json.dumps([refused, names, operations]))
    """
    refused, names, operations = _run(_BARE + textwrap.dedent(script))
    assert refused == ["torch", "typer", "rich", "pytest", "hypothesis"], "the interpreter of these tests is not bare"
    assert set(names) - {"Bare", "json", "name", "refused", "sys"} == set(llm_datadist.__all__)
    assert operations == {"allocate_blocks_cache": 0, "copy_blocks": 2 * 2 * 8 * 4}


def test_r23_all_documented_names_are_there_and_no_others_and_v2_list_is_the_first_23_of_26() -> None:
    names = llm_datadist.__all__
    assert set(names) == set(DOCUMENTED) <= set(dir(llm_datadist))
    assert [name for name in DOCUMENTED if not isinstance(getattr(llm_datadist, name), type)] == []
    assert (len(names), len(set(names)), names[:23]) == (26, 26, llm_datadist.v2_list)
    assert set(names[23:]) == {"KvCacheManager", "Tensor", "TensorDesc"}
    beside = {each.__name__: each for each in vars(errors).values() if hasattr(each, "default_status")}
    beside |= {"CacheManager": CacheManager, "Grant": Grant, "__version__": version("open-datadist")}
    assert {name: getattr(llm_datadist, name) for name in beside} == beside
    assert beside.keys() <= set(dir(llm_datadist))
    for name in ("nothing", "kv_cache_manager_", "EngineConfig", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(llm_datadist, name)


@pytest.mark.parametrize(("level", "number"), [("", 0), ("0", logging.DEBUG)])
def test_r23_r30_import_loads_nothing_heavy_or_late_installs_no_handler_and_leaves_the_level_alone(
    level: str, number: int
) -> None:
    script = """
    import json, logging, sys
    before = set(sys.modules)
    import llm_datadist
    log, root = logging.getLogger("LLM_DATADIST"), logging.getLogger()
    shown = [log.level, log.propagate, repr(log.handlers + root.handlers)]
    print(json.dumps([shown, list(llm_datadist._LATE.values()), list(set(sys.modules) - before)]))
    """
    shown, late, loaded = _run(script, ASCEND_GLOBAL_LOG_LEVEL=level)
    assert shown == [number, True, "[]"]
    tops = {name.partition(".")[0] for name in loaded}
    assert "llm_datadist" in tops, "the import was done before the test looked"
    assert not tops & {"torch", "typer", "rich", "asyncio", "pytest", "prometheus_client", "hypothesis"}
    assert not [name for name in loaded if name in late or name.startswith("llm_datadist.tools")]


def test_r23_every_package_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["scikit-build"]["wheel"]["packages"]
    packages = sorted(f"src/{folder.parent.name}" for folder in SOURCE.parent.glob("*/__init__.py"))
    assert sorted(listed) == packages
    assert len(packages) == 3


# --- older module paths ----------------------------------------------------------------------------------------------
def test_r23_a_documented_path_has_the_very_same_object_and_can_be_imported_first() -> None:
    wrong = [
        f"{path}.{name}"
        for path, homes in PATHS.items()
        for home, names in homes.items()
        for name in names.split()
        if getattr(import_module(path), name) is not getattr(import_module(home), name)
    ]
    assert wrong == []
    assert _run(f"PATHS = {[*PATHS]}\n{_EACH_FIRST}", OPENBLAS_NUM_THREADS="1") == []
    for name in ("EngineConfig", "ClusterConfig"):  # without a published contract
        with pytest.raises(ImportError, match=name):
            exec(f"from llm_datadist.v2.config import {name}")


def test_r23_wrapper_constants_are_the_status_codes() -> None:
    from llm_datadist_wrapper import kFailed, kKvCacheNotExist, kSuccess

    assert (kSuccess, kFailed, kKvCacheNotExist) == (0, 0xFFFFFFFF, 0x5010B002)
    constants = {getattr(llm_datadist_wrapper, name) for name in llm_datadist_wrapper.__all__}
    assert constants == set(map(int, LLMStatusCode))
    assert len(llm_datadist_wrapper.__all__) == len(LLMStatusCode)
    assert {"kSuccess", "kFailed"} <= set(dir(llm_datadist_wrapper))
    with pytest.raises(AttributeError, match="has no attribute 'kNothing'"):
        _ = llm_datadist_wrapper.kNothing


# --- signatures ------------------------------------------------------------------------------------------------------
def test_cache_manager_has_the_documented_methods_and_no_others() -> None:
    assert {name: _strip(getattr(CacheManager, name)) for name, _ in _own(CacheManager)} == CACHE_MANAGER | {
        f"{name}_async": CACHE_MANAGER[name] for name in AWAITED
    } | {  # interface §6.6, §6.16 and §6.17
        "register_tensors": "(self, tensors, key=None, *, blocks=None, placement=None, remote_accessible=None, "
        "granted_only=False)",
        "claim_grant": "(self, cluster_id, token, readers=1, wait=True)",
        "release_grant": "(self, cluster_id, token)",
        "digest_blocks": "(self, cache, blocks, nonce)",
    }
    for name in AWAITED:
        call, awaited = getattr(CacheManager, name), getattr(CacheManager, f"{name}_async")
        now, later = inspect.signature(call), inspect.signature(awaited)
        assert list(now.parameters.values()) == list(later.parameters.values())
        assert (now.return_annotation, later.return_annotation) == ("None", "Coroutine[Any, Any, None]")
        assert f"{name}{now}" in pydoc.plain(pydoc.render_doc(call))
        assert call.__annotations__["return"] == "None"
        assert awaited.__annotations__["return"] == "Coroutine[Any, Any, None]"
        assert (call.__name__, awaited.__name__) == (name, f"{name}_async")
        assert re.fullmatch(rf"Await :meth:`{name}`.*; extension\.", awaited.__doc__ or "", re.DOTALL)


def test_kv_cache_manager_has_the_documented_methods_and_no_others() -> None:
    cls = llm_datadist.KvCacheManager
    assert {name: _strip(getattr(cls, name)) for name, _ in _own(cls)} == KV_CACHE_MANAGER


def test_datadist_has_the_documented_methods_and_the_named_extensions() -> None:
    cls = llm_datadist.LLMDataDist
    methods = {name: _strip(value) for name, value in _own(cls) if inspect.isroutine(value)}
    assert methods == DATADIST | DATADIST_EXTENSIONS
    properties = {name for name, value in _own(cls) if isinstance(value, property)}
    assert properties == DATADIST_PROPERTIES
    assert _strip(cls) == "(role, cluster_id=RANDOM, *, config=None, device=None)"
    assert cls.llm_engine_instance is None


def test_value_types_have_the_documented_signatures() -> None:
    of_desc = "(num_tensors, shape, data_type, placement=<Placement.DEVICE: 1>, batch_dim_index=0, "
    signatures: list[tuple[Callable[..., object], str]] = [
        (llm_datadist.CacheDesc, f"{of_desc}seq_len_dim_index=-1, kv_tensor_format=None)"),
        (llm_datadist.Cache.create_cpu_cache, "(cache_desc, addrs)"),
        (llm_datadist.KvCache.create_cpu_cache, "(cache_desc, addrs)"),
        (llm_datadist.Tensor, "(data, tensor_desc=None)"),
        (llm_datadist.Tensor.numpy, "(self, copy=False)"),
        (llm_datadist.TensorDesc, "(dtype, shape)"),
        (llm_datadist.CacheKeyByIdAndIndex, "(cluster_id, cache_id, batch_index=0)"),
        (llm_datadist.MemInfo, "(mem_type, addr, size)"),
        (llm_datadist.TransferConfig, "(dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0)"),
        (llm_datadist.TransferWithCacheKeyConfig, "(cache_key, src_layer_range, dst_layer_range, src_batch_index=0)"),
        (llm_datadist.CacheTask.synchronize, "(self, timeout_in_millis=None)"),
        (llm_datadist.CacheTask.get_results, "(self, timeout_in_millis=None)"),
        (llm_datadist.LLMConfig, "(**settings)"),
        (llm_datadist.LLMClusterInfo, "()"),
        (llm_datadist.Status, "(status)"),
    ]
    for function, signature in signatures:
        assert _strip(function) == signature


def test_enumerations_have_the_documented_values() -> None:
    types: dict[str, int] = {"FLOAT": 0, "FLOAT16": 1, "INT8": 2, "INT32": 3, "UINT8": 4, "INT16": 6, "UINT16": 7}
    types |= {"UINT32": 8, "INT64": 9, "UINT64": 10, "DOUBLE": 11, "BOOL": 12, "STRING": 13, "BF16": 27}
    documented: dict[type[Enum], dict[str, int]] = {
        LLMRole: {"PROMPT": 1, "DECODER": 2, "MIX": 3},
        Placement: {"HOST": 0, "DEVICE": 1},
        RegisterMemStatus: {"OK": 0, "PREPARING": 1, "FAILED": 2},
        Memtype: {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1},
        PushType: {"NO_CACHE_KEY": 0, "BLOCKS_CACHE_KEY": 1, "CACHE_KEY_BY_ID": 2},
        DataType: {f"DT_{name}": value for name, value in types.items()},
    }
    for enum, values in documented.items():
        assert {member.name: member.value for member in enum} == values


# --- documented and annotated ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", [*(getattr(llm_datadist, name) for name in llm_datadist.__all__), CacheManager])
def test_every_public_name_is_documented_and_annotated(cls: type) -> None:
    assert (cls.__doc__ or "").strip(), f"{cls.__name__} has no docstring"
    for name, value in [*_own(cls), ("__init__", vars(cls).get("__init__"))]:
        where = f"{cls.__name__}.{name}"
        parts = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
        functions = [part for part in parts if inspect.isroutine(part)]
        if name != "__init__" and (functions or cls is llm_datadist.LLMConfig):  # its settings are no functions
            assert (inspect.getdoc(value) or "").strip(), f"{where} has no docstring"
        for signature in map(inspect.signature, functions):
            missing = [p.name for p in signature.parameters.values() if p.name != "self" and p.annotation is p.empty]
            assert missing == [], f"{where}: parameters without annotation"
            assert signature.return_annotation is not inspect.Signature.empty, f"{where}: no return annotation"
