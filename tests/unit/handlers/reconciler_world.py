"""A cluster with one object, and a reconciler that runs one reconcile at a time."""

from typing import Any

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.resources import (
    CHILDREN,
    DEPLOYMENT,
    EVENT,
    NODE,
    POD,
    SPECDECODE_DEPLOYMENT,
    Resource,
)
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.mounted_files import CalibrationFile
from specdecode_operator.handlers.reconcile_deployment import Reconciler
from specdecode_operator.handlers.settings import Settings
from tests.support.api_server import ApiServer
from tests.support.decisions import OPERATOR_IMAGE
from tests.support.objects import Body


def pod_metadata(deployment: Body) -> Body:
    """Metadata that the controller of a Deployment's ReplicaSet gives to a pod."""
    template = deployment["spec"]["template"]["metadata"]
    replica_set = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "uid": "replica-set", "controller": True}
    replica_set["name"] = f"{deployment['metadata']['name']}-5d7f"
    labels = {**template["labels"], "pod-template-hash": "5d7f"}
    return {**template, "labels": labels, "ownerReferences": [replica_set]}


class _Posting(Reconciler):
    """A reconciler that waits until its Events are posted."""

    async def reconcile(self, key: Key) -> Requeue:
        try:
            return await super().reconcile(key)
        finally:
            await self._cluster.events_posted()


class World:
    """A cluster with one object of ours, and an operator that sees all of it before each look."""

    def __init__(self, api: ApiServer, cluster: Cluster) -> None:
        self.api = api
        self._cluster = cluster
        self.calibration = CalibrationFile()
        self.clock = ServerTime()
        self.restart()

    def restart(self, **settings: Any) -> None:
        """Let another process take over."""
        self.cache, self.probe = Cache(), EngineProbe()
        self._seen = set[tuple[str, str]]()
        self.metrics = OperatorMetrics(self.cache)
        self.settings = Settings(calibration=self.calibration, operator_image=OPERATOR_IMAGE, **settings)
        self.begin()

    def begin(self) -> None:
        """Let another process take over that knows what is in the cache."""
        self._cluster.clock = self.clock
        self.reconciler = _Posting(self._cluster, self.cache, self.probe, self.metrics, self.settings)

    def add(self, spec: Body, name: str = "llama", **more: Any) -> Body:
        return self.api.create(
            SPECDECODE_DEPLOYMENT, {"metadata": {"namespace": "team", "name": name}, "spec": spec, **more}
        )

    def all(self, resource: Resource) -> list[Body]:
        return [body for name in self.api.names(resource) if (body := self.api.find(resource, name))]

    def see(self) -> None:
        """Bring the cache up to what there is, as watches do."""
        for body in self._unseen(SPECDECODE_DEPLOYMENT):
            self.cache.put_parent(SPECDECODE_DEPLOYMENT.kind, body)
        for resource in (*CHILDREN, POD):
            for body in self._unseen(resource):
                self.cache.put(resource.kind, body)
            self.cache.retain(resource.kind, [uid for uid, _ in self.api.versions(resource).values()], 10**9)
        for node in self._unseen(NODE):
            self.cache.put_node(node)

    def _unseen(self, resource: Resource) -> list[Body]:
        """Return the objects of a kind whose current version the cache does not have."""
        found = {name: each for name, each in self.api.versions(resource).items() if each not in self._seen}
        self._seen.update(found.values())
        return [body for name in sorted(found) if (body := self.api.find(resource, name))]

    async def look(self, name: str = "llama") -> list[str]:
        """Reconcile once; return what was written."""
        self.see()
        self.api.requests.clear()
        await self.reconciler.reconcile(Key("team", name))
        return self.api.writes()

    @property
    def object(self) -> Body:
        found = self.api.find(SPECDECODE_DEPLOYMENT, "llama")
        assert found is not None
        return found

    def said(self, type_: str = "Ready") -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        (found,) = (each for each in self.object["status"]["conditions"] if each["type"] == type_)
        return found["status"], found["reason"], found["message"]

    def told(self) -> list[str]:
        """Reasons of all Events."""
        return [body["reason"] for body in self.all(EVENT)]

    def start_engines(self, name: str = "llama-1", **status: Any) -> None:
        """Let the Deployment have a pod of its template."""
        (deployment,) = self.all(DEPLOYMENT)
        ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        pod = {"metadata": {**pod_metadata(deployment), "namespace": "team", "name": name}, "status": status or ready}
        self.api.create(POD, pod)

    def serve(self, engines: int = 1) -> None:
        """Let the Deployment's controller count engines that serve."""
        counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), engines)
        self.api.change(DEPLOYMENT, "llama", status={"observedGeneration": 9, **counts})
