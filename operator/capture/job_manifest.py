"""Render the Job of a capture: the deployment's engine pod plus a recorder and a load generator.

The engine becomes a native sidecar, so it starts before the load generator. The pod ends when the load generator
exits; the kubelet then stops the engine. With several arms, the engine's container starts one engine after the
other, as ordered by the load generator.

The manifest of a capture names the digest of the engine's image, which only the node can report. The kubelet writes it
to the pod's status. The operator copies it into a ConfigMap that the pod mounts. Writing it to a pod annotation
would require cluster-wide `patch pods`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Checks, DuringCapture, SpecDecodeCaptureSpec
from specdecode_operator.capture.arms import (
    CapturedArm,
    apart,
    common_engine_pod,
    engine_container,
    engine_pod_of,
    literals,
    plain_command,
)
from specdecode_operator.capture.job.pod_files import IMAGE_ID_FILE, SWITCH_FOLDER, Places, switcher_command
from specdecode_operator.capture.load import run_settings
from specdecode_operator.capture.observation import COLLECT, LOAD, Capture, CapturedDeployment, dataset_claim
from specdecode_operator.capture.recorder.segment_format import FOLDER_VARIABLE, STEPS_VARIABLE, TOKEN_IDS_VARIABLE
from specdecode_operator.capture.volumes import ROOT, SWITCH_VOLUME, claim_of, one_volume_per_claim
from specdecode_operator.cluster import resources
from specdecode_operator.cluster.manifests import child_labels, owned, render_template
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.live_recorder import BUNDLE_PATH
from specdecode_operator.deployment.pod_template_merge import FILES_PATH, FILES_VOLUME
from specdecode_operator.deployment.warnings import lossy_answers
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.version import __version__
from specdecode_operator.vllm.environment import API_KEY_VARIABLE
from specdecode_operator.vllm.plugin_bundle import RECORDER

_CERTIFICATES_FOLDER: Final = "/specdecode/tls"
_ITERATION_DETAILS: Final = "--enable-logging-iteration-details"
USER_ID: Final = 65532
# No Service sends requests to the engine, and a probe that kills it would interrupt the recording. The load generator
# checks for itself whether it answers.
_NOT_IN_A_SIDECAR: Final = ("readinessProbe", "livenessProbe", "lifecycle")
# Total time that the pods of a capture may wait with borrowed GPUs. spec.borrowTimeoutSeconds is shorter; this bounds
# a pod that no operator watches.
_LONGEST_WAIT_S: Final = 1800


def image_id_config_map(capture: Capture, pod: Body | None) -> Body | None:
    """Return the ConfigMap with the image ID of a pod's engine; None before its node reports it."""
    # All attempts of a capture share it, so it contains the UID of the pod.
    statuses = (pod or {}).get("status", {}).get("initContainerStatuses") or []
    image_id = next((each.get("imageID") for each in statuses if each["name"] == resources.ENGINE_CONTAINER), None)
    if pod is None or not image_id:
        return None
    data = {IMAGE_ID_FILE.name: f"{pod['metadata']['uid']} {image_id}\n"}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": capture.job_name}, "data": data}
    return owned(config_map, capture.key, capture.uid)


def render_job(
    capture: Capture,
    spec: SpecDecodeCaptureSpec,
    source: CapturedDeployment,
    arms: Sequence[CapturedArm],
    operator_image: str,
) -> Body:
    """Return the Job of a capture, with the deployment's engine or each arm's."""
    runs = [(arm, apart(engine_pod_of(arm.source), number)) for number, arm in enumerate(arms)]
    pod = common_engine_pod([each for _, each in runs]) if runs else engine_pod_of(source)
    settings = _settings(capture, spec, source, pod) | (_arm_settings(spec, runs, pod) if runs else {})
    deadline_s = spec.starts * sum(_deadline_s(spec, each.source) for each in arms) or _deadline_s(spec, source)
    borrows = spec.deployment_during_capture is DuringCapture.SUSPEND
    pod_spec = pod["spec"]
    security: Body = pod_spec.get("securityContext") or {}
    if spec.storage.existing_claim is None:  # a created volume belongs to the group that writes to it
        security = {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch", **security}
    dataset = spec.workload.prompts.dataset
    dataset_volume: Body | None = None
    if dataset is not None and dataset.config_map is not None:
        dataset_volume = {"configMap": {"name": dataset.config_map.name}}
    elif (claim := dataset_claim(spec)) is not None:
        dataset_volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    tls_secret = source.launch.facts.spec.serving.tls_secret
    # Optional, because not every Secret has its authority's certificate. The engine reports a missing Secret itself.
    certificates = tls_secret and {
        "secret": {
            "secretName": tls_secret.name,
            "optional": True,
            "items": _items(run_settings.CERTIFICATE, run_settings.AUTHORITY),
        }
    }
    values = {
        "name": capture.job_name,
        "suspend": bool(capture.queue_labels) or borrows,
        "backoff_limit": spec.backoff_limit,
        # With its own GPUs a Job may wait without limit; with borrowed ones it may not.
        "job_deadline_s": _LONGEST_WAIT_S + (1 + spec.backoff_limit) * deadline_s if borrows else None,
        "pod_deadline_s": deadline_s,
        # No Service, autoscaler or budget of the deployment may select the pod as one of its engines.
        "labels": kept_metadata(pod, "labels", resources.DEPLOYMENT_LABEL)
        | child_labels(capture.key)
        | {resources.CAPTURED_DEPLOYMENT_LABEL: spec.deployment},
        # The autoscaler must not drain a node to save money during a measurement.
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
        | kept_metadata(pod, "annotations", resources.TEMPLATE_HASH_ANNOTATION),
        "before": list(pod_spec.get("initContainers") or []),
        "engine": _engine(capture, spec, pod, switches=bool(runs)),
        # Containers of the user's podTemplate become sidecars; otherwise the pod would never end.
        "after": [
            {**each, "restartPolicy": "Always"}
            for each in pod_spec["containers"]
            if each["name"] != resources.ENGINE_CONTAINER
        ],
        "api_key": _api_key(pod),
        "switch_folder": SWITCH_FOLDER if runs else None,
        "dataset": dataset_volume,
        "claim": claim_of(capture, spec.storage),
        # Optional, because the ConfigMap is created after the pod.
        "image_id_config_map": {
            "configMap": {"name": capture.job_name, "items": _items(IMAGE_ID_FILE.name), "optional": True}
        },
        "engine_volumes": pod_spec.get("volumes") or [],
        "security_context": security,
        "user_id": USER_ID,
        "settings_variable": run_settings.SETTINGS_VARIABLE,
        "attempt_variable": run_settings.ATTEMPT_VARIABLE,
        "node_variable": run_settings.NODE_VARIABLE,
        "root": ROOT,
        "recorder_path": FILES_PATH,
        "certificates_folder": _CERTIFICATES_FOLDER,
        "image_id_folder": str(IMAGE_ID_FILE.parent),
        "operator_image": operator_image,
        "settings": json.dumps(settings, sort_keys=True).replace("$", "$$"),
        "certificates": certificates,
    }
    job = render_template("capture-job", values)
    rendered = {"containers", "initContainers", "volumes", "securityContext", "restartPolicy"}
    placement = {field: value for field, value in pod_spec.items() if field not in rendered}
    template = job["spec"]["template"]
    template["spec"] = one_volume_per_claim(placement | template["spec"])
    job = owned(job, capture.key, capture.uid)
    job["metadata"]["labels"] |= {resources.CAPTURED_DEPLOYMENT_LABEL: spec.deployment} | capture.queue_labels
    return job


def load_image(job: Body | None) -> str | None:
    """Return the operator image of a capture's Job; None without a Job or an image."""
    pod = mapping(mapping(mapping(job or {}, "spec"), "template"), "spec")
    main = (each.get("image") for each in objects(pod, "containers") if each.get("name") in (LOAD, COLLECT))
    image = next(main, None)
    return image if isinstance(image, str) else None


def wrap_up_s(deadline_seconds: int) -> int:
    """Return the time limit for merge, validation and publication, which grows with the load."""
    # A shared machine with 2 cores merged and checked 6 to 20 MB of segments per second.
    return 900 + deadline_seconds // 10


def load_deadline_s(deadline_seconds: int, source: CapturedDeployment) -> int:
    """Return the time limit for one start of an engine, its load and its files; ``deadline_seconds`` is the load's."""
    start_s = engine_timeouts(source.launch.facts, source.launch.plan).progress_deadline_s
    return start_s + deadline_seconds + wrap_up_s(deadline_seconds)


def _deadline_s(spec: SpecDecodeCaptureSpec, source: CapturedDeployment) -> int:
    return load_deadline_s(spec.deadline_seconds, source)


def _items(*keys: str) -> list[Body]:
    return [{"key": key, "path": key} for key in keys]


def kept_metadata(pod: Body, field: str, *dropped: str) -> dict[str, str]:
    """Return labels or annotations of the engine's pod without Kueue's, as the Job is queued and not its pods."""
    given: dict[str, str] = pod["metadata"].get(field) or {}
    return {
        name: value
        for name, value in given.items()
        if name not in dropped and not name.startswith(resources.QUEUE_PREFIX)
    }


def _flags_added(spec: SpecDecodeCaptureSpec, pod: Body) -> list[str]:
    wanted = [_ITERATION_DETAILS] if spec.record.step_stats else []
    return [flag for flag in wanted if flag not in engine_container(pod)["command"]]


def _engine(capture: Capture, spec: SpecDecodeCaptureSpec, pod: Body, *, switches: bool) -> Body:
    """Return the engine's container as a native sidecar that records, or in which the switcher starts engines."""
    engine = engine_container(pod)
    kept = {field: value for field, value in engine.items() if field not in _NOT_IN_A_SIDECAR}
    mounts = [
        *(engine.get("volumeMounts") or []),
        {"name": FILES_VOLUME, "mountPath": FILES_PATH, "readOnly": True},
        {"name": "specdecode-capture", "mountPath": ROOT},
    ]
    folder: list[Body] = []
    if switches:
        command = switcher_command(FILES_PATH)
        mounts.append({"name": SWITCH_VOLUME, "mountPath": SWITCH_FOLDER})
        # The load generator starts after this container and orders the first engine, so no probe may wait for one.
        kept.pop("startupProbe", None)
    else:
        command = [*engine["command"], *_flags_added(spec, pod)]
        places = Places(Path(ROOT), capture.key.namespace, capture.key.name, f"$({run_settings.ATTEMPT_VARIABLE})")
        folder = [{"name": FOLDER_VARIABLE, "value": str(places.segments)}]
    recording: list[Body] = [
        {"name": run_settings.ATTEMPT_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        *folder,
        {"name": TOKEN_IDS_VARIABLE, "value": "1" if spec.record.token_ids else "0"},
        {"name": STEPS_VARIABLE, "value": "1" if spec.record.step_stats else "0"},
    ]
    names = {variable["name"] for variable in recording}
    return {
        **kept,
        "restartPolicy": "Always",
        "command": RECORDER.loaded_by(command, FILES_PATH),
        "env": [*(each for each in engine.get("env") or [] if each["name"] not in names), *recording],
        "volumeMounts": mounts,
    }


def _api_key(pod: Body) -> Body | None:
    return next((each for each in engine_container(pod).get("env") or [] if each["name"] == API_KEY_VARIABLE), None)


def _settings(capture: Capture, spec: SpecDecodeCaptureSpec, source: CapturedDeployment, pod: Body) -> dict[str, Any]:
    """Return the settings of the load generator (``RunSettings``), and the values that the manifest repeats."""
    return {
        "namespace": capture.key.namespace,
        "capture": capture.key.name,
        "capture_uid": capture.uid,
        "root": ROOT,
        "engine": _address(source.launch, pod),
        "workload": spec.workload.model_dump(mode="json", by_alias=True, exclude_none=True),
        "seed": spec.seed,
        "record": spec.record.model_dump(mode="json", by_alias=True, exclude={"prompt_token_ids"}),
        "deadline_seconds": spec.deadline_seconds,
        "context": engine_context(source, pod, _flags_added(spec, pod)),
    }


def _arm_settings(
    spec: SpecDecodeCaptureSpec, runs: Sequence[tuple[CapturedArm, Body]], common: Body
) -> dict[str, Any]:
    """Return the settings of the arms; ``common`` is the pod that they share."""
    return {
        "arms": [
            {
                "name": arm.name,
                "engine": _address(arm.source.launch, pod),
                "command": [*plain_command(pod), *_flags_added(spec, pod)],
                "env": literals(engine_container(pod), beside=engine_container(common)),
                "start_seconds": engine_timeouts(arm.source.launch.facts, arm.source.launch.plan).startup_s,
                "context": engine_context(arm.source, pod, _flags_added(spec, pod)),
                "lossy": lossy_answers(arm.source.launch.facts),
            }
            for arm, pod in runs
        ],
        "repetitions": spec.starts,
        "slo": spec.slo.model_dump(mode="json", by_alias=True, exclude_none=True) if spec.slo else {},
        "checks": (spec.checks or Checks()).model_dump(mode="json", by_alias=True) if len(runs) > 1 else {},
    }


def _address(launch: Launch, pod: Body) -> dict[str, Any]:
    facts = launch.facts
    settings = engine_settings(facts.spec, facts.pair, launch.plan.chosen.tensor)
    return {
        "url": f"http{'s' if settings.tls else ''}://127.0.0.1:{facts.spec.serving.port}",
        "model": settings.served_model_names[0],
        "max_model_len": settings.max_model_len,
        "vocab_size": facts.pair.target.vocab_size,
        "api_key_variable": API_KEY_VARIABLE if _api_key(pod) else None,
    } | ({"certificates": _CERTIFICATES_FOLDER} if settings.tls else {})


def engine_context(source: CapturedDeployment, pod: Body, flags_added: Sequence[str] = ()) -> dict[str, Any]:
    """Return the context for the manifest: the engine's deployment, plan and command, and the flags added."""
    return {
        "deployment": {"name": source.key.name, "uid": source.uid, "generation": source.generation},
        "target": source.launch.facts.spec.target.model_dump(
            mode="json", by_alias=True, include={"model", "revision"}, exclude_none=True
        ),
        "image": engine_container(pod)["image"],
        "engine_version": source.launch.facts.spec.engine.version,
        "command": RECORDER.unloaded(plain_command(pod), BUNDLE_PATH),
        "recording_flags": list(flags_added),
        "plan": source.launch.plan_status.model_dump(mode="json", by_alias=True, exclude_none=True),
        "operator_version": __version__,
    }
