"""Kinds of other projects that start vLLM and are not read here: what to import instead of each."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping
from specdecode_operator.migration.sources.workload import name_in, within

GROUPS: Final[Mapping[str, str]] = {
    "Deployment": "apps",
    "StatefulSet": "apps",
    "Pod": "",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io",
    "LLMInferenceService": "serving.kserve.io",
    "InferenceService": "serving.kserve.io",
    "ServingRuntime": "serving.kserve.io",
    "ClusterServingRuntime": "serving.kserve.io",
}
"""API groups of the kinds that are read."""

_CREATES: Final[Mapping[tuple[str, str], str]] = {
    ("inference.llmkube.dev", "InferenceService"): "deployment/{name}",
    ("production-stack.vllm.ai", "VLLMRuntime"): "deployment/{name}",
    ("kaito.sh", "Workspace"): "statefulset/{name}",
}
"""What the controllers of other kinds create for an object, as `specdecode import` names it."""

_NO_SERVER: Final = "does not run vllm serve: write its engine arguments behind vllm serve, and import that"


def is_of_its_group(body: Mapping[str, Any]) -> bool:
    """Return whether an object's kind is the one of its name that is read here; without apiVersion it is."""
    group = _group(body)
    return group is None or GROUPS.get(str(body.get("kind")), group) == group


def import_instead(body: Mapping[str, Any]) -> str | None:
    """Return what to import instead of an object of another project; None if nothing is known of its kind."""
    kind, group, version = str(body.get("kind")), _group(body), str(body.get("apiVersion"))
    name, where = name_in(body), within(body)
    shown = f"{kind} of {version}"
    if kind == "DynamoGraphDeployment":
        workers = ", ".join(f"deployment/{each}" for each in _dynamo_workers(body))
        return f"{shown} is not read: {workers or 'what it creates'} {_NO_SERVER}"
    if kind == "RayService":
        return f"{shown} is not read: Ray Serve {_NO_SERVER}"
    if kind == "Model" and group == "kubeai.org":
        selector = shlex.quote(f"model={name}")
        return (
            f"{shown} is not read: import a Pod that it creates, specdecode import pod/NAME{where}; its Pods:"
            f" kubectl get pods{where} -l {selector}"
        )
    created = _CREATES.get((group or "", kind))
    if created is not None:
        words = f"specdecode import {shlex.quote(created.format(name=name))}{where}"
        return f"{shown} is not read: import the {_KINDS[created.partition('/')[0]]} that it creates: {words}"
    if kind in GROUPS and not is_of_its_group(body):
        return f"{shown} is not read: import the Deployment that it creates, specdecode import deployment/NAME{where}"
    return None


_KINDS: Final = {"deployment": "Deployment", "statefulset": "StatefulSet"}


def _dynamo_workers(body: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of the Deployments of services that run vLLM, GRAPH-SERVICE in lower case."""
    for service, spec in mapping(mapping(body, "spec"), "services").items():
        if "vllm" in str(mapping({"": spec}, "").get("extraPodSpec")):
            yield f"{name_in(body)}-{service}".lower()


def _group(body: Mapping[str, Any]) -> str | None:
    version = body.get("apiVersion")
    if not isinstance(version, str):
        return None
    return version.rpartition("/")[0]
