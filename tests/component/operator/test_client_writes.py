"""What the client writes to a real API server, of any version that is supported."""

from collections.abc import AsyncIterator

import pytest
from kubernetes.aio.config import kube_config

from devcluster.cluster.cluster import Cluster
from specdecode_operator.cluster.client import Cluster as Client
from specdecode_operator.cluster.client import ConflictError
from tests.support.kubectl import Kubectl
from tests.support.objects import Body


@pytest.fixture
async def client(crds: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """Return a client that may do everything."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(crds.kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(crds.kubeconfig))
    connected = await Client.connect()
    yield connected
    await connected.close()


def config_map(kubectl: Kubectl, name: str, **data: str) -> Body:
    metadata = {"namespace": kubectl.namespace, "name": name}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def test_late_write_to_deleted_object_does_not_change_its_successor(client: Client, kubectl: Kubectl) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": kubectl.namespace, "name": "kept"}}
    first = await client.create(body)
    await client.merge(first, {"data": {"by": "the first"}})
    await client.delete(first)
    await client.create(body)
    with pytest.raises(ConflictError):
        await client.merge(first, {"data": {"by": "the first"}})
    await client.delete(first)
    assert "data" not in kubectl.object("configmap", "kept")


async def test_apply_new_creates_only_where_the_name_is_free(client: Client, kubectl: Kubectl) -> None:
    """By server-side apply, so that a field that a later apply leaves out goes."""
    made = await client.apply_new(config_map(kubectl, "new", first="1", second="2"))
    (manager,) = made["metadata"]["managedFields"]
    assert (manager["manager"], manager["operation"]) == ("specdecode-operator", "Apply")
    theirs = await client.create(config_map(kubectl, "theirs", by="somebody else"))
    for name in ("new", "theirs"):
        with pytest.raises(ConflictError):
            await client.apply_new(config_map(kubectl, name, by="the operator"))
    assert kubectl.object("configmap", "theirs")["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]
    assert (await client.apply(config_map(kubectl, "new", first="1")))["data"] == {"first": "1"}
