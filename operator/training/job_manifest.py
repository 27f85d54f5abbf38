"""Render the Job of a training: rows, hidden states of the deployment's target, training, publication.

The containers of the trainer's image get the deployment's models and variables. They do not get its Secrets, or volumes
that its podTemplate mounts only into other containers.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.capture.arms import engine_container, engine_pod_of
from specdecode_operator.capture.job_manifest import USER_ID, kept_metadata
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster import resources
from specdecode_operator.cluster.manifests import child_labels, owned, render_template
from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.models import model_locations
from specdecode_operator.deployment.pod_template_merge import DOWNLOAD_DRAFT, DOWNLOAD_TARGET
from specdecode_operator.enums import KvCacheDtype
from specdecode_operator.training.files.pod_settings import (
    BUNDLE,
    BUNDLE_FOLDER,
    CAPTURES,
    DATASET,
    DATASETS,
    HEAD,
    ROOT,
)
from specdecode_operator.training.job.settings import SETTINGS_VARIABLE, Places
from specdecode_operator.training.observation import Training
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.arguments import command_line
from specdecode_operator.vllm.environment import API_KEY_VARIABLE
from specdecode_operator.vllm.logging_config import LOGGING_CONFIG_VARIABLE
from specdecode_operator.vllm.settings import EngineSettings

_CLAIM_VOLUME, _BUNDLE_VOLUME, _SHM_VOLUME = "specdecode-training", "specdecode-trainer", "specdecode-shm"
_DOWNLOAD_HEAD: Final = "download-head"
_GRACE_S: Final = 120
_MORE_TOKENS: Final = 8  # room for the requested token and a drafted one after the row
_SHM: Final = "/dev/shm"  # noqa: S108  a volume of the pod
_TMP: Final = "/tmp"  # noqa: S108  a volume of the pod
# Volumes that only serving needs: the certificate, and the log configuration, which writes to the termination log.
_OF_SERVING: Final = ("tls", "engine-config")
_VARIABLES_OF_SERVING: Final = (API_KEY_VARIABLE, LOGGING_CONFIG_VARIABLE, "SPECDECODE_TLS_CERTIFICATE")
# Flags that the step sets itself, or that conflict with it.
_FLAGS_OF_SERVING: Final = (
    *("--kv-transfer-config", "--kv-events-config", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    *("--host", "--port", "--served-model-name", "--speculative-config", "--ssl-", "--enable-ssl-refresh"),
    *("--shutdown-timeout", "--enable-lora", "--lora-modules", "--otlp-traces-endpoint", "--middleware"),
)
_SECRETS_DRIVER: Final = "secrets-store.csi.k8s.io"
_CPU_REQUEST: Final = "500m"  # less than for serving: a training on a CPU is a test, and may be slow


@dataclass(frozen=True)
class TrainingInputs:
    """Objects that a training reads, which exist and were checked."""

    captures: tuple[Body, ...]  # SpecDecodeCaptures in the order of spec.captures; empty with spec.dataset
    gpus: int  # of the trainer; 0 on a CPU


class _Volumes:
    """Volumes of the pod, with one volume per claim: a pod that mounts a claim as two volumes may never start."""

    def __init__(self, given: Iterable[Body]) -> None:
        self.found = [dict(each) for each in given]

    def claim(self, claim: str, name: str, *, writable: bool = False) -> str:
        """Return the name of the volume with a claim, which is added if it is missing."""
        for volume in self.found:
            source = mapping(volume, "persistentVolumeClaim")
            if source.get("claimName") == claim:
                if writable:
                    volume["persistentVolumeClaim"] = {"claimName": claim}
                return name_of(volume)
        read_only = {} if writable else {"readOnly": True}
        return self.add(name, {"persistentVolumeClaim": {"claimName": claim, **read_only}})

    def add(self, name: str, source: Body) -> str:
        """Add a volume, and return its name."""
        self.found.append({"name": name, **source})
        return name


def render_job(
    training: Training,
    spec: SpecDecodeTrainingSpec,
    source: CapturedDeployment,
    inputs: TrainingInputs,
    operator_image: str,
) -> Body:
    """Return the Job of a training: one pod whose containers run one after the other."""
    pod = engine_pod_of(source)
    engine, pod_spec = engine_container(pod), pod["spec"]
    volumes = _Volumes(each for each in pod_spec.get("volumes") or [] if name_of(each) not in _OF_SERVING)
    claim_volume = volumes.claim(claim_of(training, spec.storage), _CLAIM_VOLUME, writable=True)
    sources, source_mounts = _sources(spec, inputs.captures, volumes)
    mounts = _engine_mounts(engine, volumes, secrets={name_of(each) for each in volumes.found if _is_secret(each)})
    head, head_mount, download = _starting_head(spec, source, pod_spec, volumes)
    security: Body = {"seccompProfile": {"type": "RuntimeDefault"}, **(pod_spec.get("securityContext") or {})}
    if spec.storage.existing_claim is None:
        security = {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch", **security}
    settings = _settings(training, spec, source, inputs) | {"sources": sources}
    if head is not None:
        settings |= {"head": head, "starting_head": spec.from_.model if spec.from_ else None}
    values = {
        "name": training.job_name,
        "suspend": bool(training.queue_labels),
        "backoff_limit": spec.backoff_limit,
        "pod_deadline_s": spec.deadline_seconds,
        "grace_s": _GRACE_S,
        # No Service, autoscaler or budget of the deployment may select the pod as one of its engines.
        "labels": kept_metadata(pod, "labels", resources.DEPLOYMENT_LABEL) | child_labels(training.key),
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
        | kept_metadata(
            pod,
            "annotations",
            resources.TEMPLATE_HASH_ANNOTATION,
            resources.ENGINE_LOGGING_ANNOTATION,
            resources.ENGINE_WATCH_ANNOTATION,
        ),
        "security_context": security,
        "user": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "operator_image": operator_image,
        "trainer_image": spec.trainer.image,
        "before": _downloads(pod_spec) + download,
        "trainer_env": _trainer_env(engine),
        "settings": {"name": SETTINGS_VARIABLE, "value": json.dumps(settings, sort_keys=True).replace("$", "$$")},
        "trainer_mounts": [*mounts, *head_mount, *_own_folders(training, claim_volume)],
        "source_mounts": source_mounts,
        "claim_volume": claim_volume,
        "bundle_volume": _BUNDLE_VOLUME,
        "bundle_folder": BUNDLE_FOLDER,
        "bundle": BUNDLE,
        "root": ROOT,
        **_resources(engine, inputs.gpus),
        "volumes": volumes.found,
    }
    job = render_template("training-job", values)
    template = job["spec"]["template"]
    rendered = {*template["spec"], "containers", "initContainers"}
    placement = {field: value for field, value in pod_spec.items() if field not in rendered}
    template["spec"] = placement | template["spec"]
    job = owned(job, training.key, training.uid)
    job["metadata"]["labels"] |= {resources.CAPTURED_DEPLOYMENT_LABEL: spec.deployment} | training.queue_labels
    return job


def _settings(
    training: Training, spec: SpecDecodeTrainingSpec, source: CapturedDeployment, inputs: TrainingInputs
) -> dict[str, Any]:
    """Return the settings of all containers (``PodSettings`` and the bundle's ``Settings``)."""
    launch, served = source.launch, source.launch.facts.spec
    target, trainer = launch.facts.pair.target, spec.trainer
    engine = _hidden_states_engine(spec, source)
    return {
        "namespace": training.key.namespace,
        "training": training.key.name,
        "uid": training.uid,
        "root": ROOT,
        "folder": f"{training.key.namespace}/{training.key.name}",
        "method": spec.method,
        "target_model": served.target.model,
        "target_revision": served.target.revision,
        "target_quantization": launch.plan_status.target_quantization,
        "target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "engine_version": served.engine.version,
        "trainer_image": trainer.image,
        "target": engine.model,
        "command": command_line(engine, launch.facts.profile),
        "start_seconds": engine_timeouts(launch.facts, launch.plan).startup_s,
        "gpus": inputs.gpus,
        "holdout_percent": spec.holdout_percent,
        "max_tokens": spec.max_tokens,
        "min_rows": spec.min_rows,
        "seed": spec.seed,
        "epochs": trainer.epochs,
        "sequence_length": min(trainer.sequence_length, engine.max_model_len - _MORE_TOKENS),
        "learning_rate": trainer.learning_rate,
        "args": list(trainer.args),
    }


def _hidden_states_engine(spec: SpecDecodeTrainingSpec, source: CapturedDeployment) -> EngineSettings:
    """Return the settings of the deployment's engine without speculation, for one replica and short requests."""
    facts = source.launch.facts
    settings = engine_settings(facts.spec, facts.pair, source.launch.plan.chosen.tensor)
    # vLLM passes hidden states through the KV cache, so a quantized cache would quantize them.
    serving = settings.serving.model_copy(update={"tls_secret": None, "kv_cache_dtype": KvCacheDtype.AUTO})
    return replace(
        settings,
        served_model_names=("target",),
        max_model_len=min(settings.max_model_len, spec.trainer.sequence_length + _MORE_TOKENS),
        data_parallel_size=1,
        speculation=None,
        serving=serving,
        extra_args=tuple(_without(settings.extra_args, _FLAGS_OF_SERVING)),
    )


def _without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return arguments without these flags and their values."""
    kept, is_dropped = [], False
    for each in arguments:
        if each.startswith("--"):
            is_dropped = each.startswith(tuple(flags))
        if not is_dropped:
            kept.append(each)
    return kept


def _sources(
    spec: SpecDecodeTrainingSpec, captures: Sequence[Body], volumes: _Volumes
) -> tuple[list[Body], list[Body]]:
    """Return the sources from which `export` reads rows, and its read-only mounts."""
    sources, mounts = [], []

    def mount(volume: str, path: str) -> str:
        mounts.append({"name": volume, "mountPath": path, "readOnly": True})
        return path

    if (rows := spec.dataset) is not None:
        if rows.config_map is not None:
            volume = volumes.add("specdecode-dataset", {"configMap": {"name": rows.config_map.name}})
        else:
            claim = rows.persistent_volume_claim.claim_name if rows.persistent_volume_claim else ""
            volume = volumes.claim(claim, "specdecode-dataset")
        return [{"mount": mount(volume, DATASET), "path": rows.path}], mounts
    for number, body in enumerate(captures):
        name, status = body["metadata"]["name"], mapping(body, "status")
        volume = volumes.claim(str(status.get("claim")), f"specdecode-capture-{number}")
        found = {"name": name, "mount": mount(volume, f"{CAPTURES}/{name}"), "path": str(status.get("path") or "")}
        dataset = SpecDecodeCaptureSpec.parse(body["spec"], newer=True).workload.prompts.dataset
        if dataset is not None:
            volume_name = f"specdecode-dataset-{number}"
            if dataset.config_map is not None:
                volume = volumes.add(volume_name, {"configMap": {"name": dataset.config_map.name}})
            else:
                claim = dataset.persistent_volume_claim.claim_name if dataset.persistent_volume_claim else ""
                volume = volumes.claim(claim, volume_name)
            found["dataset"] = mount(volume, f"{DATASETS}/{name}")
        sources.append(found)
    return sources, mounts


def _is_secret(volume: Body) -> bool:
    """Whether a volume has Secrets or tokens, alone or in a projection."""
    sources = [volume, *objects(mapping(volume, "projected"), "sources")]
    if mapping(volume, "csi").get("driver") == _SECRETS_DRIVER:
        return True
    return any(name in source for source in sources for name in ("secret", "serviceAccountToken"))


def _engine_mounts(engine: Body, volumes: _Volumes, *, secrets: Collection[str]) -> list[Body]:
    """Return the engine's mounts without those of Secrets, read-only except for temporary files.

    Shared memory is added if it is missing.
    """
    mounts = []
    for each in engine.get("volumeMounts") or []:
        if name_of(each) in (*_OF_SERVING, *secrets) or each["mountPath"] == model_locations.COMPILED_PATH:
            continue
        is_own = each["mountPath"] in (_TMP, _SHM)
        mounts.append(each if is_own else {**each, "readOnly": True})
    if all(each["mountPath"] != _SHM for each in mounts):
        # The trainer's workers pass batches through shared memory; the default of 64 MB is too small.
        name = volumes.add(_SHM_VOLUME, {"emptyDir": {"medium": "Memory"}})
        mounts.append({"name": name, "mountPath": _SHM})
    return mounts


def _own_folders(training: Training, volume: str) -> list[Body]:
    """Return the mounts of the folders that the trainer uses, without its head and the rest of the claim.

    Otherwise the trainer's image could change published heads, and files of other trainings or of the user.
    """
    places = Places(Path(ROOT) / training.key.namespace / training.key.name, training.uid)

    def mount(folder: Path) -> Body:
        return {"name": volume, "mountPath": str(folder), "subPath": str(folder.relative_to(ROOT))}

    return [mount(places.rows) | {"readOnly": True}, mount(places.hidden_states), mount(places.checkpoints)]


def _downloads(pod_spec: Body) -> list[Body]:
    """Return the engine's init containers that prepare the target, without those of the draft and sidecars."""
    return [
        dict(each)
        for each in pod_spec.get("initContainers") or []
        if name_of(each) != DOWNLOAD_DRAFT and each.get("restartPolicy") != "Always"
    ]


def _starting_head(
    spec: SpecDecodeTrainingSpec, source: CapturedDeployment, pod_spec: Body, volumes: _Volumes
) -> tuple[str | None, list[Body], list[Body]]:
    """Return path, mounts and download of the head to continue from."""
    given, served = spec.from_, source.launch.facts.spec
    if given is None:
        return None, [], []
    if given.persistent_volume_claim is not None:
        volume = volumes.claim(given.persistent_volume_claim.claim_name, "specdecode-head")
        return f"{HEAD}/{given.model}", [{"name": volume, "mountPath": HEAD, "readOnly": True}], []
    draft = served.speculation.draft if served.speculation else None
    if draft is not None and draft.model == given.model and given.revision in (None, draft.revision):
        path = model_locations.engine_model_path(served, draft)
        named = [each for each in pod_spec.get("initContainers") or [] if name_of(each) == DOWNLOAD_DRAFT]
        return path, [], [dict(each) for each in named]
    path = model_locations.model_path(given.model)
    if not model_locations.downloads_in_pods(served):
        return path, [], []
    target = next(each for each in pod_spec["initContainers"] if name_of(each) == DOWNLOAD_TARGET)
    revision = [f"--revision={given.revision}"] if given.revision else []
    command = ["hf", "download", given.model, "--local-dir", path, *revision]
    return path, [], [{**target, "name": _DOWNLOAD_HEAD, "command": command}]


def _trainer_env(engine: Body) -> list[Body]:
    """Return the engine's variables without the ones for serving and from Secrets.

    Home and user are set, because the image may have no entry for the user ID.
    """
    own = {
        "HOME": _TMP,
        "USER": "specdecode",
        "LOGNAME": "specdecode",
        "TORCHINDUCTOR_CACHE_DIR": f"{_TMP}/torchinductor",
        "TRITON_CACHE_DIR": f"{_TMP}/triton",
    }
    kept = [
        each
        for each in engine.get("env") or []
        if name_of(each) not in _VARIABLES_OF_SERVING
        and name_of(each) not in own
        and "secretKeyRef" not in mapping(each, "valueFrom")
    ]
    return [*kept, *({"name": name, "value": value} for name, value in own.items())]


def _resources(engine: Body, gpus: int) -> Body:
    """Return the resources of the engine that writes hidden states, and of the trainer."""
    given: Body = engine.get("resources") or {}
    if not gpus:
        given = {**given, "requests": {**mapping(given, "requests"), "cpu": _CPU_REQUEST}}
        return {"engine_resources": given, "trainer_resources": given}
    trainer = {**given, "limits": {**mapping(given, "limits"), GPU_RESOURCE: str(gpus)}}
    return {"engine_resources": given, "trainer_resources": trainer}
