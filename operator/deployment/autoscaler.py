"""Render the autoscaler of `spec.autoscaling`, and read from its status whether it works.

The autoscaler writes `spec.replicas` through the scale subresource. While no engine is wanted, or a capture uses the
engines' GPUs, the autoscaler stays but does not scale, so `replicas` keeps its value.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specdecode_operator.api import base
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import KIND, Autoscaling, Keda, Key, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.resources import HORIZONTAL_POD_AUTOSCALER, SCALED_OBJECT, Resource
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.enums import AutoscalingMetric
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.untrusted import mapping, objects

AUTOSCALED: Final = "Autoscaled"
KEDA_MISSING: Final = Blocked(
    "KedaMissing",
    "spec.autoscaling.keda: the cluster has no ScaledObjects (keda.sh/v1alpha1), or the operator may not list them:"
    " install KEDA, update the operator's role, or remove autoscaling.keda to use a HorizontalPodAutoscaler; engines"
    " keep serving",
)
POD_METRICS: Final[Mapping[AutoscalingMetric, str]] = {
    AutoscalingMetric.RUNNING_REQUESTS: "vllm:num_requests_running",
    AutoscalingMetric.WAITING_REQUESTS: "vllm:num_requests_waiting",
    AutoscalingMetric.KV_CACHE_USAGE: "vllm:kv_cache_usage_perc",
}
"""Series of each engine that a metric averages."""

LOAD_METRIC: Final = "specdecode_load_replicas"
"""Series of the operator: number of replicas that the current requests would use to capacity."""

CAPACITY_METRIC: Final = "specdecode_replica_capacity_requests"
"""Series of the operator: the capacity of one replica in requests."""

_PERCENTAGES: Final = (AutoscalingMetric.KV_CACHE_USAGE, AutoscalingMetric.PREDICTED_UTILIZATION)
_NEVER: Final = "1000000000"
_PAUSED_ANNOTATION: Final = "autoscaling.keda.sh/paused"
_NO_METRICS_FIX: Final = (
    "engines keep serving, and spec.replicas does not change; check the metrics adapter, its rules and Prometheus"
    ' (documentation: "Scale engines by hand or automatically")'
)


def wanted_autoscaler(parent: ParsedDeployment) -> Autoscaling | None:
    """Return the autoscaler of a spec; None if it has none or is invalid."""
    return None if isinstance(parent.spec, InvalidSpecError) else parent.spec.autoscaling


def load_labels(key: Key) -> dict[str, str]:
    """Return the labels of an object's series. Prometheus sets the label `namespace` to the operator's namespace."""
    return {"deployment_namespace": key.namespace, "deployment": key.name}


def render_autoscaler(key: Key, uid: str, spec: SpecDecodeDeploymentSpec, autoscaling: Autoscaling) -> Body:
    """Return the HorizontalPodAutoscaler or ScaledObject of an object."""
    frozen = spec.suspend or (spec.replicas == 0 and autoscaling.min_replicas > 0)
    if autoscaling.keda is not None:
        return owned(_scaled_object(key, autoscaling, autoscaling.keda, frozen=frozen), key, uid)
    body = {
        **_target(key),
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [_metric(key, autoscaling)],
        "behavior": _behavior(autoscaling, frozen=frozen),
    }
    return owned(_object(key, HORIZONTAL_POD_AUTOSCALER, body), key, uid)


def _object(key: Key, resource: Resource, spec: Body) -> Body:
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": key.name}, "spec": spec}


def _behavior(autoscaling: Autoscaling, *, frozen: bool) -> Body:
    down: Body = {"stabilizationWindowSeconds": autoscaling.scale_down_stabilization_seconds}
    if not frozen:
        return {"scaleDown": down}
    return {"scaleDown": {**down, "selectPolicy": "Disabled"}, "scaleUp": {"selectPolicy": "Disabled"}}


def _quantity(autoscaling: Autoscaling) -> str:
    """Return the target as a Kubernetes quantity."""
    return f"{autoscaling.target * 10}m" if autoscaling.metric in _PERCENTAGES else str(autoscaling.target)


def _metric(key: Key, autoscaling: Autoscaling) -> Body:
    target = {"type": "AverageValue", "averageValue": _quantity(autoscaling)}
    if series := POD_METRICS.get(autoscaling.metric):
        return {"type": "Pods", "pods": {"metric": {"name": adapter_name(series)}, "target": target}}
    # Use the total: a mean over the engines becomes wrong when a replica is added.
    metric = {"name": LOAD_METRIC, "selector": {"matchLabels": load_labels(key)}}
    return {"type": "External", "external": {"metric": metric, "target": target}}


def adapter_name(series: str) -> str:
    """Return the name of a series in our rules for prometheus-adapter; it is part of an API path."""
    return series.replace(":", "_")


def _target(key: Key) -> Body:
    return {"scaleTargetRef": {"apiVersion": base.API_VERSION, "kind": KIND, "name": key.name}}


def _scaled_object(key: Key, autoscaling: Autoscaling, keda: Keda, *, frozen: bool) -> Body:
    series, labels = LOAD_METRIC, load_labels(key)
    if autoscaling.metric in POD_METRICS:
        series = POD_METRICS[autoscaling.metric]
        labels = {"namespace": key.namespace, "specdecode_deployment": key.name}
    matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
    threshold = autoscaling.target / 100 if autoscaling.metric in _PERCENTAGES else autoscaling.target
    # Without engines, there are no series. With engines, missing series are an error, not a load of 0.
    has_zero = autoscaling.min_replicas == 0
    triggers = [_trigger(keda, f"sum({series}{{{matchers}}})", str(threshold), empty_is_zero=has_zero)]
    if keda.wake_up_query is not None:
        triggers.append(_trigger(keda, keda.wake_up_query, _NEVER, empty_is_zero=True))
    spec = {
        **_target(key),
        "minReplicaCount": autoscaling.min_replicas,
        "maxReplicaCount": autoscaling.max_replicas,
        "cooldownPeriod": autoscaling.scale_down_stabilization_seconds,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling, frozen=False)}},
        "triggers": triggers,
    }
    body = _object(key, SCALED_OBJECT, spec)
    if frozen:
        body["metadata"]["annotations"] = {_PAUSED_ANNOTATION: "true"}
    return body


def _trigger(keda: Keda, query: str, threshold: str, *, empty_is_zero: bool) -> Body:
    metadata = {
        "serverAddress": keda.server_address,
        "query": query,
        "threshold": threshold,
        "ignoreNullValues": str(empty_is_zero).lower(),
    }
    credentials = {"authenticationRef": {"name": keda.authentication}} if keda.authentication else {}
    return {"type": "prometheus", "metadata": metadata, **credentials}


def autoscaled_condition(
    parent: ParsedDeployment, live: Body | None, blocked: Readiness | None, load: ReplicaLoad | None
) -> list[ConditionUpdate]:
    """Return the condition Autoscaled of an object; empty if there is no autoscaler and none is wanted.

    ``live`` is the object's autoscaler in the cluster, ``blocked`` is why it could not be written, and ``load`` is the
    measurement that PredictedUtilization needs.
    """
    wanted = wanted_autoscaler(parent)
    if blocked is not None:
        return [ConditionUpdate(AUTOSCALED, blocked.status, blocked.reason, blocked.message)]
    if wanted is None and live is None:
        return []
    if why := _why_frozen(parent, wanted):
        return [ConditionUpdate(AUTOSCALED, FALSE, "AutoscalingPaused", f"{why}; the autoscaler does not scale")]
    if live is None:
        message = f"The autoscaler {parent.key.name} is created together with the engines"
        return [ConditionUpdate(AUTOSCALED, UNKNOWN, "AutoscalerPending", message)]
    found = _of_scaled_object(live) if live["kind"] == SCALED_OBJECT.kind else _of_autoscaler(live)
    predicts = wanted is not None and wanted.metric is AutoscalingMetric.PREDICTED_UTILIZATION
    if predicts and load is not None:
        if load.capacity is None:
            message = f"The capacity of a replica is unknown, so spec.replicas does not change: {load.message}"
            return [ConditionUpdate(AUTOSCALED, FALSE, "CapacityUnknown", message)]
        found = replace(found, message=f"{found.message}. {load.message}")
    if parent.replicas_applied_by and found.status is TRUE:
        who = ", ".join(parent.replicas_applied_by)
        message = f"{who} also sets spec.replicas, and each apply resets the number; remove replicas from the manifest"
        found = replace(found, reason="ReplicasAlsoSet", message=f"{message}. {found.message}")
    return [found]


def _why_frozen(parent: ParsedDeployment, autoscaling: Autoscaling | None) -> str:
    """Return why the autoscaler must not scale; an empty text if it may."""
    if parent.suspended_for is not None:
        return f"Capture {parent.suspended_for} uses the engines' GPUs"
    if parent.raw_spec.get("suspend") is True:
        return "spec.suspend is true"
    from_zero = autoscaling is not None and autoscaling.min_replicas == 0
    if parent.raw_spec.get("replicas") == 0 and not from_zero:
        return "spec.replicas is 0, and only autoscaling.minReplicas 0 can scale up from it; set it to 1 or more"
    return ""


def _of_autoscaler(live: Body) -> ConditionUpdate:
    """Return the condition that sums up the conditions of a HorizontalPodAutoscaler.

    The reasons are those of pkg/controller/podautoscaler/horizontal.go in Kubernetes.
    """
    conditions = _conditions(live)
    able, active, limited = (conditions.get(type_, {}) for type_ in ("AbleToScale", "ScalingActive", "ScalingLimited"))
    for condition in (able, active):
        if condition.get("status") != "False":
            continue
        if condition is able:
            message = f"{condition.get('reason')}: {condition.get('message')}"
            return ConditionUpdate(AUTOSCALED, FALSE, "ScaleFailed", message)
        return _inactive(condition)
    if active.get("status") != "True":
        message = f"HorizontalPodAutoscaler {live['metadata']['name']} has not computed a number of replicas yet"
        return ConditionUpdate(AUTOSCALED, UNKNOWN, "AutoscalerPending", message)
    if limited.get("status") == "True" and limited.get("reason") == "TooManyReplicas":
        message = "The load needs more replicas than spec.autoscaling.maxReplicas"
        return ConditionUpdate(AUTOSCALED, TRUE, "AtMaxReplicas", message)
    return ConditionUpdate(AUTOSCALED, TRUE, "AutoscalerActive", "The autoscaler sets spec.replicas")


def _of_scaled_object(live: Body) -> ConditionUpdate:
    """Return the condition that sums up the conditions of a ScaledObject."""
    conditions = _conditions(live)
    for type_, bad in (("Ready", "False"), ("Fallback", "True"), ("HPAActive", "False")):
        if conditions.get(type_, {}).get("status") == bad:
            return _inactive(conditions[type_])
    if conditions.get("Ready", {}).get("status") == "True":
        return ConditionUpdate(AUTOSCALED, TRUE, "AutoscalerActive", "KEDA sets spec.replicas")
    message = f"KEDA has not processed ScaledObject {live['metadata']['name']} yet; check that KEDA is running"
    return ConditionUpdate(AUTOSCALED, UNKNOWN, "AutoscalerPending", message)


def _inactive(condition: Mapping[str, Any]) -> ConditionUpdate:
    """Return the condition for an autoscaler that does not scale."""
    reason, message = condition.get("reason"), condition.get("message")
    if reason == "AmbiguousSelector":
        fix = "delete the other HorizontalPodAutoscaler, or remove spec.autoscaling; until then neither scales"
        return ConditionUpdate(AUTOSCALED, FALSE, "OtherAutoscaler", f"{message}; {fix}")
    return ConditionUpdate(AUTOSCALED, FALSE, "MetricsUnavailable", f"{reason}: {message}; {_NO_METRICS_FIX}")


def _conditions(live: Body) -> dict[str, Mapping[str, Any]]:
    return {str(each.get("type")): each for each in objects(mapping(live, "status"), "conditions")}
