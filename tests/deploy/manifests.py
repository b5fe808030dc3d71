"""The manifests of deploy/, parsed."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.deploy.server import DEPLOY

COMPOSE: Final = DEPLOY / "compose.yaml"
KUBERNETES: Final = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
STORE: Final = DEPLOY / "kubernetes" / "store.yaml"
PROXY: Final = DEPLOY / "kubernetes" / "proxy.yaml"
#: Of prefill and decode.
PODS: Final = [path for path in KUBERNETES if path not in (STORE, PROXY)]


def services() -> dict[str, Any]:
    """Return the services of Compose: prompt, decoder, proxy."""
    found: dict[str, Any] = _parsed(COMPOSE)[0]["services"]
    return found


def documents(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the objects of a file of Kubernetes, all or of some kinds."""
    return [each for each in _parsed(path) if not kinds or each["kind"] in kinds]


@cache
def _parsed(path: Path) -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load_all(path.read_text()))


def workloads(path: Path) -> list[dict[str, Any]]:
    return documents(path, "Deployment", "DaemonSet")


def containers(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (pod, container) of each; of prefill first."""
    pods = [each["spec"]["template"]["spec"] for each in workloads(path)]
    return [(pod, container) for pod in pods for container in pod["containers"]]


def words(container: dict[str, Any]) -> list[str]:
    """Return the command line of a container or a service."""
    return [*container["command"], *container.get("args", [])]


def option(container: dict[str, Any], name: str) -> str:
    """Return the value of ``--name=value`` in its command line."""
    (found,) = (word.partition("=")[2] for word in words(container) if word.startswith(f"--{name}="))
    return found


def connectors(path: Path) -> list[dict[str, Any]]:
    """Return what the manifest configures: connectors of vLLM, the prefill server's first."""
    ends = list(services().values()) if path == COMPOSE else [container for _, container in containers(path)]
    vllm = [end for end in ends if end["command"][0] == "vllm"]
    return [json.loads(option(end, "kv-transfer-config")) for end in vllm]
