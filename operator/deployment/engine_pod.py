"""Render the pods that engines run in: vLLM, a replay of a recording, or vLLM with an emulated GPU.

`engine_pod` renders an engine on one node, `group_pods` the leader and workers of an engine on several nodes. A
replay runs from the operator's image with the same probes and drain as vLLM. An emulated engine runs vLLM for the
CPU without weights.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.deployment import (
    KIND,
    Key,
    Matching,
    RecordingSource,
    Replay,
    ReplayMode,
    SpecDecodeDeploymentSpec,
    Unmatched,
)
from specdecode_operator.cluster.manifests import content_hash, render_template, secret_key
from specdecode_operator.cluster.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.cluster.resources import (
    ENGINE_CONTAINER,
    ENGINE_LOGGING_ANNOTATION,
    ENGINE_WATCH_ANNOTATION,
    TEMPLATE_HASH_ANNOTATION,
    selector_labels,
    worker_labels,
)
from specdecode_operator.deployment.engine_settings import engine_settings, served_names
from specdecode_operator.deployment.models.model_locations import (
    COMPILE_CACHE_PATH,
    COMPILED_PATH,
    compiled_mount,
    downloads_in_pods,
    engine_volumes,
    hub_environment,
    model_path,
)
from specdecode_operator.deployment.pod_scripts import warm_start
from specdecode_operator.deployment.pod_template_merge import (
    DOWNLOAD_DRAFT,
    DOWNLOAD_TARGET,
    PREPARE,
    container_user,
    merge,
    volume_group,
)
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.timeouts import PROBE_PERIOD_S, Timeouts, timeouts
from specdecode_operator.sizing.memory.buffers import cost_profile_s
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.vllm.arguments import TLS_PATH, command_line
from specdecode_operator.vllm.environment import (
    API_KEY_VARIABLE,
    FIXED_VARIABLES,
    HOST_ADDRESS_VARIABLE,
    STARTUP_PLAN_ENVIRONMENT,
    environment,
)
from specdecode_operator.vllm.logging_config import (
    ENGINE_CONFIG_PATH,
    LOGGING_CONFIG_PATH,
    LOGGING_CONFIG_VARIABLE,
    LOGGING_FILE,
    LOGGING_LEVEL_VARIABLE,
    WATCH,
    WATCH_FILE,
    logging_config,
)
from specdecode_operator.vllm.settings import ContainerVariable, EngineSettings, NodeGroup, Platform

_SHM_GIB_PER_GPU = 1
_MODELS_MOUNT: Final = {"name": "models", "mountPath": "/models", "readOnly": True}
_WARM_START: Final = Path(warm_start.__file__).read_text(encoding="utf-8")
_RANK: Final = ContainerVariable("$(LWS_WORKER_INDEX)")
# What LeaderWorkerSets tell every container (sigs.k8s.io/lws, pkg/utils/pod/pod_utils.go AddLWSVariables).
_LEADER_ADDRESS: Final = ContainerVariable("$(LWS_LEADER_ADDRESS)")
_OWN_ADDRESS: Final = ContainerVariable(f"$({HOST_ADDRESS_VARIABLE})")


class Role(StrEnum):
    """What a pod does for its engine."""

    ALONE = "alone"
    LEADER = "leader"
    WORKER = "worker"


def engine_pod(key: Key, facts: Facts, plan: Plan) -> Body:
    """Return metadata and spec of the pods that serve this plan, with the user's podTemplate merged in."""
    return rendered_pod(facts.spec, _values(key, facts, plan, Role.ALONE))


def group_pods(key: Key, facts: Facts, plan: Plan) -> tuple[Body, Body]:
    """Return the same for an engine on several nodes: the pod that leads, which alone serves, and the others."""
    leader, worker = (_merged(facts.spec, _values(key, facts, plan, role)) for role in (Role.LEADER, Role.WORKER))
    _mark(content_hash({Role.LEADER: leader, Role.WORKER: worker}), leader, worker)
    return leader, worker


def rendered_pod(spec: SpecDecodeDeploymentSpec, values: Mapping[str, Any]) -> Body:
    """Return a pod that serves alone, of values for the template."""
    pod = _merged(spec, values)
    _mark(content_hash(pod), pod)
    return pod


def _merged(spec: SpecDecodeDeploymentSpec, values: Mapping[str, Any]) -> Body:
    pod = render_template("engine-pod", dict(values))
    # In the template they would make another text for each object of a spec.
    pod["metadata"] = {"labels": dict(values["labels"]), **(pod["metadata"] or {})}
    template = spec.pod_template
    return pod if template is None else merge(pod, template.model_dump(by_alias=True, exclude_none=True))


def _mark(template_hash: str, *pods: Body) -> None:
    for pod in pods:
        pod["metadata"].setdefault("annotations", {})[TEMPLATE_HASH_ANNOTATION] = template_hash


def scheme(spec: SpecDecodeDeploymentSpec) -> str:
    """Return what the engine speaks: HTTP or HTTPS."""
    return "HTTPS" if spec.serving.tls_secret else "HTTP"


def engine_timeouts(facts: Facts, plan: Plan) -> Timeouts:
    """Return how long each step of an engine's life may take."""
    together = facts.takes_pods_of(plan) > 1
    if facts.replay is not None:
        return timeouts(facts.spec, 0, together=together)
    of_gpu_bytes = plan.chosen.budget.weights_bytes
    measuring_s = cost_profile_s(facts.pair, of_gpu_bytes)
    return timeouts(facts.spec, of_gpu_bytes * plan.chosen.gpus, measuring_s, together=together)


def _group(facts: Facts, plan: Plan, role: Role) -> NodeGroup | None:
    if role is Role.ALONE:
        return None
    leads = role is Role.LEADER
    return NodeGroup(
        nodes=plan.chosen.nodes,
        rank=_RANK,
        # ZeroMQ listens at an address and at no name; who connects finds the leader by name.
        leader_address=_OWN_ADDRESS if leads else _LEADER_ADDRESS,
        leads=leads,
        meeting_timeout_s=engine_timeouts(facts, plan).startup_s,
    )


def _values(key: Key, facts: Facts, plan: Plan, role: Role) -> dict[str, Any]:
    spec = facts.spec
    settings = engine_settings(spec, facts.pair, plan.chosen.tensor, _group(facts, plan, role))
    cached = spec.models.cache is not None and role is Role.ALONE
    own_env = {variable.name: variable.value for variable in spec.engine.env}
    env = {**environment(settings), LOGGING_CONFIG_VARIABLE: LOGGING_CONFIG_PATH}
    if cached and settings.ranks == 1:
        env |= STARTUP_PLAN_ENVIRONMENT
    env |= own_env
    logging = logging_config(own_env.get(LOGGING_LEVEL_VARIABLE, "INFO").upper())
    return {
        "role": role,
        "prepare": None,
        "labels": worker_labels(key.name) if role is Role.WORKER else selector_labels(key.name),
        "host_address_variable": HOST_ADDRESS_VARIABLE,
        "image": facts.image,
        "command": _command(facts, settings) if cached else command_line(settings, facts.profile),
        "env": [{"name": name, "value": value} for name, value in sorted(env.items())],
        "product": None if facts.on_cpu else plan.chosen.product,
        "product_label": PRODUCT_LABEL,
        "gpu_resource": GPU_RESOURCE,
        "resources": _resources(facts, plan),
        "user": container_user(spec, ENGINE_CONTAINER),
        "volume_group": volume_group(spec),
        "mounts": [_MODELS_MOUNT, *_compiled(facts, plan, settings, own_env)] if cached else [_MODELS_MOUNT],
        "shm_gib": _SHM_GIB_PER_GPU * plan.chosen.gpus_per_node,
        "engine_config": {
            ENGINE_LOGGING_ANNOTATION: (LOGGING_FILE, logging),
            ENGINE_WATCH_ANNOTATION: (WATCH_FILE, WATCH),
        },
        "engine_config_path": ENGINE_CONFIG_PATH,
        "probe_period_s": PROBE_PERIOD_S,
        "times": engine_timeouts(facts, plan),
        **_model_values(spec),
        **access_values(spec),
    }


def _model_values(spec: SpecDecodeDeploymentSpec) -> dict[str, Any]:
    return {
        "volumes": engine_volumes(spec),
        "downloads": _downloads(spec) if downloads_in_pods(spec) else [],
        "hub_env": hub_environment(spec),
        "hub_token": secret_key(spec.models.hub_token_secret),
    }


def access_values(spec: SpecDecodeDeploymentSpec) -> dict[str, Any]:
    """Return how clients and the kubelet reach the engine."""
    return {
        "port": spec.serving.port,
        "scheme": scheme(spec),
        "health": _health(spec),
        "api_key_variable": API_KEY_VARIABLE,
        "api_key": secret_key(spec.serving.api_key_secret),
        "tls_secret": spec.serving.tls_secret.name if spec.serving.tls_secret else None,
        "tls_path": TLS_PATH,
    }


def _health(spec: SpecDecodeDeploymentSpec) -> Body:
    asked = {"path": "/health", "port": scheme(spec).lower()}
    return asked | ({"scheme": "HTTPS"} if spec.serving.tls_secret else {})


def _command(facts: Facts, settings: EngineSettings) -> list[str]:
    command = command_line(settings, facts.profile)
    health = f"--health={'https' if settings.tls else 'http'}://127.0.0.1:{settings.port}/health"
    shared, own = f"--folder={COMPILED_PATH}", f"--cache={COMPILE_CACHE_PATH}"
    return ["python3", "-c", _WARM_START, shared, own, health, "--", *command]


def _compiled(facts: Facts, plan: Plan, settings: EngineSettings, own_env: Mapping[str, str]) -> list[Body]:
    mount = compiled_mount(facts.spec, _compiled_folder(facts, plan, settings, own_env))
    return [mount] if mount else []


def _compiled_folder(facts: Facts, plan: Plan, settings: EngineSettings, own_env: Mapping[str, str]) -> str:
    """Name what engines of one kind compile: by version and product for people, by all else for safety.

    vLLM's own keys leave out what the start-up plan depends on, such as the share of memory (config/cache.py,
    compute_hash).
    """
    product = "cpu" if facts.on_cpu else plan.chosen.product
    content = {"image": facts.image, "command": command_line(settings, facts.profile), "env": dict(own_env)}
    return f"{facts.profile.version}-{product}-{content_hash(content)}"


def _resources(facts: Facts, plan: Plan) -> Body:
    if not facts.on_cpu:
        return {"limits": {GPU_RESOURCE: str(plan.chosen.gpus_per_node)}}
    accelerator = facts.spec.accelerator
    memory = f"{accelerator.memory_gib}Gi"
    return {
        # A CPU limit would throttle the engine while the node has idle cores.
        "requests": {"cpu": str(accelerator.cpu_cores), "memory": memory},
        "limits": {"memory": memory},
    }


def _downloads(spec: SpecDecodeDeploymentSpec) -> list[dict[str, Any]]:
    models = {(spec.target.model, spec.target.revision): DOWNLOAD_TARGET}
    if spec.speculation and (draft := spec.speculation.draft):
        # A model that drafts for itself is there already.
        models.setdefault((draft.model, draft.revision), DOWNLOAD_DRAFT)
    return [
        {
            "name": name,
            "user": container_user(spec, name),
            "command": [
                *("hf", "download", model, "--local-dir", model_path(model)),
                # In one word: one that begins with - would be an option.
                *((f"--revision={revision}",) if revision else ()),
            ],
        }
        for (model, revision), name in models.items()
    ]


RECORDING_PATH: Final = "/recording"
USER_ID: Final = 65532
_FOLDER: Final = "/tmp/emulated"  # noqa: S108  the pod's own
_TMP: Final = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  the pod's own
_PREPARE: Final = 'printf %s "$0" | exec specdecode replay prepare --plan=- "$@"'
# The server and the core of an engine that computes nothing; less than 2 GiB was seen.
_REQUESTS: Final = {"cpu": "1", "memory": "3Gi"}


def emulated_engine(key: Key, facts: Facts, plan: Plan, mount: Body) -> dict[str, Any]:
    """Return what is an emulated engine's own of a pod."""
    own_env = {variable.name: variable.value for variable in facts.spec.engine.env}
    env = FIXED_VARIABLES | own_env
    return {
        "image": facts.spec.engine.image or facts.profile.images[Platform.CPU],
        "command": ["python3", f"{_FOLDER}/start.py", "--host=0.0.0.0", f"--port={facts.spec.serving.port}"],
        "env": [{"name": name, "value": value} for name, value in sorted(env.items())],
        "resources": {"requests": _REQUESTS},
        "prepare": _prepare(key, facts, plan, mount),
        "shm_gib": 1,
    }


def _prepare(key: Key, facts: Facts, plan: Plan, mount: Body) -> Body:
    replay = facts.replay
    assert replay is not None  # noqa: S101  there would be no such pod
    flags = [f"--out={_FOLDER}", f"--seed={replay.seed}", f"--num-gpu-blocks={plan.chosen.budget.num_blocks}"]
    words = [_planned_object(key, facts, plan), f"{RECORDING_PATH}/{replay.trace.path}", *flags]
    return {
        "name": PREPARE,
        "image": facts.operator_image,
        # The kubelet puts variables in for $(NAME).
        "command": ["/bin/sh", "-c", _PREPARE.replace("$", "$$"), *(word.replace("$", "$$") for word in words)],
        "securityContext": {
            **container_user(facts.spec, PREPARE, USER_ID),
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount, _TMP],
    }


def _planned_object(key: Key, facts: Facts, plan: Plan) -> str:
    spec = facts.spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"pod_template", "captures"}
    )
    chosen = plan.chosen
    spec["parallelism"] = {**spec.get("parallelism", {}), "tensor": chosen.tensor}
    if not facts.on_cpu:
        spec["accelerator"] = {**spec.get("accelerator", {}), "product": [chosen.product]}
    metadata = {"name": key.name, "namespace": key.namespace}
    return json.dumps({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}, sort_keys=True)


_MOUNT: Final = {"name": "specdecode-recording", "mountPath": RECORDING_PATH, "readOnly": True}
_PROBE_PERIOD_S: Final = 1  # It is ready in a second, and not in minutes
# A trace of 100,000 requests takes more memory: podTemplate may ask for it.
_REPLAY_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
_MODES: Final = {ReplayMode.STEPS: "steps", ReplayMode.MODELLED: "modelled"}
_MATCHING: Final = {Matching.ARRIVAL: "arrival", Matching.REQUEST_ID: "request-id", Matching.PREFIX: "prefix"}
_UNMATCHED: Final = {Unmatched.REPEAT: "repeat", Unmatched.REFUSE: "refuse", Unmatched.MODELLED: "modelled"}


def replay_pod(key: Key, facts: Facts, plan: Plan) -> Body:
    """Return metadata and spec of the pods that replay a recording, with the user's podTemplate merged in."""
    spec, replay = facts.spec, facts.replay
    assert replay is not None  # noqa: S101  there would be no such pod
    is_emulated = replay.mode is ReplayMode.EMULATED
    engine = emulated_engine(key, facts, plan, _MOUNT) if is_emulated else _server(facts, replay, plan)
    return rendered_pod(
        spec,
        {
            "role": Role.ALONE,
            "labels": selector_labels(key.name),
            "user": container_user(spec, ENGINE_CONTAINER, USER_ID),
            # Nothing of what only vLLM needs.
            **dict.fromkeys(("product", "volume_group", "downloads", "prepare", "shm_gib", "engine_config")),
            "volumes": [{"name": _MOUNT["name"], **_volume(replay.trace)}],
            "mounts": [_MOUNT],
            "probe_period_s": _PROBE_PERIOD_S,
            "times": engine_timeouts(facts, plan),
            **access_values(spec),
            **engine,
        },
    )


def _server(facts: Facts, replay: Replay, plan: Plan) -> dict[str, Any]:
    return {
        "image": facts.operator_image,
        "command": _replay_command(facts, replay, plan),
        "env": [],
        "resources": {"requests": _REPLAY_REQUESTS},
    }


def _volume(source: RecordingSource) -> Body:
    if source.config_map is not None:
        # A pod waits in silence for one that is missing, and a process tells of it.
        return {"configMap": {"name": source.config_map.name, "optional": True}}
    assert source.persistent_volume_claim is not None  # noqa: S101  the CRD's rule
    return {"persistentVolumeClaim": {"claimName": source.persistent_volume_claim.claim_name, "readOnly": True}}


def _replay_command(facts: Facts, replay: Replay, plan: Plan) -> list[str]:
    spec, budget = facts.spec, plan.chosen.budget
    flags: dict[str, Any] = {
        "mode": _MODES[replay.mode],
        "host": "0.0.0.0",  # noqa: S104  the pod's own network
        "port": spec.serving.port,
        "max-model-len": facts.pair.limits.max_model_len,
        "kv-cache-tokens": max(1, budget.kv_cache_tokens),
        "time-scale": replay.time_scale_percent / 100,
        "load-factor": replay.load_factor,
        "seed": replay.seed,
        "drain-timeout": engine_timeouts(facts, plan).shutdown_timeout_s,
        **_failures(replay),
    }
    if replay.mode is ReplayMode.MODELLED:
        limits = facts.pair.limits
        flags |= {"max-num-seqs": limits.max_num_seqs, "max-num-batched-tokens": limits.max_num_batched_tokens}
    else:
        flags |= {"match": _MATCHING[replay.match], "unmatched": _UNMATCHED[replay.unmatched]}
    if replay.acceptance:
        flags["acceptance"] = ",".join(f"{each.from_seconds}:{each.percent / 100}" for each in replay.acceptance)
    names = [f"--served-model-name={name}" for name in served_names(spec)]
    written = [f"--{name}={value}" for name, value in flags.items()]
    return ["specdecode", "replay", "serve", f"{RECORDING_PATH}/{replay.trace.path}", *names, *written]


def _failures(replay: Replay) -> dict[str, Any]:
    failures = replay.failures
    given = {
        "slow-start": failures.start_seconds or None,
        "fail-share": failures.error_percent / 100 if failures.error_percent else None,
        "hang-after": failures.hang_after_seconds,
        "crash-after": failures.crash_after_seconds,
    }
    return {name: value for name, value in given.items() if value is not None}
