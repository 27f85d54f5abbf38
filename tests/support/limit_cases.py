"""Limits of two namespaces as the chart has them, and what they refuse."""

from typing import Any

from specdecode_operator.api.base import Body
from tests.support.objects import H100, H200, pair_70b, tiny_cpu
from tests.support.refreshes import schedule_of

OPEN, SMALL, ONE_PRODUCT = "limits-open", "limits-small", "limits-one-product"
"""Namespaces."""


def of(namespace: str) -> Body:
    """Return what selects a namespace."""
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


VALUES: Body = {
    "limits": [
        {"name": "small", "namespaceSelector": of(SMALL), "products": [H100], "maxGpus": 4, "hostPaths": []},
        {
            "name": "images",
            "namespaceSelector": of(SMALL),
            "images": ["registry.example.org/engines/", "docker.io/vllm/vllm-openai"],
        },
        {"name": "paths", "namespaceSelector": of(OPEN), "hostPaths": ["/mnt/models"]},
        {"name": "product", "namespaceSelector": of(ONE_PRODUCT), "products": [H100]},
        {"name": "told", "namespaceSelector": of(OPEN), "products": [H100, H200], "action": "Warn"},
    ]
}

_H100: Body = {"accelerator": {"products": [H100]}}
_IMAGE: Body = {"engine": {"image": "registry.example.org/engines/vllm:1"}}


def small(**changes: Any) -> Body:
    """Return a spec that the small namespace takes, with changes."""
    spec = pair_70b(**{"parallelism": {"tensor": 4}, **_H100, **_IMAGE, **changes})
    return {field: value for field, value in spec.items() if value is not None}


def with_pod(**spec: Any) -> Body:
    """Return a spec that the small namespace would take without this in its podTemplate."""
    return small(podTemplate={"spec": spec})


def with_draft(**changes: Any) -> Body:
    """Return a spec that the small namespace takes, with changes of its draft."""
    spec = small()
    return {**spec, "speculation": {**spec["speculation"], "draft": {**spec["speculation"]["draft"], **changes}}}


def on_nodes(path: str) -> Body:
    """Return a spec with models in a directory of the nodes."""
    return pair_70b(models={"volume": {"hostPath": {"path": path}}}, **_H100)


TAKEN: dict[str, tuple[str, Body]] = {
    "all as allowed": (SMALL, small()),
    "the image of vLLM itself": (SMALL, small(engine={})),
    "two replicas of two GPUs": (SMALL, small(replicas=2, parallelism={"tensor": 2})),
    "an autoscaler within the limit": (
        SMALL,
        small(autoscaling={"maxReplicas": 2, "metric": "RunningRequests", "target": 8}, parallelism={"tensor": 2}),
    ),
    "no GPU": (SMALL, tiny_cpu(engine=_IMAGE["engine"])),
    "an image beside": (
        SMALL,
        with_pod(containers=[{"name": "side", "image": "registry.example.org/engines/a@sha256:1"}]),
    ),
    "a directory inside": (OPEN, on_nodes("/mnt/models/llama")),
}

REFUSED: dict[str, tuple[str, Body, str]] = {
    "another product": (
        SMALL,
        small(accelerator={"products": [H100, H200]}),
        (
            f"spec.accelerator.products: {H100}, {H200}: in this namespace engines run on {H100}: name one or more of"
            " these"
        ),
    ),
    "any product": (SMALL, small(accelerator={}), "spec.accelerator.products: is missing: in this namespace"),
    "too many replicas": (
        SMALL,
        small(replicas=2),
        "spec.parallelism.tensor: 4: with spec.replicas 2 takes 8 GPUs, and in this namespace an object takes at most",
    ),
    "an autoscaler that could start too many replicas": (
        SMALL,
        small(autoscaling={"maxReplicas": 3, "metric": "RunningRequests", "target": 8}),
        "with spec.autoscaling.maxReplicas 3 takes 12 GPUs",
    ),
    "too many stages": (SMALL, small(parallelism={"tensor": 4, "pipeline": 2}, speculation=None), "takes 8 GPUs"),
    "too many copies": (SMALL, small(parallelism={"tensor": 4, "data": 3}), "takes 12 GPUs"),
    "who knows how many": (SMALL, small(parallelism={}), "spec.parallelism.tensor: is missing: in this namespace"),
    "GPUs for a container beside": (
        SMALL,
        with_pod(containers=[{"name": "side", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]),
        "spec.podTemplate: side: in this namespace an object takes at most 4 GPUs, by spec.parallelism",
    ),
    "GPUs for a container before": (
        SMALL,
        with_pod(initContainers=[{"name": "first", "resources": {"requests": {"nvidia.com/gpu": "8"}}}]),
        "spec.podTemplate: first: in this namespace an object takes at most 4 GPUs",
    ),
    "GPUs for an engine that is planned without": (
        SMALL,
        tiny_cpu(
            engine=_IMAGE["engine"],
            podTemplate={
                "spec": {"containers": [{"name": "engine", "resources": {"requests": {"nvidia.com/mig-1g.10gb": 8}}}]}
            },
        ),
        "spec.podTemplate: engine: in this namespace",
    ),
    "GPUs of another product for an engine that is planned without": (
        ONE_PRODUCT,
        tiny_cpu(
            podTemplate={"spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
        ),
        (
            f"spec.podTemplate: engine: in this namespace GPUs are {H100}, by spec.accelerator.products alone: ask for"
            " none"
        ),
    ),
    "GPUs by the name of a device class": (
        SMALL,
        with_pod(containers=[{"name": "s", "resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu": "8"}}}]),
        "spec.podTemplate: s: in this namespace",
    ),
    "another image": (
        SMALL,
        small(engine={"image": "docker.io/other/vllm:1"}),
        "spec.engine.image: docker.io/other/vllm:1: in this namespace images are from registry.example.org/engines/, ",
    ),
    "an image whose name begins alike": (
        SMALL,
        small(engine={"image": "docker.io/vllm/vllm-openai-fork:1"}),
        "spec.engine.image: docker.io/vllm/vllm-openai-fork:1: in this namespace",
    ),
    "another image beside": (
        SMALL,
        with_pod(initContainers=[{"name": "side", "image": "evil:1"}]),
        "spec.podTemplate: evil:1: in this namespace images are from",
    ),
    "another image as a volume": (
        SMALL,
        with_pod(volumes=[{"name": "v", "image": {"reference": "evil:1"}}]),
        "spec.podTemplate: evil:1: in this namespace images are from",
    ),
    "another image of models": (
        SMALL,
        small(models={"volume": {"image": {"reference": "evil:1"}}}),
        "spec.models.volume.image.reference: evil:1: in this namespace images are from",
    ),
    "another image of a draft": (
        SMALL,
        with_draft(image={"reference": "evil:1"}),
        "spec.speculation.draft.image.reference: evil:1: in this namespace images are from",
    ),
    "another image of a trainer": (
        SMALL,
        small(captures=[schedule_of(100, template={"trainer": {"image": "evil:1"}})]),
        "spec.captures.training.template.trainer.image: evil:1: in this namespace images are from",
    ),
    "GPUs by a claim": (
        SMALL,
        with_pod(resourceClaims=[{"name": "more"}]),
        "spec.podTemplate: more: in this namespace",
    ),
    "any directory": (
        SMALL,
        small(models={"volume": {"hostPath": {"path": "/mnt/models"}}}),
        "spec.models.volume.hostPath.path: /mnt/models: in this namespace directories of nodes are from none",
    ),
    "a directory elsewhere": (OPEN, on_nodes("/etc"), "spec.models.volume.hostPath.path: /etc: in this namespace"),
    "a directory whose name begins alike": (OPEN, on_nodes("/mnt/models-of-others"), "/mnt/models-of-others: in this"),
    "a directory elsewhere beside": (
        OPEN,
        pair_70b(**_H100, podTemplate={"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/var"}}]}}),
        "/var: in this namespace directories of nodes are from /mnt/models",
    ),
}

TOLD: tuple[str, Body, str] = (OPEN, pair_70b(), "spec.accelerator.products: is missing: in this namespace engines run")
"""What is a warning by its action."""
