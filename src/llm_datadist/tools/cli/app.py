"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import llm_datadist
from llm_datadist._native import _native
from llm_datadist.config import TRANSPORT
from llm_datadist.tools.cli.bench import bench
from llm_datadist.tools.cli.doctor import doctor
from llm_datadist.tools.cli.keys import keys
from llm_datadist.tools.cli.size import size
from llm_datadist.tools.cli.store import stores
from llm_datadist.tools.cli.top import top
from llm_datadist.tools.cli.usage import Group, about, answer, examples
from llm_datadist.tools.demo.runner import DemoDevice, DemoMemory, DemoTransport, run_demo

app = typer.Typer(
    name="llm-datadist",
    help="Try, measure and examine the library that moves KV caches between prefill and decode processes.",
    no_args_is_help=True,
    cls=Group,
    epilog=examples("llm-datadist demo", "LLM_DATADIST_LOG=info llm-datadist demo", "llm-datadist bench --help"),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def run() -> int:
    """Run the command line and return the exit status."""
    return answer(app, "llm-datadist")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llm-datadist {llm_datadist.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(
    epilog=examples(
        "llm-datadist demo",
        "llm-datadist demo --transport tcp --secure",
        "llm-datadist demo --memory registered --json",
        "llm-datadist demo --device cuda",
    )
)
def demo(
    transport: Annotated[
        DemoTransport, typer.Option(help=f"{about(TRANSPORT)} inproc runs both roles in one process.")
    ] = DemoTransport.AUTO,
    memory: Annotated[
        DemoMemory, typer.Option(help="pool: the library allocates; registered: the roles bring their own memory.")
    ] = DemoMemory.POOL,
    device: Annotated[
        DemoDevice, typer.Option(help="cuda: caches lie in a GPU; NumPy computes on copies in host memory.")
    ] = DemoDevice.HOST,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="Authenticate both roles by a secret; encrypt what leaves the host, except KV bytes over nixl.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, last line.")] = False,
) -> None:
    """Move a real KV cache from a prompt to a decoder process. Compare its tokens with those of one process."""
    if device is DemoDevice.CUDA and memory is DemoMemory.REGISTERED:
        raise typer.BadParameter("--memory registered is host memory: with --device cuda caches lie in pools")
    raise typer.Exit(run_demo(transport, memory, device, as_json=as_json, secure=secure))


@app.command(epilog=examples("llm-datadist cpp --cflags --libs", "llm-datadist cpp --cmake-dir"))
def cpp(
    cflags: Annotated[bool, typer.Option("--cflags", help="Print the options of a compiler.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Print the options of a linker.")] = False,
    cmake_dir: Annotated[bool, typer.Option("--cmake-dir", help="Print the folder for llm_datadist_DIR.")] = False,
) -> None:
    """Print what C++ programs are built with. Without an option: the folder of header and library."""
    folder = Path(_native.__file__).parent.parent / "cpp"  # beside the native module, also of an editable installation
    flags = [f"-I{folder}/include"] * cflags + [f"-L{folder}/lib -Wl,-rpath,{folder}/lib -lllm_datadist"] * libs
    print(*flags + [f"{folder}/lib/cmake/llm_datadist"] * cmake_dir or [str(folder)])


app.command(
    epilog=examples(
        "llm-datadist bench --json results.json --plot .",
        "llm-datadist bench pull --transport tcp --block-bytes 4096",
        "llm-datadist bench latency --against ''",
    )
)(bench)
app.command(
    epilog=examples(
        "llm-datadist size --layers 32 --kv-heads 8 --head-dim 128 --dtype bf16 --tokens 100000",
        "llm-datadist size --layers 61 --kv-heads 1 --head-dim 576 --tensors-per-layer 1 --tokens 100000 --devices 4",
    )
)(size)
app.command(
    epilog=examples("llm-datadist top", "llm-datadist top --once --json", "llm-datadist top --connect decode-7")
)(top)
app.command(
    epilog=examples(
        "llm-datadist doctor",
        "llm-datadist doctor --serve",
        "llm-datadist doctor --peer 127.0.0.1:26000 --json",
        "llm-datadist doctor --peer 10.0.0.7:26000 --cluster-id 7 --secrets /etc/datadist/secrets",
    )
)(doctor)
app.add_typer(stores, name="store")
app.add_typer(keys, name="keys")
