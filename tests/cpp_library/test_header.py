"""The header, as compilers take it, and how build systems find it and the library."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cpp_library.test_failures import PROVOKED
from tests.support.cpp_peer import COMPILERS, FOLDER, build
from tests.support.source import ROOT, run

_STANDARDS = ("-std=c++14", "-std=c++17", "-std=c++20")


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "flags", [*_STANDARDS, "-fno-exceptions", "-D_GLIBCXX_USE_CXX11_ABI=0", "-Wconversion -Wshadow"]
)
def test_documented_names_types_defaults_and_values_are_there_without_a_warning(compiler: str, flags: str) -> None:
    ran = run(build("names.cpp", "-pedantic", *flags.split(), compiler=compiler, link=False))
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_boundary_is_a_header_of_c() -> None:
    header = "#include <llm_datadist/call.h>\nint main(void) { return sizeof(LldCall) == 0; }\n"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-xc", "-"]
    ran = subprocess.run([*command, f"-I{FOLDER}/include"], input=header, text=True, check=False, capture_output=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_programs_of_either_string_of_libstdcpp_link_the_same_library(tmp_path: Path) -> None:
    source = tmp_path / "both.cpp"
    source.write_text(
        "#include <llm_datadist/llm_datadist.h>\n"
        "int main() { return llm_datadist::LlmDataDist(1, llm_datadist::LlmRole::kMix).SetRole("
        "llm_datadist::LlmRole::kMix) == llm_datadist::LLM_FAILED ? 0 : 1; }\n"
    )
    for value in "01":
        assert run(build(str(source), f"-D_GLIBCXX_USE_CXX11_ABI={value}")).returncode == 0


def _page() -> str:
    return (ROOT / "docs" / "cpp.md").read_text()


def test_the_code_on_the_page_compiles(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```cpp\n(.*?)^```", _page(), re.MULTILINE | re.DOTALL)
    head, _, body = code.partition("\n\n")
    source = tmp_path / "page.cpp"
    source.write_text(
        f"#include <iostream>\n{head}\nvoid page(ClusterInfo prompt, Cache cache) {{\n{body}}}\nint main() {{}}\n"
    )
    assert run(build(str(source))).returncode == 0


def test_the_page_has_every_status_that_calls_return_and_each_is_provoked() -> None:
    values = dict(re.findall(r"(LLM_\w+) = (\w+);", (FOLDER / "include/llm_datadist/llm_datadist.h").read_text()))
    told = {int(values[each], 0) for each in re.findall(r"^\| `(LLM_\w+)` \|", _page(), re.MULTILINE)}
    assert told == {0, *PROVOKED}
