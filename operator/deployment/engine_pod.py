"""Render the pods that engines run in: vLLM, a replay of a recording, or vLLM with an emulated GPU.

A replay runs from the operator's image with the same probes and drain as vLLM. An emulated engine runs vLLM for the CPU
without weights.
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
    Replay,
    ReplayMode,
    SpecDecodeDeploymentSpec,
    Unmatched,
)
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.cluster.manifests import render_template, secret_key, variables_in
from specdecode_operator.cluster.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.cluster.resources import (
    ENGINE_CONTAINER,
    ENGINE_LOGGING_ANNOTATION,
    ENGINE_WATCH_ANNOTATION,
    RESOURCE_CLAIM_ANNOTATION,
    SIDECAR,
    TEMPLATE_HASH_ANNOTATION,
    TRAINED_DRAFT_ANNOTATION,
    selector_labels,
    worker_labels,
)
from specdecode_operator.deployment.engine_settings import (
    PROBE_PERIOD_S,
    Timeouts,
    engine_settings,
    served_names,
    timeouts,
)
from specdecode_operator.deployment.live_recorder import (
    carries_recorder,
    live_recorder_blocked,
    sidecar_of,
    with_recorder,
)
from specdecode_operator.deployment.models import model_locations
from specdecode_operator.deployment.pod_scripts import warm_start
from specdecode_operator.deployment.pod_template_merge import (
    CLAIM,
    DOWNLOAD_ADAPTER,
    DOWNLOAD_DRAFT,
    DOWNLOAD_TARGET,
    PREPARE,
    container_user,
    merge,
    volume_group,
)
from specdecode_operator.deployment.resource_claim import claim_request, claims_devices, pod_claims
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.startup_estimate import planned_startup
from specdecode_operator.enums import Platform
from specdecode_operator.sizing.memory.buffers import cost_profile_s
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm import logging_config
from specdecode_operator.vllm.arguments import TLS_PATH, command_line
from specdecode_operator.vllm.environment import (
    API_KEY_VARIABLE,
    FIXED_VARIABLES,
    HOST_ADDRESS_VARIABLE,
    STARTUP_PLAN_ENVIRONMENT,
    environment,
    manifest_variables,
)
from specdecode_operator.vllm.settings import ContainerVariable, EngineSettings, NodeGroup

_SHM_GIB_PER_GPU = 1
_MODELS_MOUNT: Final = {"name": "models", "mountPath": "/models", "readOnly": True}
_WARM_START: Final = Path(warm_start.__file__).read_text(encoding="utf-8")
_RANK: Final = ContainerVariable("$(LWS_WORKER_INDEX)")
# LeaderWorkerSet sets this in every container (sigs.k8s.io/lws, pkg/utils/pod/pod_utils.go AddLWSVariables).
_LEADER_ADDRESS: Final = ContainerVariable("$(LWS_LEADER_ADDRESS)")


class Role(StrEnum):
    """Role of a pod in its engine."""

    ALONE = "alone"
    LEADER = "leader"
    WORKER = "worker"


def engine_pod(key: Key, facts: Facts, plan: Plan, *, live: bool = True) -> Body:
    """Return metadata and spec of the pods that serve this plan, with the user's podTemplate merged in.

    Without ``live``, the pod does not carry the recorder for live captures.
    """
    return rendered_pod(facts.spec, _values(key, facts, plan, Role.ALONE, live=live))


def group_pods(key: Key, facts: Facts, plan: Plan) -> tuple[Body, Body]:
    """Return the pods of an engine on several nodes: the leader, which serves clients, and the workers."""
    leader, worker = (_merged(facts.spec, _values(key, facts, plan, role)) for role in (Role.LEADER, Role.WORKER))
    _mark(content_hash({Role.LEADER: leader, Role.WORKER: worker}), leader, worker)
    return leader, worker


def rendered_pod(spec: SpecDecodeDeploymentSpec, values: Mapping[str, Any]) -> Body:
    """Return the pod of an engine on one node, rendered from values for the template."""
    pod = _merged(spec, values)
    _mark(content_hash(pod), pod)
    return pod


def _merged(spec: SpecDecodeDeploymentSpec, values: Mapping[str, Any]) -> Body:
    pod = render_template("engine-pod", dict(values))
    # Labels are added here because the rendered text is cached for all objects with the same spec.
    pod["metadata"] = {"labels": dict(values["labels"]), **(pod["metadata"] or {})}
    added = {
        # Another head in the same folder has to be rolled out, too.
        TRAINED_DRAFT_ANNOTATION: values.get("trained_draft"),
        RESOURCE_CLAIM_ANNOTATION: values.get("claim_request"),
    }
    if given := {name: value for name, value in added.items() if value}:
        pod["metadata"]["annotations"] = {**(pod["metadata"].get("annotations") or {}), **given}
    template = spec.pod_template
    patch: Body = template.model_dump(by_alias=True, exclude_none=True) if template else {}
    of_sidecar = [each for each in objects(mapping(patch, "spec"), "initContainers") if name_of(each) == SIDECAR]
    if of_sidecar:
        others = [each for each in patch["spec"]["initContainers"] if each not in of_sidecar]
        patch = {**patch, "spec": {**patch["spec"], "initContainers": others}}
    pod = dict(merge(pod, patch))
    if carries_recorder(pod):
        # It starts last, when models are downloaded, and runs as the user that the patch gives the engine.
        (sidecar,) = merge([sidecar_of(pod)], of_sidecar, "initContainers")
        pod["spec"]["initContainers"] = [*(pod["spec"].get("initContainers") or []), sidecar]
    return pod


def _mark(template_hash: str, *pods: Body) -> None:
    for pod in pods:
        pod["metadata"].setdefault("annotations", {})[TEMPLATE_HASH_ANNOTATION] = template_hash


def scheme(spec: SpecDecodeDeploymentSpec) -> str:
    """Return the protocol of the engine's port: HTTP or HTTPS."""
    return "HTTPS" if spec.serving.tls_secret else "HTTP"


def engine_timeouts(facts: Facts, plan: Plan) -> Timeouts:
    """Return the timeouts of an engine's pods."""
    together = facts.takes_pods_of(plan) > 1
    if facts.replay is not None:
        return timeouts(facts.spec, 0, together=together)
    of_gpu_bytes = plan.chosen.budget.weights_bytes
    measuring_s = cost_profile_s(facts.pair, of_gpu_bytes)
    startup = planned_startup(facts, plan.chosen)
    slowest_s = 0 if startup is None else startup.engine_s.slowest
    return timeouts(facts.spec, of_gpu_bytes * plan.chosen.gpus, measuring_s, slowest_s, together=together)


def _settings(facts: Facts, plan: Plan, role: Role) -> EngineSettings:
    group = None
    if role is not Role.ALONE:
        leads = role is Role.LEADER
        # ZeroMQ can only listen on an IP address; workers connect to the leader by name.
        address = ContainerVariable(f"$({HOST_ADDRESS_VARIABLE})") if leads else _LEADER_ADDRESS
        meeting_timeout_s = engine_timeouts(facts, plan).startup_s
        group = NodeGroup(plan.chosen.nodes, _RANK, address, leads=leads, meeting_timeout_s=meeting_timeout_s)
    return engine_settings(facts.spec, facts.pair, plan.chosen.tensor, group)


def _warm_start(settings: EngineSettings, command: list[str]) -> list[str]:
    """Return the command of an engine that shares its compile cache."""
    group = settings.group
    host = "127.0.0.1" if group is None or group.leads else group.leader_address
    health = f"{'https' if settings.tls else 'http'}://{host}:{settings.serving.port}/health"
    flags = [
        f"--folder={model_locations.COMPILED_PATH}",
        f"--cache={model_locations.COMPILE_CACHE_PATH}",
        ContainerVariable(f"--health={health}"),
    ]
    if group is not None:
        rank, leader = ContainerVariable(f"--rank={group.rank}"), ContainerVariable(f"--leader={group.leader_address}")
        flags += [f"--pods={group.nodes}", rank, leader]
    return ["python3", "-c", _WARM_START, *flags, "--", *command]


def _values(key: Key, facts: Facts, plan: Plan, role: Role, *, live: bool = True) -> dict[str, Any]:
    spec, times = facts.spec, engine_timeouts(facts, plan)
    settings = _settings(facts, plan, role)
    command = command_line(settings, facts.profile)
    mounts = [_MODELS_MOUNT, *model_locations.own_mounts(spec)]
    own_env = manifest_variables(spec.engine.env)
    env = {**environment(settings), logging_config.LOGGING_CONFIG_VARIABLE: logging_config.LOGGING_CONFIG_PATH}
    if spec.models.cache is not None:
        if settings.ranks == 1:
            env |= STARTUP_PLAN_ENVIRONMENT
        # Workers share the folder of their leader.
        first = command_line(_settings(facts, plan, Role.LEADER), facts.profile) if role is Role.WORKER else command
        # Version and product are for people. The hash covers everything else, because vLLM's cache keys do not include
        # all that the start-up plan depends on, such as the memory utilization (config/cache.py, compute_hash).
        content = {"image": facts.image, "command": first, "env": _values_or_sources(own_env)}
        product = "cpu" if facts.on_cpu else plan.chosen.product
        mount = model_locations.compiled_mount(spec, f"{facts.profile.version}-{product}-{content_hash(content)}")
        mounts += [mount] if mount else []
        command = _warm_start(settings, command)
    resources: Body = {"limits": {GPU_RESOURCE: str(plan.chosen.gpus_per_node)}}
    request = claim_request(spec, plan.chosen) if claims_devices(spec) else None
    if request is not None:
        resources = {"claims": [{"name": CLAIM}]}
    if facts.on_cpu:
        memory = f"{spec.accelerator.memory_gib}Gi"
        # A CPU limit would throttle the engine while the node has idle cores.
        requests = {"cpu": str(spec.accelerator.cpu_cores), "memory": memory}
        resources = {"requests": requests, "limits": {"memory": memory}}
    level = own_env.get(logging_config.LOGGING_LEVEL_VARIABLE, {}).get("value", "INFO")
    logging = logging_config.logging_config(level.upper())
    values: dict[str, Any] = {
        "role": role,
        "prepare": None,
        "labels": worker_labels(key.name) if role is Role.WORKER else selector_labels(key.name),
        "host_address_variable": HOST_ADDRESS_VARIABLE,
        "image": facts.image,
        "command": command,
        "env": _with_own(env, own_env),
        # With a claim, its selectors choose the product.
        "node_labels": None if facts.on_cpu or request is not None else {PRODUCT_LABEL: plan.chosen.product},
        "gpu_resource": None if facts.on_cpu else GPU_RESOURCE,
        "claim_request": request,
        "claims": None if request is None else pod_claims(key, request),
        "resources": resources,
        "user": container_user(spec, ENGINE_CONTAINER),
        "volume_group": volume_group(spec),
        "mounts": mounts,
        "shm_gib": _SHM_GIB_PER_GPU * plan.chosen.gpus_per_node,
        "engine_config": {
            ENGINE_LOGGING_ANNOTATION: (logging_config.LOGGING_FILE, logging),
            ENGINE_WATCH_ANNOTATION: (logging_config.WATCH_FILE, logging_config.WATCH),
        },
        "engine_config_path": logging_config.ENGINE_CONFIG_PATH,
        "probe_period_s": PROBE_PERIOD_S,
        "times": times,
        "volumes": model_locations.engine_volumes(spec),
        "downloads": _downloads(spec) if model_locations.downloads_in_pods(spec) else [],
        "hub_env": model_locations.hub_environment(spec),
        "hub_token": secret_key(spec.models.hub_token_secret),
        "trained_draft": facts.trained_draft,
        **_access_values(spec),
    }
    carries = live and role is not Role.WORKER and live_recorder_blocked(facts.spec) is None
    return with_recorder(values, key, spec, facts.live_token_ids) if carries else values


def _with_own(env: Mapping[str, str], own: Mapping[str, Body]) -> list[Body]:
    """Return the variables of a container. Variables of the spec replace the operator's.

    They are sorted by name, but one whose value names others as ``$(NAME)`` comes after them: the kubelet expands only
    variables that it has already set.
    """
    variables: Body = {name: {"name": name, "value": value} for name, value in env.items()}
    variables.update(own)
    ordered: dict[str, Body] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name not in variables or name in begun:
            return
        begun.add(name)
        for reference in variables_in(variables[name].get("value") or ""):
            add(reference)
        ordered[name] = variables[name]

    for name in sorted(variables):
        add(name)
    return [*ordered.values()]


def _values_or_sources(variables: Mapping[str, Body]) -> Body:
    return {name: each.get("value", each.get("valueFrom")) for name, each in variables.items()}


def _access_values(spec: SpecDecodeDeploymentSpec) -> dict[str, Any]:
    """Return ports, probe and Secrets of the engine's API. The kubelet does not verify certificates."""
    health = {"path": "/health", "port": scheme(spec).lower()}
    return {
        "port": spec.serving.port,
        "scheme": scheme(spec),
        "health": health | ({"scheme": "HTTPS"} if spec.serving.tls_secret else {}),
        "api_key_variable": API_KEY_VARIABLE,
        "api_key": secret_key(spec.serving.api_key_secret),
        "tls_secret": spec.serving.tls_secret.name if spec.serving.tls_secret else None,
        "tls_path": TLS_PATH,
    }


def _downloads(spec: SpecDecodeDeploymentSpec) -> list[dict[str, Any]]:
    names = {model_locations.TARGET: DOWNLOAD_TARGET, model_locations.DRAFT: DOWNLOAD_DRAFT}
    models: dict[tuple[str, str | None], str] = {}
    for field, each in model_locations.fetched_models(spec).items():
        index = field.removeprefix(model_locations.ADAPTERS).strip("[]")
        models.setdefault((each.model, each.revision), names.get(field) or f"{DOWNLOAD_ADAPTER}-{index}")
    return [
        {
            "name": name,
            "user": container_user(spec, name),
            "command": [
                *("hf", "download", model, "--local-dir", model_locations.model_path(model)),
                # Use one word, because a revision may begin with "-".
                *((f"--revision={revision}",) if revision else ()),
            ],
        }
        for (model, revision), name in models.items()
    ]


_OF_VLLM: Final = (
    *("node_labels", "gpu_resource", "claims", "volume_group", "downloads", "prepare", "shm_gib", "engine_config"),
)
RECORDING_PATH: Final = "/recording"
USER_ID: Final = 65532
_FOLDER: Final = "/tmp/emulated"  # noqa: S108  the pod's own
_TMP: Final = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  the pod's own
_PREPARE: Final = 'printf %s "$0" | exec specdecode replay prepare --plan=- "$@"'
# API server and core of an engine without models; they used less than 2 GiB in tests.
_REQUESTS: Final = {"cpu": "1", "memory": "3Gi"}


def _emulated_engine(key: Key, facts: Facts, plan: Plan, replay: Replay) -> dict[str, Any]:
    """Return the template values of an emulated engine, with the init container that prepares its files."""
    chosen = plan.chosen
    # The object with the plan's choices, without fields that do not affect the engine.
    spec = facts.spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"pod_template", "captures"}
    )
    spec["parallelism"] = {**spec.get("parallelism", {}), "tensor": chosen.tensor}
    if not facts.on_cpu:
        spec["accelerator"] = {**spec.get("accelerator", {}), "products": [chosen.product]}
    metadata = {"name": key.name, "namespace": key.namespace}
    planned = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    flags = [f"--out={_FOLDER}", f"--seed={replay.seed}", f"--num-gpu-blocks={chosen.budget.num_blocks}"]
    words = [_PREPARE, json.dumps(planned, sort_keys=True), f"{RECORDING_PATH}/{replay.trace.path}", *flags]
    prepare = {
        "name": PREPARE,
        "image": facts.operator_image,
        # Escape $, because the kubelet expands $(NAME).
        "command": ["/bin/sh", "-c", *(word.replace("$", "$$") for word in words)],
        "securityContext": {
            **container_user(facts.spec, PREPARE, USER_ID),
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_MOUNT, _TMP],
    }
    return {
        "image": facts.spec.engine.image or facts.profile.images[Platform.CPU],
        "command": ["python3", f"{_FOLDER}/start.py", "--host=0.0.0.0", f"--port={facts.spec.serving.port}"],
        "env": _with_own(FIXED_VARIABLES, manifest_variables(facts.spec.engine.env)),
        "resources": {"requests": _REQUESTS},
        "prepare": prepare,
        "shm_gib": 1,
    }


_MOUNT: Final = {"name": "specdecode-recording", "mountPath": RECORDING_PATH, "readOnly": True}
_PROBE_PERIOD_S: Final = 1  # A replay is ready within a second
# A trace of 100,000 requests needs more memory, which podTemplate can request.
_REPLAY_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
_MODES: Final = {ReplayMode.STEPS: "steps", ReplayMode.MODELLED: "modelled"}
_MATCHING: Final = {Matching.ARRIVAL: "arrival", Matching.REQUEST_ID: "request-id", Matching.PREFIX: "prefix"}
_UNMATCHED: Final = {Unmatched.REPEAT: "repeat", Unmatched.REFUSE: "refuse", Unmatched.MODELLED: "modelled"}


def replay_pod(key: Key, facts: Facts, plan: Plan) -> Body:
    """Return metadata and spec of the pods that replay a recording, with the user's podTemplate merged in."""
    spec, replay = facts.spec, facts.replay
    assert replay is not None  # noqa: S101  checked by the caller
    if replay.mode is ReplayMode.EMULATED:
        engine = _emulated_engine(key, facts, plan, replay)
    else:
        command, resources = _replay_command(facts, replay, plan), {"requests": _REPLAY_REQUESTS}
        engine = {"image": facts.operator_image, "command": command, "env": [], "resources": resources}
    source = replay.trace
    if source.config_map is not None:
        # Without "optional", the pod would wait for a missing ConfigMap without an error; the process reports one.
        volume: Body = {"configMap": {"name": source.config_map.name, "optional": True}}
    else:
        assert source.persistent_volume_claim is not None  # noqa: S101  the CRD's rule
        claim = source.persistent_volume_claim.claim_name
        volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    values = {
        "role": Role.ALONE,
        "labels": selector_labels(key.name),
        "user": container_user(spec, ENGINE_CONTAINER, USER_ID),
        # Values that only vLLM needs.
        **dict.fromkeys(_OF_VLLM),
        "volumes": [{"name": _MOUNT["name"], **volume}],
        "mounts": [_MOUNT],
        "probe_period_s": _PROBE_PERIOD_S,
        "times": engine_timeouts(facts, plan),
        **_access_values(spec),
        **engine,
    }
    carries = live_recorder_blocked(facts.spec) is None
    return rendered_pod(spec, with_recorder(values, key, spec, facts.live_token_ids) if carries else values)


def _replay_command(facts: Facts, replay: Replay, plan: Plan) -> list[str]:
    """Return the command of a replay, with the KV cache size of the plan."""
    spec, limits, failures = facts.spec, facts.pair.limits, replay.failures
    flags: dict[str, Any] = {
        "mode": _MODES[replay.mode],
        "host": "0.0.0.0",  # noqa: S104  the pod's own network
        "port": spec.serving.port,
        "max-model-len": limits.max_model_len,
        "kv-cache-tokens": max(1, plan.chosen.budget.kv_cache_tokens),
        "time-scale": replay.time_scale_percent / 100,
        "load-factor": replay.load_factor,
        "seed": replay.seed,
        "drain-timeout": engine_timeouts(facts, plan).shutdown_timeout_s,
        "slow-start": failures.start_seconds or None,
        "fail-share": failures.error_percent / 100 if failures.error_percent else None,
        "hang-after": failures.hang_after_seconds,
        "crash-after": failures.crash_after_seconds,
    }
    if replay.mode is ReplayMode.MODELLED:
        flags |= {"max-num-seqs": limits.max_num_seqs, "max-num-batched-tokens": limits.max_num_batched_tokens}
    else:
        flags |= {"match": _MATCHING[replay.match], "unmatched": _UNMATCHED[replay.unmatched]}
    if replay.acceptance:
        flags["acceptance"] = ",".join(f"{each.from_seconds}:{each.percent / 100}" for each in replay.acceptance)
    answers_to = (*served_names(spec), *(each.name for each in spec.adapters))
    names = [f"--served-model-name={name}" for name in answers_to]
    written = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return ["specdecode", "replay", "serve", f"{RECORDING_PATH}/{replay.trace.path}", *names, *written]
