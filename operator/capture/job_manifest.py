"""Render the Job of a capture: the deployment's engine pod plus a recorder and a load generator.

The engine becomes a native sidecar, so it starts before the load generator. The pod ends when the load generator
exits; the kubelet then stops the engine. With several arms, the engine's container starts one engine after the
other, as ordered by the load generator.

The manifest of a capture names the digest of the engine's image, which only the node knows. The kubelet writes it
to the pod's status. The operator copies it into a ConfigMap that the pod mounts. Writing it to a pod annotation
would require cluster-wide `patch pods`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Checks, DuringCapture, SpecDecodeCaptureSpec
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.capture.arms import (
    CapturedArm,
    apart,
    common_engine_pod,
    engine_container,
    engine_pod_of,
    literals,
    plain_command,
)
from specdecode_operator.capture.job.pod_files import IMAGE_ID_FILE, PLUGIN, SWITCH_FOLDER, Places, switcher_command
from specdecode_operator.capture.load.run_settings import (
    ATTEMPT_VARIABLE,
    AUTHORITY,
    CERTIFICATE,
    NODE_VARIABLE,
    SETTINGS_VARIABLE,
)
from specdecode_operator.capture.observation import Capture, CapturedDeployment
from specdecode_operator.capture.preconditions import workload_document
from specdecode_operator.capture.recorder.segment_format import FOLDER_VARIABLE, STEPS_VARIABLE, TOKEN_IDS_VARIABLE
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster.manifests import child_labels, owned, render_template
from specdecode_operator.cluster.resources import (
    CAPTURED_DEPLOYMENT_LABEL,
    DEPLOYMENT_LABEL,
    ENGINE_CONTAINER,
    QUEUE_PREFIX,
    TEMPLATE_HASH_ANNOTATION,
)
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.warnings import lossy_answers
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.version import __version__
from specdecode_operator.vllm.environment import API_KEY_VARIABLE

IMAGE_ID_FOLDER: Final = str(IMAGE_ID_FILE.parent)
_FILE: Final = IMAGE_ID_FILE.name


def image_id_volume(capture: Capture) -> Body:
    """Return the volume that shows the image's id as a file; the ConfigMap comes only after the pod."""
    items = [{"key": _FILE, "path": _FILE}]
    return {"configMap": {"name": _name(capture), "items": items, "optional": True}}


def image_id_config_map(capture: Capture, pod: Body | None) -> Body | None:
    """Return the ConfigMap that says which image the engine of a pod runs; None before its node knows.

    There is one for all attempts of a capture, so it says of which pod it speaks.
    """
    image_id = _image_id(pod) if pod is not None else None
    if pod is None or not image_id:
        return None
    data = {_FILE: f"{pod['metadata']['uid']} {image_id}\n"}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _name(capture)}, "data": data}
    return owned(config_map, capture.key, capture.uid)


def _name(capture: Capture) -> str:
    """Return the ConfigMap's name: that of the claim and the Job."""
    return capture.job_name


def _image_id(pod: Body) -> str | None:
    """Return what the node calls the engine's image; empty or None before it has it."""
    statuses = pod.get("status", {}).get("initContainerStatuses") or []
    return next((each.get("imageID") for each in statuses if each["name"] == ENGINE_CONTAINER), None)


PREPARE, LOAD = "prepare", "load"
SWITCH_VOLUME: Final = "specdecode-switch"
ROOT: Final = "/capture"
RECORDER_PATH: Final = "/specdecode/recorder"
CERTIFICATES_FOLDER: Final = "/specdecode/tls"

_ITERATION_DETAILS: Final = "--enable-logging-iteration-details"
_USER_ID: Final = 65532
_NOT_IN_A_SIDECAR: Final = ("readinessProbe", "livenessProbe", "lifecycle")
"""No Service sends requests to it, and a probe that kills it would interrupt the recording: the load generator sees
for itself whether it answers."""

_LONGEST_WAIT_S: Final = 1800
"""How long the pods of a capture that has taken a deployment's GPUs may wait in all. spec.borrowTimeoutSeconds is
shorter; this bounds a pod that no operator watches."""

_SHORTEST_WRAP_UP_S: Final = 900
_LOAD_FOR_WRAP_UP: Final = 10

# What the image itself sets can only be added to by a shell in it.
_WITH_RECORDER: Final = (
    'export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"; '
    f'if [ -n "${{VLLM_PLUGINS+set}}" ]; then export VLLM_PLUGINS="${{VLLM_PLUGINS:+$VLLM_PLUGINS,}}{PLUGIN}"; fi; '
    'exec "$@"'
)


_NAMES: Final = {
    "user_id": _USER_ID,
    "settings_variable": SETTINGS_VARIABLE,
    "attempt_variable": ATTEMPT_VARIABLE,
    "node_variable": NODE_VARIABLE,
    "root": ROOT,
    "recorder_path": RECORDER_PATH,
    "certificates_folder": CERTIFICATES_FOLDER,
    "image_id_folder": IMAGE_ID_FOLDER,
}
"""What is called alike in each Job."""


def places(capture: Capture, attempt: str) -> Places:
    """Return the folders of one attempt on the volume."""
    return Places(Path(ROOT), capture.key.namespace, capture.key.name, attempt)


def published_folder(capture: Capture) -> str:
    """Return the folder, from the volume's root, that holds the files once they are validated: with arms, theirs."""
    found = places(capture, attempt="")
    return str(found.of_capture.relative_to(found.root)) if capture.switches else found.path


def render_job(
    capture: Capture,
    spec: SpecDecodeCaptureSpec,
    source: CapturedDeployment,
    arms: Sequence[CapturedArm],
    operator_image: str,
) -> Body:
    """Return the Job of a capture; suspended where it waits for a queue or for the deployment's GPUs.

    Without ``arms`` its engine is the deployment's.
    """
    runs = [(arm, apart(engine_pod_of(arm.source), number)) for number, arm in enumerate(arms)]
    pod = common_engine_pod([each for _, each in runs]) if runs else engine_pod_of(source)
    settings = _settings(capture, spec, source, pod)
    if runs:
        settings |= _arm_settings(spec, runs, pod)
    values = {
        **_limits(capture, spec, source, arms),
        **_pod_values(capture, spec, pod, switches=bool(runs)),
        **_NAMES,
        "operator_image": operator_image,
        "settings": json.dumps(settings, sort_keys=True).replace("$", "$$"),
        "certificates": _certificates_volume(source.launch),
    }
    job = render_template("capture-job", values)
    template = job["spec"]["template"]
    template["spec"] = {**_placement(pod), **template["spec"]}
    job = owned(job, capture.key, capture.uid)
    job["metadata"]["labels"] |= {CAPTURED_DEPLOYMENT_LABEL: spec.deployment} | capture.queue_labels
    return job


def load_image(job: Body | None) -> str | None:
    """Return the operator image that a capture's Job runs; None if there is no Job or it names none."""
    pod = mapping(mapping(mapping(job or {}, "spec"), "template"), "spec")
    image = next((each.get("image") for each in objects(pod, "containers") if each.get("name") == LOAD), None)
    return image if isinstance(image, str) else None


def _limits(
    capture: Capture, spec: SpecDecodeCaptureSpec, source: CapturedDeployment, arms: Sequence[CapturedArm]
) -> Body:
    """Return when the Job begins, how often it may fail and how long it may take, as the template has it."""
    deadline_s = spec.starts * sum(_deadline_s(spec, each.source) for each in arms) or _deadline_s(spec, source)
    borrows = spec.deployment_during_capture is DuringCapture.SUSPEND
    return {
        "name": capture.job_name,
        "suspend": bool(capture.queue_labels) or borrows,
        "backoff_limit": spec.backoff_limit,
        # Without GPUs of its own it may wait for ever; with somebody else's it may not.
        "job_deadline_s": _LONGEST_WAIT_S + (1 + spec.backoff_limit) * deadline_s if borrows else None,
        "pod_deadline_s": deadline_s,
    }


def _pod_values(capture: Capture, spec: SpecDecodeCaptureSpec, pod: Body, *, switches: bool) -> Body:
    """Return what the Job's pod has of the engine's, as the template has it."""
    return {
        "labels": _pod_labels(capture, spec, pod),
        "annotations": _pod_annotations(pod),
        "before": _before(pod),
        "engine": _switched_engine(spec, pod) if switches else _engine(capture, spec, pod),
        "after": _after(pod),
        "api_key": _api_key(pod),
        "switch_folder": SWITCH_FOLDER if switches else None,
        "dataset": _dataset_volume(spec),
        "claim": claim_of(capture, spec.storage),
        "image_id_config_map": image_id_volume(capture),
        "engine_volumes": pod["spec"].get("volumes") or [],
        "security_context": _security_context(spec, pod),
    }


def _deadline_s(spec: SpecDecodeCaptureSpec, source: CapturedDeployment) -> int:
    """Return how long the pod may live: as long as the engine may take to start and the load to run."""
    times = engine_timeouts(source.launch.facts, source.launch.plan)
    return times.progress_deadline_s + spec.deadline_seconds + wrap_up_s(spec.deadline_seconds)


def wrap_up_s(deadline_seconds: int) -> int:
    """Return how long all may take but the start of the engine and the load: files are merged, checked and published.

    What there is to merge grows with the load: 6 to 20 MB of segments a second were merged and checked on a shared
    machine with 2 cores.
    """
    return _SHORTEST_WRAP_UP_S + deadline_seconds // _LOAD_FOR_WRAP_UP


def _flags_added(spec: SpecDecodeCaptureSpec, pod: Body) -> list[str]:
    """Return the arguments that the engine gets for the recording alone."""
    wanted = [_ITERATION_DETAILS] if spec.record.step_stats else []
    return [flag for flag in wanted if flag not in engine_container(pod)["command"]]


def _engine(capture: Capture, spec: SpecDecodeCaptureSpec, pod: Body) -> Body:
    """Return the engine's container as a native sidecar that records."""
    segments = str(places(capture, f"$({ATTEMPT_VARIABLE})").segments)
    command = [*engine_container(pod)["command"], *_flags_added(spec, pod)]
    return _sidecar(spec, pod, command, [{"name": FOLDER_VARIABLE, "value": segments}])


def _switched_engine(spec: SpecDecodeCaptureSpec, pod: Body) -> Body:
    """Return the container in which one engine after the other is started.

    Its start proves nothing: the load generator, which has to come next, tells it what to start.
    """
    sidecar = _sidecar(spec, pod, switcher_command(RECORDER_PATH), [])
    sidecar["volumeMounts"].append({"name": SWITCH_VOLUME, "mountPath": SWITCH_FOLDER})
    return {field: value for field, value in sidecar.items() if field != "startupProbe"}


def _sidecar(spec: SpecDecodeCaptureSpec, pod: Body, command: list[str], env_added: list[Body]) -> Body:
    engine = engine_container(pod)
    kept = {field: value for field, value in engine.items() if field not in _NOT_IN_A_SIDECAR}
    env: list[Body] = engine.get("env") or []
    recording: list[Body] = [
        {"name": ATTEMPT_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        *env_added,
        {"name": TOKEN_IDS_VARIABLE, "value": "1" if spec.record.token_ids else "0"},
        {"name": STEPS_VARIABLE, "value": "1" if spec.record.step_stats else "0"},
    ]
    names = {variable["name"] for variable in recording}
    return {
        **kept,
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", _WITH_RECORDER, RECORDER_PATH, *command],
        "env": [*(each for each in env if each["name"] not in names), *recording],
        "volumeMounts": [
            *(engine.get("volumeMounts") or []),
            {"name": "specdecode-recorder", "mountPath": RECORDER_PATH, "readOnly": True},
            {"name": "specdecode-capture", "mountPath": ROOT},
        ],
    }


def _before(pod: Body) -> list[Body]:
    """Return what runs before the engine: downloads, and what the user's podTemplate adds."""
    return list(pod["spec"].get("initContainers") or [])


def _after(pod: Body) -> list[Body]:
    """Return what the user's podTemplate runs beside the engine: as sidecars, or the pod would never end."""
    others = [each for each in pod["spec"]["containers"] if each["name"] != ENGINE_CONTAINER]
    return [{**each, "restartPolicy": "Always"} for each in others]


def _placement(pod: Body) -> Body:
    """Return what else the engine's pod says: where it may run, and as what."""
    return {
        field: value
        for field, value in pod["spec"].items()
        if field not in {"containers", "initContainers", "volumes", "securityContext", "restartPolicy"}
    }


def _security_context(spec: SpecDecodeCaptureSpec, pod: Body) -> Body:
    """Return the pod's security context: a volume that is created belongs to the group that writes to it."""
    given: Body = pod["spec"].get("securityContext") or {}
    if spec.storage.existing_claim is not None:
        return given
    return {"fsGroup": _USER_ID, "fsGroupChangePolicy": "OnRootMismatch", **given}


def _pod_labels(capture: Capture, spec: SpecDecodeCaptureSpec, pod: Body) -> dict[str, str]:
    """Return labels by which no Service, autoscaler or budget of the deployment takes the pod for an engine of it."""
    given: dict[str, str] = pod["metadata"].get("labels") or {}
    kept = {name: value for name, value in given.items() if name != DEPLOYMENT_LABEL and not _is_queue(name)}
    return kept | child_labels(capture.key) | {CAPTURED_DEPLOYMENT_LABEL: spec.deployment}


def _pod_annotations(pod: Body) -> dict[str, str]:
    given: dict[str, str] = pod["metadata"].get("annotations") or {}
    kept = {name: value for name, value in given.items() if name != TEMPLATE_HASH_ANNOTATION and not _is_queue(name)}
    # A node is not emptied to save money while something is measured on it.
    return {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", **kept}


def _is_queue(name: str) -> bool:
    """Whether a label is Kueue's: the Job is queued, not its pods."""
    return name.startswith(QUEUE_PREFIX)


def _api_key(pod: Body) -> Body | None:
    """Return the variable that holds the key of the engine's clients, as the engine has it."""
    return next((each for each in engine_container(pod).get("env") or [] if each["name"] == API_KEY_VARIABLE), None)


def _certificates_volume(launch: Launch) -> Body | None:
    """Return the volume with what the load believes of the engine's Secret, without its key; None for plain HTTP."""
    secret = launch.facts.spec.serving.tls_secret
    if secret is None:
        return None
    items = [{"key": key, "path": key} for key in (CERTIFICATE, AUTHORITY)]
    # Optional: not every Secret names its authority. Of one that is missing the engine's own variable tells.
    return {"secret": {"secretName": secret.name, "optional": True, "items": items}}


def _dataset_volume(spec: SpecDecodeCaptureSpec) -> Body | None:
    """Return the volume that holds the dataset; None without one."""
    dataset = spec.workload.prompts.dataset
    if dataset is None:
        return None
    if dataset.config_map is not None:
        return {"configMap": {"name": dataset.config_map.name}}
    assert dataset.persistent_volume_claim is not None  # noqa: S101  the CRD's rule
    return {"persistentVolumeClaim": {"claimName": dataset.persistent_volume_claim.claim_name, "readOnly": True}}


def _settings(capture: Capture, spec: SpecDecodeCaptureSpec, source: CapturedDeployment, pod: Body) -> dict[str, Any]:
    """Return the settings of the load generator (``RunSettings``, and what the manifest repeats)."""
    return {
        "namespace": capture.key.namespace,
        "capture": capture.key.name,
        "capture_uid": capture.uid,
        "root": ROOT,
        "engine": _address(source.launch, pod),
        "workload": workload_document(spec),
        "seed": spec.seed,
        "record": spec.record.model_dump(mode="json", by_alias=True),
        "deadline_seconds": spec.deadline_seconds,
        "context": _context(source, pod, _flags_added(spec, pod)),
    }


def _arm_settings(
    spec: SpecDecodeCaptureSpec, runs: Sequence[tuple[CapturedArm, Body]], common: Body
) -> dict[str, Any]:
    """Return what the load generator is told of arms; ``common`` is the pod that they share."""
    compares = len(runs) > 1
    return {
        "arms": [
            {
                "name": arm.name,
                "engine": _address(arm.source.launch, pod),
                "command": [*plain_command(pod), *_flags_added(spec, pod)],
                "env": literals(engine_container(pod), beside=engine_container(common)),
                "start_seconds": engine_timeouts(arm.source.launch.facts, arm.source.launch.plan).startup_s,
                "context": _context(arm.source, pod, _flags_added(spec, pod)),
                "lossy": lossy_answers(arm.source.launch.facts),
            }
            for arm, pod in runs
        ],
        "repetitions": spec.starts,
        "slo": spec.slo.model_dump(mode="json", by_alias=True, exclude_none=True) if spec.slo else {},
        "checks": (spec.checks or Checks()).model_dump(mode="json", by_alias=True) if compares else {},
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
    } | ({"certificates": CERTIFICATES_FOLDER} if settings.tls else {})


def _context(source: CapturedDeployment, pod: Body, added: list[str]) -> dict[str, Any]:
    """Return what the manifest repeats: whose engine it was, and what was different in it."""
    plan: PlanStatus = source.launch.plan_status
    return {
        "deployment": {"name": source.key.name, "uid": source.uid, "generation": source.generation},
        "image": engine_container(pod)["image"],
        "engine_version": source.launch.facts.spec.engine.version,
        "command": plain_command(pod),
        "recording_flags": added,
        "plan": plan.model_dump(mode="json", by_alias=True, exclude_none=True),
        "operator_version": __version__,
    }
