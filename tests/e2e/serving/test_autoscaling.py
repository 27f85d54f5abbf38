"""A real Prometheus, prometheus-adapter and Kubernetes' own controller scale replayed engines by their load."""

from collections.abc import Iterator

import pytest

from devcluster import demo_autoscale
from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster
from devcluster.host import packages
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.traffic import Traffic
from tests.support.waiting import eventually

NAME = demo_autoscale.DEPLOYMENT
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, kubectl: Kubectl) -> Iterator[Kubectl]:
    """Replayed engines with an autoscaler, whose metrics are served."""
    packages.ensure(("prometheus",))
    program = binaries.find("prometheus-adapter")["prometheus-adapter"]
    demo_autoscale.add_metrics(cluster, kubectl, program)
    demo_autoscale.deploy(kubectl, {"metric": "RunningRequests", "target": 2, "scaleDownStabilizationSeconds": 5})
    with demo_autoscale.Watch(cluster, kubectl.namespace).running():
        yield kubectl
    kubectl.must("delete", "sdd", NAME)


def replicas(kubectl: Kubectl) -> int:
    return int(kubectl.object("sdd", NAME)["spec"]["replicas"])


def test_replicas_follow_the_running_requests(scaled: Kubectl) -> None:
    wait_for(scaled, NAME, "Autoscaled", "AutoscalerActive")
    assert replicas(scaled) == 1
    question = {"model": "llama-70b", "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
    with Traffic(f"http://{scaled.service_address(NAME)}/v1/completions", [question] * 6) as requests:
        eventually(lambda: replicas(scaled) >= 2, "a replica is added")
        eventually(lambda: condition(scaled, NAME, "Ready")[1] == "Serving", "it serves")
    assert requests.failures == []
    eventually(lambda: replicas(scaled) == 1, "replicas are removed")


def test_an_object_that_is_suspended_keeps_its_replicas(scaled: Kubectl) -> None:
    scaled.must("patch", "sdd", NAME, "--type=merge", '--patch={"spec": {"suspend": true}}')
    wait_for(scaled, NAME, "Autoscaled", "AutoscalingPaused")
    behavior = scaled.object("horizontalpodautoscalers.autoscaling", NAME)["spec"]["behavior"]
    assert behavior["scaleDown"]["selectPolicy"] == "Disabled"
    scaled.must("scale", "sdd", NAME, "--replicas=3")
    eventually(lambda: not scaled.objects("pods", f"--selector=specdecode.io/deployment={NAME}"), "no engine runs")
    assert replicas(scaled) == 3
    scaled.must("patch", "sdd", NAME, "--type=merge", '--patch={"spec": {"suspend": false}}')
    eventually(lambda: replicas(scaled) == 1, "without load, one replica is enough")
    wait_for(scaled, NAME, "Autoscaled", "AutoscalerActive")


def test_engines_serve_without_the_adapter(scaled: Kubectl) -> None:
    scaled.must("patch", "endpointslice", "prometheus-adapter", "--namespace=monitoring", "--type=json",
                '--patch=[{"op": "replace", "path": "/endpoints", "value": []}]')  # fmt: skip
    wait_for(scaled, NAME, "Autoscaled", "MetricsUnavailable")
    assert condition(scaled, NAME, "Ready")[1] == "Serving"
