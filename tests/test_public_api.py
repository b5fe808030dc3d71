"""What a newcomer imports: interface R23's star-import with nothing else installed, and the documented signatures."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

import pytest

import llm_datadist
from llm_datadist.cache_manager import CacheManager
from llm_datadist.data_type import DataType
from llm_datadist.errors import LLMStatusCode
from llm_datadist.types.enums import LLMRole, Memtype, Placement, RegisterMemStatus
from tests.support.source import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from enum import Enum

pytestmark = pytest.mark.covers("__all__", "v2_list")

#: interface §1.1, in its order.
DOCUMENTED: Final = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
    "TensorDesc",
    "Tensor",
    "KvCacheManager",
]

#: interface §6, names, order, defaults and keyword-only as printed there; the RULINGS change none of them.
CACHE_MANAGER: Final = {
    "allocate_cache": "(self, cache_desc, cache_keys=())",
    "deallocate_cache": "(self, cache)",
    "remove_cache_key": "(self, cache_key)",
    "allocate_blocks_cache": "(self, cache_desc, blocks_cache_key=None)",
    "deallocate_blocks_cache": "(self, cache)",
    "copy_cache": "(self, dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)",
    "register_cache": "(self, cache_desc, addrs, cache_keys=(), remote_accessible=None)",
    "register_blocks_cache": "(self, cache_desc, addrs, blocks_cache_key=None, remote_accessible=None)",
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
}

#: interface §8, as printed there; offsets and batch indexes may be left out as in v2.
KV_CACHE_MANAGER: Final = {
    "is_initialized": "(self)",
    "allocate_cache": "(self, cache_desc, cache_keys=())",
    "allocate_blocks_cache": "(self, cache_desc, blocks_cache_key=None)",
    "deallocate_cache": "(self, cache)",
    "remove_cache_key": "(self, cache_key)",
    "pull_cache": "(self, cache_key, kv_cache, batch_index=0, size=-1, *, src_layer_range=None, dst_layer_range=None, "
    "src_cache_offset=None, dst_cache_offset=None, tensor_num_per_layer=2)",
    "pull_blocks": "(self, prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, *, src_layer_range=None, "
    "dst_layer_range=None, tensor_num_per_layer=2)",
    "copy_cache": "(self, dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)",
    "copy_blocks": "(self, cache, copy_block_info)",
    "get_cache_tensors": "(self, cache, tensor_index=0)",
    "swap_blocks": "(self, src, dst, src_to_dst)",
    "check_cache_key": "(cache_key)",
    "transfer_cache_async": "(self, src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, "
    "dst_block_indices=None, dst_block_memory_size=None)",
}
CACHE_MANAGER["transfer_cache_async"] = (
    "(self, src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, dst_block_indices=None, "
    "dst_block_memory_size=None)"
)
#: Ours: the same calls, to be awaited.
AWAITED: Final = ["pull_cache", "pull_blocks", "push_cache", "push_blocks", "copy_cache", "copy_blocks", "swap_blocks"]

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
DATADIST_PROPERTIES: Final = {"cluster_id", "cache_manager", "kv_cache_manager"}

#: Ours: named as extensions in docs/extensions.md.
DATADIST_EXTENSIONS: Final = {
    "statistics": "(self)",
    "explain": "(self, remote_cluster_id)",
    "explain_communicator": "(self, comm_id)",
    "check_integrity": "(self)",
    "link_clusters_async": DATADIST["link_clusters"],
    "unlink_clusters_async": DATADIST["unlink_clusters"],
}
DATADIST_EXTENSION_PROPERTIES: Final = {"listen_port"}

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


def _run(script: str) -> Any:
    """Run a script in a fresh interpreter; return the JSON it prints last."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
    )
    assert done.returncode == 0, done.stderr
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


def _callables(cls: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield (name, function) of the constructor, methods and property getters and setters that we wrote."""
    members = [*_own(cls), *((name, vars(cls)[name]) for name in ("__init__",) if name in vars(cls))]
    for name, value in members:
        if isinstance(value, property):
            yield from ((name, function) for function in (value.fget, value.fset) if function is not None)
        elif isinstance(value, staticmethod | classmethod):
            yield name, value.__func__
        elif inspect.isroutine(value):
            yield name, value


PUBLIC_CLASSES: Final = [getattr(llm_datadist, name) for name in llm_datadist.__all__] + [CacheManager]


# --- interface R23 ----------------------------------------------------------------------------------------------------


def test_r23_star_import_works_with_nothing_else_installed() -> None:
    script = "import json\nfrom llm_datadist import *\nprint(json.dumps(sorted(n for n in dir() if n[:2] != '__')))"
    names = set(_run(_BARE + script)) - {"Bare", "json", "name", "sys"}
    assert names == set(llm_datadist.__all__)


def test_r23_a_whole_life_works_with_nothing_else_installed() -> None:
    script = """
    import json
    from llm_datadist import *
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
    print(json.dumps(operations))
    """
    assert _run(_BARE + textwrap.dedent(script)) == {"allocate_blocks_cache": 0, "copy_blocks": 2 * 2 * 8 * 4}


def test_r23_the_bare_interpreter_of_these_tests_refuses_other_packages() -> None:
    script = """
    import json
    refused = []
    for name in ("torch", "typer", "rich", "pytest", "hypothesis"):
        try:
            __import__(name)
        except ModuleNotFoundError:
            refused.append(name)
    print(json.dumps(refused))
    """
    assert _run(_BARE + textwrap.dedent(script)) == ["torch", "typer", "rich", "pytest", "hypothesis"]


def test_r23_all_documented_names_are_there_and_no_others() -> None:
    assert set(llm_datadist.__all__) == set(DOCUMENTED)
    assert len(llm_datadist.__all__) == len(set(llm_datadist.__all__))
    assert [name for name in DOCUMENTED if not isinstance(getattr(llm_datadist, name), type)] == []


def test_r23_what_is_loaded_late_is_not_loaded_by_the_import() -> None:
    loaded = _run(
        """
        import json, sys
        import llm_datadist
        print(json.dumps([sorted(llm_datadist._LATE.values()), sorted(sys.modules)]))
        """
    )
    assert set(loaded[0]) & set(loaded[1]) == set()


def test_import_loads_neither_torch_nor_the_command_line_nor_asyncio() -> None:
    loaded = _run(
        """
        import json, sys
        before = set(sys.modules)
        import llm_datadist
        print(json.dumps(sorted(set(sys.modules) - before)))
        """
    )
    tops = {name.partition(".")[0] for name in loaded}
    assert "llm_datadist" in tops, "the import was done before the test looked"
    assert not tops & {"torch", "typer", "rich", "asyncio", "pytest", "prometheus_client", "hypothesis"}
    assert not [name for name in loaded if name.startswith(("llm_datadist.cli", "llm_datadist.demo"))]


# --- signatures ------------------------------------------------------------------------------------------------------


def test_cache_manager_has_the_documented_methods_and_no_others() -> None:
    assert {name: _strip(getattr(CacheManager, name)) for name, _ in _own(CacheManager)} == CACHE_MANAGER | {
        f"{name}_async": CACHE_MANAGER[name] for name in AWAITED
    }


def test_kv_cache_manager_has_the_documented_methods_and_no_others() -> None:
    cls = llm_datadist.KvCacheManager
    assert {name: _strip(getattr(cls, name)) for name, _ in _own(cls)} == KV_CACHE_MANAGER


def test_datadist_has_the_documented_methods_and_the_named_extensions() -> None:
    cls = llm_datadist.LLMDataDist
    methods = {name: _strip(value) for name, value in _own(cls) if inspect.isroutine(value)}
    assert methods == DATADIST | DATADIST_EXTENSIONS
    properties = {name for name, value in _own(cls) if isinstance(value, property)}
    assert properties == DATADIST_PROPERTIES | DATADIST_EXTENSION_PROPERTIES
    assert _strip(cls) == "(role, cluster_id, *, device=None)"
    assert cls.llm_engine_instance is None


@pytest.mark.parametrize(
    ("cls", "signature"),
    [
        (
            llm_datadist.CacheDesc,
            "(num_tensors, shape, data_type, placement=<Placement.DEVICE: 1>, batch_dim_index=0, "
            "seq_len_dim_index=-1, kv_tensor_format=None)",
        ),
        (llm_datadist.Cache.create_cpu_cache, "(cache_desc, addrs)"),
        (llm_datadist.KvCache.create_cpu_cache, "(cache_desc, addrs)"),
        (llm_datadist.Tensor, "(data, tensor_desc=None)"),
        (llm_datadist.Tensor.numpy, "(self, copy=False)"),
        (llm_datadist.TensorDesc, "(dtype, shape)"),
        (llm_datadist.CacheKeyByIdAndIndex, "(cluster_id, cache_id, batch_index=0)"),
        (llm_datadist.MemInfo, "(mem_type, addr, size)"),
        (llm_datadist.TransferConfig, "(dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0)"),
        (
            llm_datadist.TransferWithCacheKeyConfig,
            "(cache_key, src_layer_range, dst_layer_range, src_batch_index=0)",
        ),
        (llm_datadist.CacheTask.synchronize, "(self, timeout_in_millis=None)"),
        (llm_datadist.CacheTask.get_results, "(self, timeout_in_millis=None)"),
        (llm_datadist.LLMConfig, "()"),
        (llm_datadist.LLMClusterInfo, "()"),
        (llm_datadist.Status, "(status)"),
    ],
)
def test_value_types_have_the_documented_signatures(cls: Callable[..., object], signature: str) -> None:
    assert _strip(cls) == signature


def test_cache_keys_take_the_documented_arguments_by_position_and_keyword() -> None:
    key = llm_datadist.CacheKey(1, 2, 3, 4)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 2, 3, 4)
    assert key == llm_datadist.CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    default = llm_datadist.CacheKey(cluster_id=1, req_id=2)
    assert (default.model_id, default.prefix_id) == (0, 2**64 - 1)
    assert llm_datadist.BlocksCacheKey(1) == llm_datadist.BlocksCacheKey(prompt_cluster_id=1, model_id=0)


@pytest.mark.parametrize(
    ("enum", "values"),
    [
        (LLMRole, {"PROMPT": 1, "DECODER": 2, "MIX": 3}),
        (Placement, {"HOST": 0, "DEVICE": 1}),
        (RegisterMemStatus, {"OK": 0, "PREPARING": 1, "FAILED": 2}),
        (Memtype, {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}),
        (
            DataType,
            {
                "DT_FLOAT": 0,
                "DT_FLOAT16": 1,
                "DT_INT8": 2,
                "DT_INT32": 3,
                "DT_UINT8": 4,
                "DT_INT16": 6,
                "DT_UINT16": 7,
                "DT_UINT32": 8,
                "DT_INT64": 9,
                "DT_UINT64": 10,
                "DT_DOUBLE": 11,
                "DT_BOOL": 12,
                "DT_STRING": 13,
                "DT_BF16": 27,
            },
        ),
    ],
)
def test_enumerations_have_the_documented_values(enum: type[Enum], values: dict[str, int]) -> None:
    assert {member.name: member.value for member in enum} == values


def test_status_codes_are_ints_with_the_documented_text() -> None:
    assert int(LLMStatusCode.LLM_SUCCESS) == 0
    assert int(LLMStatusCode.LLM_PARAM_INVALID) == 0x5010B005
    assert str(LLMStatusCode.LLM_TIMEOUT) == "LLMStatusCode.LLM_TIMEOUT"


# --- documented and annotated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", PUBLIC_CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_name_is_documented_and_annotated(cls: type) -> None:
    assert (cls.__doc__ or "").strip(), f"{cls.__name__} has no docstring"
    for name, value in _own(cls):
        documented = not (inspect.isroutine(value) or isinstance(value, property | staticmethod | classmethod))
        assert documented or (inspect.getdoc(value) or "").strip(), f"{cls.__name__}.{name} has no docstring"
    for name, function in _callables(cls):
        where = f"{cls.__name__}.{name}"
        signature = inspect.signature(function)
        missing = [p.name for p in signature.parameters.values() if p.name != "self" and p.annotation is p.empty]
        assert missing == [], f"{where}: parameters without annotation"
        assert signature.return_annotation is not inspect.Signature.empty, f"{where}: no return annotation"


def test_every_setting_of_llm_config_is_documented() -> None:
    for name, value in _own(llm_datadist.LLMConfig):
        assert (inspect.getdoc(value) or "").strip(), f"LLMConfig.{name}"
