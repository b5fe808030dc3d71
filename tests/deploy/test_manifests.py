"""The manifests of deploy/: valid, with what the library asks for, and isolated as docs/howto-hosts.md says of each."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from llm_datadist.config import AUTH_SECRET, SHM_SOCKET_DIR
from llm_datadist.tools.cli.app import app
from tests.deploy.server import DEPLOY
from tests.support.authority import secret_file
from tests.support.isolation import isolations
from tests.support.source import ROOT, run

for _module in ("yaml", "check_jsonschema", "kubernetes_validate"):
    pytest.importorskip(_module, reason="`make test-deploy` installs what reads and checks the manifests")

COMPOSE: Final = DEPLOY / "compose.yaml"
PODS: Final = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MANIFESTS: Final = pytest.mark.parametrize("path", [COMPOSE, *PODS], ids=lambda path: path.stem)
#: Namespaces that cost nothing.
FREE: Final = {"mount", "ipc", "uts"}


def _services() -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def _containers(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (pod, container) of prefill and of decode."""
    import yaml

    pods = [each["spec"]["template"]["spec"] for each in yaml.safe_load_all(path.read_text())]
    return [(pod, container) for pod in pods for container in pod["containers"]]


def _connectors(path: Path) -> list[dict[str, Any]]:
    """Return what the manifest configures: connectors of vLLM, the prefill server's first."""
    ends = list(_services().values()) if path == COMPOSE else [container for _, container in _containers(path)]
    begin = "--kv-transfer-config="
    words = [word for end in ends for word in end["command"] + end.get("args", []) if word.startswith(begin)]
    return [json.loads(word.removeprefix(begin)) for word in words]


def _apart(path: Path) -> set[str]:
    """Return what the two containers do not share."""
    if path == COMPOSE:
        prompt, decoder = _services().values()
        shared = {"net": decoder.get("network_mode"), "pid": decoder.get("pid")}
        private = {name for name, whose in shared.items() if whose != "service:prompt"}
        return FREE | private | ({"uid"} if prompt["user"] != decoder["user"] else set())
    (pod, _), (other, _) = _containers(path)
    if pod["securityContext"]["runAsUser"] != other["securityContext"]["runAsUser"]:
        return {"uid"}
    if pod is other:
        return {"mount"} if pod.get("shareProcessNamespace") else {"mount", "pid"}
    assert not {"hostNetwork", "hostPID", "hostUsers"} & (pod.keys() | other.keys())
    return FREE | {"net", "pid"}


@MANIFESTS
def test_a_manifest_is_valid_and_one_with_a_wrong_word_is_not(path: Path, tmp_path: Path) -> None:
    check = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    check = check if path == COMPOSE else ["kubernetes-validate", "--strict"]
    check[0] = str(Path(sys.executable).with_name(check[0]))
    wrong = tmp_path / path.name
    wrong.write_text(path.read_text().replace("image:", "picture:"))
    for file, outcome in ((path, True), (wrong, False)):
        done = run(*check, file)
        assert (done.returncode == 0) is outcome, done.stdout + done.stderr


@MANIFESTS
def test_a_manifest_isolates_as_the_page_says_of_it_and_sets_the_options_of_that_line(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    lines = [line for line in isolations() if name in line.files]
    prefill, decode = _connectors(path)
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    for each in (prefill, decode):
        extra = each["kv_connector_extra_config"]
        assert extra.get("host") == ("$(POD_IP)" if "net" in _apart(path) else None)
        assert {*extra["options"]} == {AUTH_SECRET}.union(*(line.options for line in lines))
    if path.stem == "two-nodes":  # which the page tells of apart from the hosts' own containers
        assert lines == []
    else:
        (line,) = lines
        assert _apart(path) - FREE == line.apart - FREE
    wanted = {"one-node": "podAffinity", "two-nodes": "podAntiAffinity"}.get(path.stem)
    assert wanted is None or wanted in _containers(path)[1][0]["affinity"]


def test_compose_mounts_its_secret_where_the_option_looks() -> None:
    for service, connector in zip(_services().values(), _connectors(COMPOSE), strict=True):
        (secret,) = service["secrets"]
        assert connector["kv_connector_extra_config"]["options"][AUTH_SECRET] == f"/run/secrets/{secret}"


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_pods_make_a_file_of_the_secret_that_this_library_takes_and_a_folder_for_sockets(
    path: Path, tmp_path: Path
) -> None:
    for number, ((pod, container), connector) in enumerate(zip(_containers(path), _connectors(path), strict=True)):
        options = connector["kv_connector_extra_config"]["options"]
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        first = {each["name"]: each for each in pod["initContainers"]}
        # The folders of the first container in a folder of the test, with a secret as the kubelet mounts it.
        here = tmp_path / str(number)
        for each in first["secret"]["volumeMounts"]:
            (here / each["mountPath"].lstrip("/")).mkdir(parents=True)
        given = here / "secret/secrets"
        secret_file(given, pods=bytes(32))
        given.chmod(volumes["secret"]["secret"]["defaultMode"])
        assert "group and others must have no access" in CliRunner().invoke(app, ["keys", "show", str(given)]).output
        command = [f"{here}{word}" if word.startswith("/") else word for word in first["secret"]["command"]]
        subprocess.run(command, check=True)
        shown = CliRunner().invoke(app, ["keys", "show", str(here / options[AUTH_SECRET].lstrip("/"))])
        assert (shown.exit_code, "shown and believed" in shown.output) == (0, True)
        assert mounts[str(Path(options[AUTH_SECRET]).parent)] == "credentials"
        if SHM_SOCKET_DIR in options:
            folder, user = options[SHM_SOCKET_DIR], pod["securityContext"]["runAsUser"]
            assert volumes[mounts[folder]]["hostPath"]["path"] == folder
            assert {"--mode=0700", f"--owner={user}", folder} <= {*first["sockets"]["command"]}
