"""The autoscaler of a deployment: its metric and bounds, when it must not scale, and the condition from its status."""

from typing import Any

import pytest

from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash_of, parse_deployment
from specdecode_operator.deployment.rollout.readiness import stalled
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import NOW, decide, desired_state
from tests.support.objects import Body, parent, tiny_cpu

KINDS = ("HorizontalPodAutoscaler", "ScaledObject")
KEDA: Body = {"serverAddress": "http://prometheus:9090"}
FROZEN: Body = {"selectPolicy": "Disabled"}


def asked(**fields: Any) -> Body:
    return {"maxReplicas": 4, "metric": "RunningRequests", "target": 64, **fields}


def autoscalers(spec: Body) -> list[Body]:
    desired, _, _ = decide(parent(spec))
    return [child for child in desired.children if child["kind"] in KINDS]


def rendered(spec: Body | None = None, **fields: Any) -> Body:
    (found,) = autoscalers(tiny_cpu(autoscaling=asked(**fields), **(spec or {})))
    return found


def test_no_autoscaler_is_made_unless_it_is_asked_for() -> None:
    assert autoscalers(tiny_cpu()) == []
    assert "Autoscaled" not in decide(parent(tiny_cpu()))[2]


def test_the_autoscaler_scales_its_object_within_bounds() -> None:
    found = rendered(minReplicas=2, scaleDownStabilizationSeconds=120)
    assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == ("autoscaling/v2", KINDS[0], "llama")
    assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == ["uid-1"]
    spec = found["spec"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "name": "llama",
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    assert spec["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 120}}


@pytest.mark.parametrize(
    ("metric", "target", "name", "value"),
    [
        ("RunningRequests", 64, "vllm_num_requests_running", "64"),
        ("WaitingRequests", 2, "vllm_num_requests_waiting", "2"),
        ("KvCacheUsage", 80, "vllm_kv_cache_usage_perc", "800m"),
    ],
)
def test_metrics_of_engines_are_averaged_over_their_pods(metric: str, target: int, name: str, value: str) -> None:
    (found,) = rendered(metric=metric, target=target)["spec"]["metrics"]
    average = {"type": "AverageValue", "averageValue": value}
    assert found == {"type": "Pods", "pods": {"metric": {"name": name}, "target": average}}


def test_predicted_load_is_a_total_of_the_operator() -> None:
    (found,) = rendered(metric="PredictedUtilization", target=75)["spec"]["metrics"]
    assert found["external"] == {
        "metric": {
            "name": "specdecode_load_replicas",
            "selector": {"matchLabels": {"deployment_namespace": "default", "deployment": "llama"}},
        },
        "target": {"type": "AverageValue", "averageValue": "750m"},
    }


@pytest.mark.parametrize(("stopped", "frozen"), [({"suspend": True}, True), ({"replicas": 0}, True), ({}, False)])
def test_an_object_without_engines_is_not_scaled(stopped: Body, frozen: bool) -> None:
    behavior = rendered(stopped)["spec"]["behavior"]
    assert [behavior.get(way, {}).get("selectPolicy") for way in ("scaleUp", "scaleDown")] == (
        ["Disabled", "Disabled"] if frozen else [None, None]
    )
    paused = rendered(stopped, keda=KEDA)["metadata"]["annotations"].get("autoscaling.keda.sh/paused")
    assert paused == ("true" if frozen else None)


def test_pausing_keda_changes_the_hash_by_which_the_object_is_applied() -> None:
    hashes = {
        rendered(spec, keda=KEDA)["metadata"]["annotations"]["specdecode.io/applied-hash"]
        for spec in ({}, {"suspend": True})
    }
    assert len(hashes) == 2


def test_a_capture_that_uses_the_gpus_freezes_the_autoscaler() -> None:
    lent = parse_deployment(parent(tiny_cpu(autoscaling=asked())), preempted_by="nightly")
    desired = desired_state(lent)
    (found,) = [child for child in desired.children if child["kind"] in KINDS]
    assert found["spec"]["behavior"]["scaleUp"] == FROZEN
    status = compose_status(lent, desired, Observation(autoscaler=live()), NOW)
    (told,) = [each for each in status.conditions if each.type == "Autoscaled"]
    assert (told.status, told.reason) == ("False", "AutoscalingPaused")
    assert "nightly" in told.message


def test_keda_asks_prometheus_for_the_engines_of_the_object() -> None:
    found = rendered(metric="KvCacheUsage", target=80, keda={**KEDA, "authentication": "reader"})
    assert (found["apiVersion"], found["kind"]) == ("keda.sh/v1alpha1", KINDS[1])
    assert (found["spec"]["minReplicaCount"], found["spec"]["maxReplicaCount"]) == (1, 4)
    (trigger,) = found["spec"]["triggers"]
    assert trigger["authenticationRef"] == {"name": "reader"}
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(vllm:kv_cache_usage_perc{namespace="default",specdecode_deployment="llama"})',
        "threshold": "0.8",
        "ignoreNullValues": "false",
    }


def test_keda_starts_the_first_engine_by_a_query_of_the_gateway() -> None:
    found = rendered({"replicas": 0}, minReplicas=0, keda={**KEDA, "wakeUpQuery": "sum(queue)"})
    assert "autoscaling.keda.sh/paused" not in found["metadata"]["annotations"]
    load, wake_up = (trigger["metadata"] for trigger in found["spec"]["triggers"])
    assert load["ignoreNullValues"] == "true", "no engine, no series"
    assert wake_up["query"] == "sum(queue)"


def test_an_autoscaler_changes_no_engine() -> None:
    specs = (tiny_cpu(), tiny_cpu(autoscaling=asked()))
    plain, scaled = (
        next(child for child in decide(parent(spec))[0].children if child["kind"] == "Deployment") for spec in specs
    )
    assert plain == scaled
    assert len({engine_spec_hash_of(parse_deployment(parent(spec))) for spec in specs}) == 1


def live(kind: str = KINDS[0], **conditions: tuple[str, str]) -> Body:
    """The autoscaler with the conditions of its controller: status and reason of each."""
    found = rendered(keda=KEDA) if kind == KINDS[1] else rendered()
    told = [
        {"type": type_, "status": status, "reason": reason, "message": f"told of {type_}"}
        for type_, (status, reason) in conditions.items()
    ]
    return {**found, "status": {"conditions": told}}


def autoscaled(autoscaler: Body | None, spec: Body | None = None, **observed: Any) -> tuple[str, str, str]:
    observation = Observation(autoscaler=autoscaler, **observed)
    found = decide(parent(spec or tiny_cpu(autoscaling=asked())), observation)[2]["Autoscaled"]
    return found.status, found.reason, found.message


ABLE = {"AbleToScale": ("True", "ReadyForNewScale")}
ACTIVE = {**ABLE, "ScalingActive": ("True", "ValidMetricFound")}


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ({}, ("Unknown", "AutoscalerPending")),
        (ABLE, ("Unknown", "AutoscalerPending")),
        (ACTIVE, ("True", "AutoscalerActive")),
        ({**ACTIVE, "ScalingLimited": ("True", "TooManyReplicas")}, ("True", "AtMaxReplicas")),
        ({**ACTIVE, "ScalingLimited": ("True", "TooFewReplicas")}, ("True", "AutoscalerActive")),
        ({**ABLE, "ScalingActive": ("False", "FailedGetPodsMetric")}, ("False", "MetricsUnavailable")),
        ({**ABLE, "ScalingActive": ("False", "AmbiguousSelector")}, ("False", "OtherAutoscaler")),
        ({"AbleToScale": ("False", "FailedUpdateScale")}, ("False", "ScaleFailed")),
    ],
)
def test_the_condition_sums_up_the_autoscaler(conditions: Body, outcome: tuple[str, str]) -> None:
    assert autoscaled(live(**conditions))[:2] == outcome


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ({}, ("Unknown", "AutoscalerPending")),
        ({"Ready": ("True", "ScaledObjectReady")}, ("True", "AutoscalerActive")),
        ({"Ready": ("False", "TriggerError")}, ("False", "MetricsUnavailable")),
        (
            {"Ready": ("True", "ScaledObjectReady"), "HPAActive": ("False", "AmbiguousSelector")},
            ("False", "OtherAutoscaler"),
        ),
        (
            {"Ready": ("True", "ScaledObjectReady"), "Fallback": ("True", "FallbackExists")},
            ("False", "MetricsUnavailable"),
        ),
    ],
)
def test_the_condition_sums_up_keda(conditions: Body, outcome: tuple[str, str]) -> None:
    spec = tiny_cpu(autoscaling=asked(keda=KEDA))
    assert autoscaled(live(KINDS[1], **conditions), spec)[:2] == outcome


@pytest.mark.parametrize("conditions", [None, "x", [None, 1], [{}], [{"type": "ScalingActive"}]])
def test_a_status_of_any_form_can_be_read(conditions: Any) -> None:
    assert autoscaled({**live(), "status": {"conditions": conditions}})[1] == "AutoscalerPending"


@pytest.mark.parametrize("field", [{"suspend": True}, {"replicas": 0}])
def test_a_stopped_object_says_why_it_is_not_scaled(field: Body) -> None:
    *outcome, message = autoscaled(live(**ACTIVE), tiny_cpu(autoscaling=asked(), **field))
    assert tuple(outcome) == ("False", "AutoscalingPaused")
    assert f"spec.{next(iter(field))}" in message


def test_an_autoscaler_that_cannot_be_written_does_not_change_ready() -> None:
    observed = {"blocked_beside": {"HorizontalPodAutoscaler": stalled("ChildNameConflict", "taken")}}
    assert autoscaled(None, **observed) == ("False", "ChildNameConflict", "taken")
    ready = [
        decide(parent(tiny_cpu(autoscaling=asked())), Observation(**each))[2]["Ready"].reason for each in ({}, observed)
    ]
    assert ready[0] == ready[1]


def test_an_unknown_capacity_is_reported_instead_of_missing_metrics() -> None:
    spec = tiny_cpu(autoscaling=asked(metric="PredictedUtilization", target=80))
    failing = live(**ABLE, ScalingActive=("False", "FailedGetExternalMetric"))
    unknown = autoscaled(failing, spec, load=ReplicaLoad(None, None, "No capture"))
    assert unknown[:2] == ("False", "CapacityUnknown")
    assert "No capture" in unknown[2]
    known = ReplicaLoad(40.0, 1.5, "Capacity of a replica: 40.0 requests")
    assert autoscaled(failing, spec, load=known)[:2] == ("False", "MetricsUnavailable")
    assert "40.0 requests" in autoscaled(live(**ACTIVE), spec, load=known)[2]


@pytest.mark.parametrize(
    ("metadata", "writer"),
    [
        ({"managedFields": [{"manager": "flux", "operation": "Apply"}]}, "flux"),
        ({"annotations": {"kubectl.kubernetes.io/last-applied-configuration": '{"spec": {"replicas": 2}}'}}, "kubectl"),
        ({"managedFields": [{"manager": "kubectl-create", "operation": "Update"}]}, None),
        ({"annotations": {"kubectl.kubernetes.io/last-applied-configuration": '{"spec": {}}'}}, None),
        ({"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "[]"}}, None),
        ({"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "[" * 100_000}}, None),
    ],
)
def test_a_manifest_with_replicas_is_reported(metadata: Body, writer: str | None) -> None:
    body = parent(tiny_cpu(autoscaling=asked(), replicas=2))
    for entry in metadata.get("managedFields", []):
        entry["fieldsV1"] = {"f:spec": {"f:replicas": {}}}
    body["metadata"] |= metadata
    found = decide(body, Observation(autoscaler=live(**ACTIVE)))[2]["Autoscaled"]
    assert found.status == "True"
    assert found.reason == ("ReplicasAlsoSet" if writer else "AutoscalerActive")
    assert writer is None or writer in found.message


def test_a_failure_is_reported_before_a_manifest_with_replicas() -> None:
    body = parent(tiny_cpu(autoscaling=asked(), replicas=2))
    body["metadata"]["managedFields"] = [
        {"manager": "flux", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    ]
    failing = live(ScalingActive=("False", "FailedGetPodsMetric"))
    found = decide(body, Observation(autoscaler=failing))[2]["Autoscaled"]
    assert (found.status, found.reason) == ("False", "MetricsUnavailable")
