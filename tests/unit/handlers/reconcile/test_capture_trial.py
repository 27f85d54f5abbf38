"""Before a capture borrows GPUs the API server is asked about its pod, and what cannot be asked is no refusal."""

import asyncio
from typing import Any, cast

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import (
    Cluster,
    ClusterError,
    DeniedError,
    ForbiddenError,
    InvalidObjectError,
    RefusedForNowError,
    UntriableError,
)
from specdecode_operator.cluster.resources import POD, Resource
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.settings import Settings
from tests.support.captures import KEY
from tests.unit.handlers.reconcile.test_capture_names import Deployments, to_start
from tests.unit.handlers.reconcile.test_image_note import FakeCluster

QUOTA = "exceeded quota: small, requested: pods=1, used: pods={}, limited: pods=2"


class Asked(FakeCluster):
    """Answers a dry run with an error, and lists no StorageClasses if it may not."""

    def __init__(self, answer: Exception | None, *, may_list: bool = True) -> None:
        super().__init__()
        self.answer, self.may_list = answer, may_list
        self.tried: list[Body] = []
        self.written: list[str] = []

    async def try_create(self, resource: Resource, body: Body) -> None:
        assert resource == POD
        self.tried.append(body)
        if self.answer is not None:
            raise self.answer

    async def list(self, *_: Any) -> tuple[list[Body], int]:
        if not self.may_list:
            raise ForbiddenError("the operator may not list storageclasses.storage.k8s.io")
        marked = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
        return [{"metadata": {"name": "fast", **marked}, "volumeBindingMode": "WaitForFirstConsumer"}], 1

    async def get(self, *_: Any, **__: bool) -> Body | None:
        return None

    async def apply_new(self, body: Body) -> Body:
        self.written.append(body["kind"])
        return {**body, "metadata": {**body["metadata"], "uid": "new", "resourceVersion": "1"}}


def looked(cluster: Asked) -> Body:
    """The conditions of a capture after one look."""
    cache = to_start(deploymentDuringCapture="Suspend")
    cache.put("Deployment", engines())
    reconciler = CaptureReconciler(
        cast("Cluster", cluster), cache, Deployments(), OperatorMetrics(Cache()), Settings(operator_image="operator:1")
    )
    asyncio.run(reconciler.reconcile(KEY))
    return {each["type"]: each for each in cluster.status["conditions"]}


def engines() -> Body:
    """The Deployment of one engine."""
    labels = {"specdecode.io/deployment": "llama", "app.kubernetes.io/managed-by": "specdecode-operator"}
    metadata = {"namespace": "default", "name": "llama", "uid": "e", "resourceVersion": "1", "labels": labels}
    template = {"spec": {"containers": [{"name": "engine"}]}}
    return {"metadata": metadata, "spec": {"replicas": 1, "template": template}, "status": {"replicas": 1}}


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (DeniedError("told", "violates PodSecurity"), "PodRefused", "violates PodSecurity"),
        (InvalidObjectError("spec.priorityClassName: unknown"), "PodRefused", "priorityClassName"),
        (RefusedForNowError(QUOTA.format(3)), "RefusedForNow", "small"),
    ],
)
def test_a_pod_that_is_refused_keeps_the_engines_serving(answer: ClusterError, reason: str, words: str) -> None:
    cluster = Asked(answer)
    accepted = looked(cluster)["Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("Unknown", reason)
    assert words in accepted["message"]
    assert cluster.written == [], "nothing is half-created"
    assert "borrow" not in cluster.status
    (pod,) = cluster.tried
    assert pod["metadata"]["namespace"] == "default"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ForbiddenError("the operator may not create pods"),
        UntriableError('admission webhook "w" does not support dry run'),
        RefusedForNowError(QUOTA.format(2)),
        RefusedForNowError("status unknown for quota: small, resources: pods"),
    ],
    ids=str,
)
@pytest.mark.parametrize("may_list", [True, False])
def test_what_cannot_be_told_and_what_the_engines_free_refuses_nothing(
    answer: ClusterError | None, *, may_list: bool
) -> None:
    cluster = Asked(answer, may_list=may_list)
    assert looked(cluster)["Accepted"]["status"] == "True"
    assert cluster.written == ["PersistentVolumeClaim", "Job"]


def test_an_api_server_that_fails_is_asked_again() -> None:
    cluster = Asked(ClusterError("create pods default: the webhook cannot be reached"))
    accepted = looked(cluster)["Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("Unknown", "ApiServerError")
