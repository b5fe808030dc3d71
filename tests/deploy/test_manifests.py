"""The manifests of deploy/: valid, with what the library asks for, and isolated as docs/howto-hosts.md says of each."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from llm_datadist.config import AUTH_SECRET, SHM_SOCKET_DIR
from llm_datadist.tools.cli.app import app
from tests.deploy.manifests import (
    COMPOSE,
    KUBERNETES,
    PODS,
    PROXY,
    STORE,
    connectors,
    containers,
    documents,
    option,
    services,
    words,
    workloads,
)
from tests.support.authority import secret_file
from tests.support.isolation import isolations
from tests.support.source import ROOT, run

for _module in ("yaml", "check_jsonschema", "kubernetes_validate"):
    pytest.importorskip(_module, reason="`make test-deploy` installs what reads and checks the manifests")

MANIFESTS: Final = pytest.mark.parametrize("path", [COMPOSE, *KUBERNETES], ids=lambda path: path.stem)
ENGINES: Final = pytest.mark.parametrize("path", [COMPOSE, *PODS], ids=lambda path: path.stem)
FILES: Final = pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
#: Namespaces that cost nothing.
FREE: Final = {"mount", "ipc", "uts"}


def _apart(path: Path) -> set[str]:
    """Return what the two containers do not share."""
    if path == COMPOSE:
        prompt, decoder, _ = services().values()
        shared = {"net": decoder.get("network_mode"), "pid": decoder.get("pid")}
        private = {name for name, whose in shared.items() if whose != "service:prompt"}
        return FREE | private | ({"uid"} if prompt["user"] != decoder["user"] else set())
    (pod, _), (other, _) = containers(path)
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


@ENGINES
def test_a_manifest_isolates_as_the_page_says_of_it_and_sets_the_options_of_that_line(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    lines = [line for line in isolations() if name in line.files]
    prefill, decode = connectors(path)
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
    assert wanted is None or wanted in containers(path)[1][0]["affinity"]


def test_compose_mounts_its_secret_where_the_option_looks() -> None:
    for service, connector in zip([*services().values()][:2], connectors(COMPOSE), strict=True):
        (secret,) = service["secrets"]
        assert connector["kv_connector_extra_config"]["options"][AUTH_SECRET] == f"/run/secrets/{secret}"


def _options(path: Path) -> list[dict[str, str]]:
    """Return the options of each instance, the store's too."""
    if path != STORE:
        return [each["kv_connector_extra_config"]["options"] for each in connectors(path)]
    ((_, store),) = containers(path)
    name, _, value = option(store, "option").partition("=")
    return [{AUTH_SECRET: option(store, "secrets"), name: value}]


@pytest.mark.parametrize("path", [*PODS, STORE], ids=lambda path: path.stem)
def test_pods_make_a_file_of_the_secret_that_this_library_takes_and_a_folder_for_sockets(
    path: Path, tmp_path: Path
) -> None:
    for number, ((pod, container), options) in enumerate(zip(containers(path), _options(path), strict=True)):
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


def _selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    if not selector.keys() <= {"matchLabels", "matchExpressions"}:  # a Service's
        selector = {"matchLabels": selector}
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def _templates(path: Path) -> list[dict[str, Any]]:
    found = [each["spec"]["template"] for each in workloads(path)]
    for each, template in zip(workloads(path), found, strict=True):
        assert _selected(each["spec"]["selector"], template["metadata"]["labels"])
    return found


def _ports(template: dict[str, Any]) -> dict[str, int]:
    found = [each for container in template["spec"]["containers"] for each in container["ports"]]
    ports = {each["name"]: each["containerPort"] for each in found}
    assert len(ports) == len(found) == len({*ports.values()})
    return ports


@FILES
def test_a_service_a_budget_and_a_policy_select_pods_of_their_file_and_name_ports_that_these_have(path: Path) -> None:
    templates = _templates(path)
    for service in documents(path, "Service"):
        (pods,) = (each for each in templates if _selected(service["spec"]["selector"], each["metadata"]["labels"]))
        (port,) = service["spec"]["ports"]
        assert _ports(pods)[port["targetPort"]] == port["port"]
        if path != PROXY:  # which has no metrics
            noted = service["metadata"]["annotations"]
            assert noted == {
                "prometheus.io/scrape": "true",
                "prometheus.io/port": f"{port['port']}",
                "prometheus.io/path": "/metrics",
            }
            assert service["metadata"]["name"] in {container["name"] for container in pods["spec"]["containers"]}
    budgets = [each["spec"] for each in documents(path, "PodDisruptionBudget")]
    for template, kind in zip(templates, [each["kind"] for each in workloads(path)], strict=True):
        own = [each for each in budgets if _selected(each["selector"], template["metadata"]["labels"])]
        # One pod of any number may go, so that a node can be drained; evictions leave out DaemonSets.
        assert [each["maxUnavailable"] for each in own] == ([1] if kind == "Deployment" else [])
    assert len(budgets) == sum(each["kind"] == "Deployment" for each in workloads(path))
    for policy in documents(path, "NetworkPolicy"):
        chosen = [each for each in templates if _selected(policy["spec"]["podSelector"], each["metadata"]["labels"])]
        assert chosen == templates
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        assert named == {name for each in chosen for name in _ports(each)}


def _reaches(path: Path, source: dict[str, str], namespace: str, template: dict[str, Any], port: int) -> bool:
    """Return True if the policies of a file let a pod of these labels, in that namespace, reach the port of a pod."""
    policies = [each["spec"] for each in documents(path, "NetworkPolicy")]
    policies = [each for each in policies if _selected(each["podSelector"], template["metadata"]["labels"])]
    assert all(each["policyTypes"] == ["Ingress"] for each in policies)
    of = {"kubernetes.io/metadata.name": namespace}
    for rule in (rule for each in policies for rule in each["ingress"]):
        if "ports" in rule and port not in {_ports(template).get(each["port"]) for each in rule["ports"]}:
            continue
        for peer in rule["from"]:
            assert peer.keys() in ({"podSelector"}, {"namespaceSelector"})
            if "podSelector" in peer and namespace == "ours" and _selected(peer["podSelector"], source):
                return True
            if "namespaceSelector" in peer and _selected(peer["namespaceSelector"], of):
                return True
    return not policies


_LINK: Final = 40_123  # the kernel chooses


@pytest.mark.parametrize("path", [*PODS, STORE], ids=lambda path: path.stem)
def test_only_the_pods_that_link_reach_the_ports_of_links_and_only_proxy_and_monitoring_those_of_servers(
    path: Path,
) -> None:
    engines = [template["metadata"]["labels"] for each in PODS for template in _templates(each)]
    for template in _templates(path):
        own = {each["metadata"]["labels"]["app"] for each in _templates(path)}
        for port in {*_ports(template).values(), _LINK}:
            http = path != STORE and port != _LINK
            for labels in engines:
                links = port == 26100 if path == STORE else labels["app"] in own and labels["app"] != "prefill-decode"
                assert _reaches(path, labels, "ours", template, port) is links, (labels, port)
            assert _reaches(path, {"app": "proxy"}, "ours", template, port) is http
            assert _reaches(path, {"app": "prometheus"}, "monitoring", template, port) is http
            assert not _reaches(path, {"app": "stranger"}, "ours", template, port)
            assert not _reaches(path, engines[0], "theirs", template, port)


def _seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def _outlive_a_drain(container: dict[str, Any], extra: dict[str, Any], worker_seconds: str, grace: int) -> None:
    """Compare what could cut a drain: vLLM kills its engine after --shutdown-timeout, a rank after its own variable."""
    drain_s = extra["drain_ms"] / 1000
    assert drain_s < int(worker_seconds) < int(option(container, "shutdown-timeout")) < grace


def test_compose_lets_a_drain_end_and_starts_the_proxy_in_front_of_both_servers() -> None:
    prompt, decoder, proxy = services().values()
    for service, connector in zip((prompt, decoder), connectors(COMPOSE), strict=True):
        workers = service["environment"]["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]
        grace = _seconds(service["stop_grace_period"])
        _outlive_a_drain(service, connector["kv_connector_extra_config"], workers, grace)
        assert _seconds(service["healthcheck"]["start_period"]) >= 600
    assert {name: each["condition"] for name, each in proxy["depends_on"].items()} == dict.fromkeys(
        ("prompt", "decoder"), "service_healthy"
    )
    (mounted,) = proxy["volumes"]
    source, target, mode = mounted.split(":")
    assert (COMPOSE.parent / source).resolve() == ROOT / "examples/vllm/proxy.py"
    assert (target, mode) == (proxy["command"][1], "ro")
    for server, name in ((prompt, "prefill"), (decoder, "decode")):
        assert option(proxy, name) == f"http://prompt:{option(server, 'port')}"  # in the prompt's network
        assert f"127.0.0.1:{option(server, 'port')}:{option(server, 'port')}" in prompt["ports"]
    assert proxy["ports"] == [f"127.0.0.1:{option(proxy, 'port')}:{option(proxy, 'port')}"]


@FILES
def test_a_container_is_probed_at_a_port_that_it_has_asks_for_what_it_needs_and_may_end_in_peace(path: Path) -> None:
    extras = [each["kv_connector_extra_config"] for each in connectors(path)] or [None]
    for (pod, container), extra in zip(containers(path), extras, strict=True):
        (port,) = container["ports"]
        listens = option(container, "listen").rpartition(":")[2] if path == STORE else option(container, "port")
        assert f"{port['containerPort']}" == listens
        for kind in ("startupProbe", "readinessProbe"):
            (how,) = container[kind].keys() & {"httpGet", "tcpSocket", "exec"}
            assert how == "exec" or container[kind][how]["port"] == port["name"]
            assert how != "httpGet" or container[kind][how]["path"] == "/health"
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        grace = pod["terminationGracePeriodSeconds"]
        if path == STORE:  # it drains at SIGTERM; no Service leads to it
            assert float(option(container, "drain")) < grace
            pool, limit = option(container, "memory"), container["resources"]["limits"]["memory"]
            assert int(pool.removesuffix("GiB")) < int(limit.removesuffix("Gi"))
            continue
        (sleep, pause) = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (sleep, int(pause) < grace) == ("sleep", True)
        if extra is not None:
            start = container["startupProbe"]
            assert start["periodSeconds"] * start["failureThreshold"] >= 600
            workers = {each["name"]: each.get("value") for each in container["env"]}
            wait = workers["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]
            _outlive_a_drain(container, extra, wait, grace - int(pause))


def test_the_proxy_of_kubernetes_is_the_example_and_names_the_services_of_each_file() -> None:
    ((pod, proxy),) = containers(PROXY)
    (mount,), (volume,) = proxy["volumeMounts"], pod["volumes"]
    assert proxy["command"][1] == f"{mount['mountPath']}/proxy.py"
    made = f"kubectl create configmap {volume['configMap']['name']} --from-file=examples/vllm/proxy.py"
    assert made in PROXY.read_text()
    for path in PODS:
        ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in documents(path, "Service")}
        for name, port in ports.items():
            assert option(proxy, name) == f"http://{name}:{port}"
        assert ports.keys() == {"prefill", "decode"}
    known = set(re.findall(r'add_argument\("(--[a-z]+)"', (ROOT / "examples/vllm/proxy.py").read_text()))
    for each in (proxy, services()["proxy"]):
        assert {word.partition("=")[0] for word in words(each)[2:]} == known
