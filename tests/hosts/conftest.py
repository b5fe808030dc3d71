"""Hosts for the tests of this folder: made once, healed and compared with their first picture after every test.

Where no namespace may be made the tests skip and say why; with ``LLM_DATADIST_HOSTS=required`` they fail instead.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from llm_datadist._links.credentials import new_secret
from llm_datadist.config import INSECURE_VARIABLE
from tests.hosts.cluster import Cluster
from tests.hosts.network import Impossible, Network
from tests.support.moves import wait_until
from tests.support.world import SECRETS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = 4


def impossible(error: Impossible) -> None:
    """Skip, unless hosts are required."""
    if os.environ.get("LLM_DATADIST_HOSTS") == "required":
        pytest.fail(f"hosts are required: {error}")
    pytest.skip(str(error))


@pytest.fixture(scope="package")
def made_network() -> Iterator[Network]:
    try:
        network = Network(HOSTS)
    except Impossible as error:
        impossible(error)
    yield network
    network.close()


@pytest.fixture(scope="package", autouse=True)
def authenticated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Links between hosts are authenticated and encrypted, as everywhere outside of tests."""
    secrets = new_secret(tmp_path_factory.mktemp("secrets") / "secrets", "hosts")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SECRETS_VARIABLE, str(secrets))
        environment.setenv(INSECURE_VARIABLE, "0")
        yield


@pytest.fixture
def network(made_network: Network) -> Iterator[Network]:
    """The hosts as new, and nothing changed about them afterwards."""
    before = made_network.picture()
    yield made_network
    made_network.heal()
    with suppress(AssertionError):
        wait_until(lambda: made_network.picture() == before)
    now = made_network.picture()
    assert {name: set(now[name]) ^ set(lines) for name, lines in before.items() if now[name] != lines} == {}


@pytest.fixture
def cluster(network: Network) -> Iterator[Cluster]:
    """Processes for one test, which leave nothing behind: neither in themselves nor on their hosts."""
    cluster = Cluster(network)
    yield cluster
    network.heal()  # so that those who part hear of each other
    cluster.part()
