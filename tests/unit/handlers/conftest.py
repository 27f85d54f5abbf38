"""Fixtures: an API server in memory, the operator's client of it, and an operator without watches."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.config import kube_config

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers import main as module
from specdecode_operator.handlers.main import IMAGE_VARIABLE, OperatorState
from tests.support.api_server import ApiServer
from tests.support.http_server import serving
from tests.unit.cluster.test_engine_probe import Metrics
from tests.unit.handlers.reconciler_world import World
from tests.unit.handlers.resync_rounds import Rounds, stop


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    # The client reads the variable once, when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv(IMAGE_VARIABLE, "operator:1")
    # The test's API server speaks plain HTTP. Reading the machine's authorities would take each client 20 ms.
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    async with server.serving(tmp_path / "kubeconfig"):
        yield server


@pytest.fixture
async def cluster(api: ApiServer) -> AsyncIterator[Cluster]:
    connected = await Cluster.connect()
    yield connected
    await connected.close()


@pytest.fixture
async def world(api: ApiServer, cluster: Cluster) -> World:
    return World(api, cluster)


@pytest.fixture
def engine_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    with serving(server):
        yield server.server_port


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    made = Rounds()

    class Clock:
        sleep = staticmethod(made.sleep)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    monkeypatch.setattr(module, "asyncio", Clock())
    return made


@pytest.fixture
async def state(api: ApiServer, rounds: Rounds) -> AsyncIterator[OperatorState]:
    """An operator without watches, not yet started."""
    state = OperatorState()
    yield state
    await stop(state)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all that is looked at, and waits for nothing."""
    found: list[str] = []

    async def reconcile(_: Any, key: Key) -> Requeue:
        found.append(key.name)
        return Requeue(is_close=False)

    monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
    return found
