"""Renders the pod that an engine runs in, for whatever starts it."""

from typing import Any

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.fleet import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.engine.arguments import command_line
from specdecode_operator.engine.environment import API_KEY_VARIABLE, environment
from specdecode_operator.engine.logging_config import (
    ENGINE_CONFIG_PATH,
    LOGGING_CONFIG_PATH,
    LOGGING_CONFIG_VARIABLE,
    LOGGING_FILE,
    LOGGING_LEVEL_VARIABLE,
    logging_config,
)
from specdecode_operator.labels import ENGINE_LOGGING_ANNOTATION, TEMPLATE_HASH_ANNOTATION, selector_labels
from specdecode_operator.services.engine_settings import engine_settings, model_path
from specdecode_operator.services.facts import Facts
from specdecode_operator.services.manifests import content_hash, render_template, secret_key
from specdecode_operator.services.overlay import merge
from specdecode_operator.services.timings import PROBE_PERIOD_S, Timings, timings
from specdecode_operator.sizing.plan import Plan

_SHM_GIB_PER_GPU = 1


def engine_pod(key: Key, facts: Facts, plan: Plan) -> Body:
    """Return metadata and spec of the pods that serve this plan, with the user's podTemplate laid over."""
    pod = render_template("engine-pod", _values(key, facts, plan))
    overlay = facts.spec.pod_template
    if overlay is not None:
        pod = merge(pod, overlay.model_dump(by_alias=True, exclude_none=True))
    # Tells pods of this template from those of earlier ones.
    pod["metadata"].setdefault("annotations", {})[TEMPLATE_HASH_ANNOTATION] = content_hash(pod)
    return pod


def engine_timings(facts: Facts, plan: Plan) -> Timings:
    """Return how long each step of an engine's life may take."""
    return timings(facts.spec, plan.chosen.budget.weights_bytes * plan.chosen.gpus)


def _values(key: Key, facts: Facts, plan: Plan) -> dict[str, Any]:
    spec = facts.spec
    settings = engine_settings(spec, facts.pair, plan.chosen.tensor)
    own_env = {variable.name: variable.value for variable in spec.engine.env}
    env = {**environment(settings), LOGGING_CONFIG_VARIABLE: LOGGING_CONFIG_PATH, **own_env}
    return {
        "selector": selector_labels(key.name),
        "image": spec.engine.image or facts.profile.images[settings.platform],
        "command": command_line(settings, facts.profile),
        "env": [{"name": name, "value": value} for name, value in sorted(env.items())],
        "port": spec.serving.port,
        "api_key_variable": API_KEY_VARIABLE,
        "api_key": secret_key(spec.serving.api_key_secret),
        "hub_token": secret_key(spec.models.hub_token_secret),
        "product": None if facts.on_cpu else plan.chosen.product,
        "product_label": PRODUCT_LABEL,
        "gpu_resource": GPU_RESOURCE,
        "resources": _resources(facts, plan),
        "models_claim": spec.models.volume.persistent_volume_claim.claim_name if spec.models.volume else None,
        "downloads": [] if spec.models.volume else _downloads(spec),
        "shm_gib": _SHM_GIB_PER_GPU * plan.chosen.gpus,
        "logging_annotation": ENGINE_LOGGING_ANNOTATION,
        "logging_config": logging_config(own_env.get(LOGGING_LEVEL_VARIABLE, "INFO").upper()),
        "logging_field": f"metadata.annotations['{ENGINE_LOGGING_ANNOTATION}']",
        "logging_file": LOGGING_FILE,
        "engine_config_path": ENGINE_CONFIG_PATH,
        "probe_period_s": PROBE_PERIOD_S,
        "times": engine_timings(facts, plan),
    }


def _resources(facts: Facts, plan: Plan) -> Body:
    """Requests and limits of the engine container."""
    if not facts.on_cpu:
        return {"limits": {GPU_RESOURCE: str(plan.chosen.gpus)}}
    accelerator = facts.spec.accelerator
    memory = f"{accelerator.memory_gib}Gi"
    return {
        # A CPU limit would throttle the engine while the node has idle cores.
        "requests": {"cpu": str(accelerator.cpu_cores), "memory": memory},
        "limits": {"memory": memory},
    }


def _downloads(spec: SpecDecodeDeploymentSpec) -> list[dict[str, Any]]:
    """Init containers that fetch each model from the hub."""
    models = [("download-target", spec.target.model, spec.target.revision)]
    if spec.speculation and spec.speculation.draft:
        models.append(("download-draft", spec.speculation.draft.model, spec.speculation.draft.revision))
    return [
        {
            "name": name,
            "command": [
                *("hf", "download", model, "--local-dir", model_path(model)),
                *(("--revision", revision) if revision else ()),
            ],
        }
        for name, model, revision in models
    ]
