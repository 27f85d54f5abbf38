"""What the handlers talk to: an API server in memory, and our own client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes.aio.config import kube_config

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.handlers.own_image import IMAGE_VARIABLE
from tests.support.api_server import ApiServer


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    # The client reads the variable once, when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv(IMAGE_VARIABLE, "operator:1")
    async with server.serving(tmp_path / "kubeconfig"):
        yield server


@pytest.fixture
async def cluster(api: ApiServer) -> AsyncIterator[Cluster]:
    connected = await Cluster.connect()
    yield connected
    await connected.close()
