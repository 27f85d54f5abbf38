"""The pod of an engine that replays a recording: the operator's own image, with the probes and the drain of vLLM's."""

from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.api.replay import Matching, RecordingSource, Replay, ReplayMode, Unmatched
from specdecode_operator.deployment.objects.emulated_engine import RECORDING_PATH, USER_ID, emulated_engine
from specdecode_operator.deployment.objects.engine_pod import Role, access_values, engine_timeouts, rendered_pod
from specdecode_operator.deployment.objects.pod_user import container_user
from specdecode_operator.deployment.spec.engine_settings import served_names
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER
from specdecode_operator.kube.labels import selector_labels
from specdecode_operator.sizing.choice.plan import Plan

_MOUNT: Final = {"name": "specdecode-recording", "mountPath": RECORDING_PATH, "readOnly": True}
_PROBE_PERIOD_S: Final = 1
"""It is ready in a second, and not in minutes."""

_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
"""A trace of 100,000 requests takes more memory: podTemplate may ask for it."""

_MODES: Final = {ReplayMode.STEPS: "steps", ReplayMode.MODELLED: "modelled"}
_MATCHING: Final = {
    Matching.ARRIVAL: "arrival",
    Matching.REQUEST_ID: "request-id",
    Matching.PREFIX: "prefix",
}
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
    """Return what is a replay server's own of a pod."""
    return {
        "image": facts.operator_image,
        "command": _command(facts, replay, plan),
        "env": [],
        "resources": {"requests": _REQUESTS},
    }


def _volume(source: RecordingSource) -> Body:
    if source.config_map is not None:
        # A pod waits in silence for one that is missing, and a process tells of it.
        return {"configMap": {"name": source.config_map.name, "optional": True}}
    assert source.persistent_volume_claim is not None  # noqa: S101  the CRD's rule
    return {"persistentVolumeClaim": {"claimName": source.persistent_volume_claim.claim_name, "readOnly": True}}


def _command(facts: Facts, replay: Replay, plan: Plan) -> list[str]:
    """Return the command, with the KV cache that the plan promises."""
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
