"""Jobs that read and download models, and the ConfigMap that records the downloaded commits.

A Job reports in the termination message of its pod, which the operator copies before the pod is deleted. Engines start
with exactly the downloaded commits until the model or the revision changes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.cluster import resources
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.cluster.manifests import owned, render_template, secret_key
from specdecode_operator.cluster.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError
from specdecode_operator.deployment.models.model_facts import unpack_facts
from specdecode_operator.deployment.models.model_locations import (
    ADAPTERS,
    COMMIT,
    DRAFT,
    HUB_CACHE_PATH,
    TARGET,
    ModelSource,
    cache_claim,
    downloads_to_cache,
    fetched_models,
    hub_environment,
    meant_model,
    model_path,
    volume_of,
)
from specdecode_operator.deployment.pod_scripts import download_model
from specdecode_operator.deployment.pod_template_merge import container_user, merge, volume_group
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod, condition_of
from specdecode_operator.deployment.rollout.engine_errors import telling_line
from specdecode_operator.deployment.rollout.readiness import Readiness, without_engines, working
from specdecode_operator.deployment.spec_facts import Facts, engine_image, platform_of
from specdecode_operator.enums import Platform
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import parse_json

RESOLVING, DOWNLOADING = "ResolvingModel", "DownloadingModels"
WITHOUT_POD: Final = "if it has no pod, a quota or policy may reject it: see kubectl describe job"
_Answer = TypeVar("_Answer")
_MAY_BE_MISSPELT: Final = frozenset({"HubRefused", "HubUnreachable", "ModelNotFound"})


@dataclass(frozen=True)
class ModelJob(Generic[_Answer]):
    """One kind of Job for models; ``_Answer`` is the type of its result."""

    template: str
    container: str
    name_suffix: str
    command: Sequence[str]
    key_annotation: str
    patch: Callable[[Body], Body]  # Returns the part of a podTemplate's spec that also applies to its pods
    values: Callable[[SpecDecodeDeploymentSpec, ModelSource], dict[str, Any]]
    remedies: Mapping[str, str]
    read: Callable[[Body], _Answer | Blocked]
    place: Callable[[ModelSource], str] = str

    def answers(self, pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> dict[ModelSource, _Answer]:
        """Return the results of finished pods."""
        found = {}
        for source in sources.values():
            _, terminated = self._newest(pods, source)
            answer = self.read(terminated) if terminated and terminated.get("exitCode") == 0 else None
            if answer is not None and not isinstance(answer, Blocked):
                found[source] = answer
        return found

    def blocked(self, pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> Blocked | None:
        """Return why the first failing model has no result, with its field and a fix; None without failures."""
        for field, source in sources.items():
            pod, terminated = self._newest(pods, source)
            if pod is None:
                continue
            answer = blocked_pod(pod) if terminated is None else self.read(terminated)
            if isinstance(answer, Blocked):
                what = f"{field}.model: {self.place(source)}: {answer.message}"
                remedy = self.remedies.get(answer.reason, "").format(field=field, claim=source.claim)
                again = "" if answer.permanent else "retried automatically"
                meant = meant_model(field, source) if answer.reason in _MAY_BE_MISSPELT else None
                what += "" if meant is None else f" (did you mean {meant}?)"
                return Blocked(answer.reason, "; ".join(filter(None, [what, remedy, again])), answer.permanent)
        return None

    def render(self, key: Key, uid: str, spec: SpecDecodeDeploymentSpec, image: str, source: ModelSource) -> Body:
        """Return the Job for one model."""
        common = {
            "name": "",
            "labels": {resources.MANAGED_BY_LABEL: resources.MANAGER, resources.READS_FOR_LABEL: key.name},
            "annotations": {self.key_annotation: source.key},
            "container": self.container,
            "image": image,
            "command": [*self.command],
            "hub_env": hub_environment(spec),
            "gpu_resource": None if platform_of(spec) is Platform.CPU else GPU_RESOURCE,
        }
        job = render_template(self.template, {**common, **self.values(spec, source)})
        template = job["spec"]["template"]
        given = (spec.pod_template.spec if spec.pod_template else None) or {}
        template["spec"] = merge(template["spec"], self.patch(given))
        # A Job's template is immutable, so another template needs another name.
        job["metadata"]["name"] = f"{key.name}-{self.name_suffix}-{content_hash(template)[:4]}"
        return owned(job, key, uid)

    def progress(self, pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> str:
        """Return the state of the first Job without a result."""
        newest = (self._newest(pods, source) for source in sources.values())
        pod = next((pod for pod, terminated in newest if terminated is None), {})
        if not pod:
            return WITHOUT_POD if pod is None else "its result is read next"
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            if container["name"] == self.container and "running" in (container.get("state") or {}):
                return "its container runs"
        if condition_of(pod, "PodScheduled").get("status") != "True":
            return "its pod waits for a node"
        spec = pod.get("spec") or {}
        image = next((each["image"] for each in spec.get("containers") or [] if each["name"] == self.container), "")
        volumes = [volume for volume in spec.get("volumes") or [] if "emptyDir" not in volume]
        return f"its node pulls image {image}{' and mounts the volume of the models' if volumes else ''}"

    def _newest(self, pods: Sequence[Body], source: ModelSource) -> tuple[Body | None, Body | None]:
        """Return the newest pod for a model, and the last termination state of its container."""
        key = self.key_annotation
        mine = [pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(key) == source.key]
        if not mine:
            return None, None
        pod = max(reversed(mine), key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        for status in pod.get("status", {}).get("containerStatuses") or []:
            if status["name"] == self.container:
                now, before = status.get("state") or {}, status.get("lastState") or {}
                return pod, now.get("terminated") or before.get("terminated")
        return pod, None


def _last_words(terminated: Body) -> str:
    return f"ended with exit code {terminated.get('exitCode')}: {telling_line(str(terminated.get('message') or ''))}"


def is_model_pod(pod: Body) -> bool:
    """Whether a pod belongs to a Job that reads or downloads a model."""
    return resources.READS_FOR_LABEL in (pod["metadata"].get("labels") or {})


_FROM_POD_TEMPLATE: Final = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName")
# User of an engine. runAsNonRoot is not needed, because the reader never runs as root.
_USER_FIELDS: Final = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seLinuxOptions")
_REMEDIES: Final = {
    "ModelNotFound": "correct the path, or put the model there",
    "ModelNotReadable": "make it readable, or set runAsUser or fsGroup in spec.podTemplate.spec.securityContext",
    "ConfigUnreadable": "fix the file, or put its content into {field}.config",
    "ConfigTooLong": "put the keys that describe the model's shape into {field}.config",
    "WeightsNotFound": "complete the model: put its safetensors files there",
    "WeightsUnreadable": "copy or download the file again",
    "HubRefused": "check the name, the model's license and spec.models.hubTokenSecret",
    "HubUnreachable": "let pods reach the hub, name a volume in spec.models, or put config.json into {field}.config",
    "ImagePullFailed": "the operator's own image; set its pull secret in spec.podTemplate.spec.imagePullSecrets",
    "ReaderTimedOut": "check that the volume or the hub responds, or put config.json into {field}.config",
    "ReaderFailed": "see kubectl logs of its pod, or put the content of config.json into {field}.config",
}
# Other reasons may be temporary: a volume that is being filled, an unreachable hub, a license not granted yet.
_ONLY_THE_USER: Final = frozenset({"ConfigUnreadable", "ConfigTooLong"})


def reading_jobs(
    key: Key, uid: str, spec: SpecDecodeDeploymentSpec, operator_image: str, sources: Mapping[str, ModelSource]
) -> list[Body]:
    """Return one Job per model, even if a model is both target and draft."""
    return [READER.render(key, uid, spec, operator_image, source) for source in dict.fromkeys(sources.values())]


def _reader_values(spec: SpecDecodeDeploymentSpec, source: ModelSource) -> dict[str, Any]:
    if source.on_volume:
        volume = {"name": "models", **volume_of(source)}
        return {"arguments": ["folder", "--", model_path(source.model)], "volume": volume, "hub_token": None}
    revision = [f"--revision={source.revision}"] if source.revision else []
    token = secret_key(spec.models.hub_token_secret)
    return {"arguments": ["hub", *revision, "--", source.model], "volume": None, "hub_token": token}


def _reader_patch(given: Body) -> Body:
    patch: Body = {name: given[name] for name in _FROM_POD_TEMPLATE if name in given}
    security = given.get("securityContext")
    if isinstance(security, dict):
        patch["securityContext"] = {name: security[name] for name in _USER_FIELDS if security.get(name)}
    return patch


def _checkpoint(terminated: Body) -> Checkpoint | Blocked:
    message = str(terminated.get("message") or "")
    if terminated.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", "the reader exceeded its memory limit and was killed")
    try:
        return unpack_facts(message)
    except CheckpointError as error:
        if message.startswith("{"):
            reason = error.reason if error.reason in _REMEDIES else "ReaderFailed"
            return Blocked(reason, error.message, permanent=reason in _ONLY_THE_USER)
        return Blocked("ReaderFailed", f"the reader {_last_words(terminated)}")


READER: Final = ModelJob(
    template="model-job",
    container="read-model",
    name_suffix="facts",
    command=("specdecode", "read-model"),
    key_annotation=resources.MODEL_KEY_ANNOTATION,
    patch=_reader_patch,
    values=_reader_values,
    remedies=_REMEDIES,
    read=_checkpoint,
)
_DOWNLOAD_FROM_POD_TEMPLATE: Final = (
    "imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName", "securityContext",
)  # fmt: skip
_TOKEN: Final = "spec.models.hubTokenSecret"  # noqa: S105  the name of a field
# Fixes by the script's reason. All reasons may be temporary, so downloads are retried.
_DOWNLOAD_REMEDIES: Final = {
    "ModelGated": f"accept its license on the hub, and name a Secret with a token of that account in {_TOKEN}",
    "ModelNotFound": f"correct {{field}}.model; a private one needs a token in {_TOKEN}",
    "RevisionNotFound": "correct {field}.revision",
    "NoSpaceLeft": "enlarge claim {claim}, or delete unused models from it",
    "VolumeNotWritable": "set runAsUser or fsGroup in spec.podTemplate.spec.securityContext to an ID with write access",
    "HubUnreachable": "let pods reach the hub, or put the models on a volume and name it in spec.models.volume",
    "OutOfMemory": "put the models on a volume and name it in spec.models.volume",
    "DownloadFailed": "see kubectl logs of its pod",
}


def wanted_downloads(spec: SpecDecodeDeploymentSpec) -> dict[str, ModelSource]:
    """Return the hub models of a spec with a cache, by field; empty without a cache."""
    if not downloads_to_cache(spec):
        return {}
    return {
        field: ModelSource(model.model, model.revision, claim=cache_claim(spec))
        for field, model in fetched_models(spec).items()
    }


def downloaded_commits(pods: Sequence[Body], spec: SpecDecodeDeploymentSpec) -> dict[str, str]:
    """Return the commits that pods have downloaded, by model key."""
    commits = DOWNLOADER.answers(pods, wanted_downloads(spec))
    return {source.key: commit for source, commit in commits.items()}


def jobs_that(jobs: Sequence[Body], verb: str) -> str:
    """Return the subject and verb of a sentence about Jobs: ``Job a reads``, ``Jobs a and b read``."""
    names = " and ".join(job["metadata"]["name"] for job in jobs)
    return f"Job {names} {verb}s" if len(jobs) == 1 else f"Jobs {names} {verb}"


def pending_downloads(
    key: Key, uid: str, facts: Facts, commits: Mapping[str, str], pods: Sequence[Body]
) -> tuple[Readiness, list[Body]] | None:
    """Return readiness and objects while models are being downloaded; None when all of them are downloaded.

    Suspended objects also download models, so that they can start without delay.
    """
    sources = wanted_downloads(facts.spec)
    lacking = {field: source for field, source in sources.items() if source.key not in commits}
    if not lacking:
        return None
    image = engine_image(facts.spec, facts.profile)
    jobs = [DOWNLOADER.render(key, uid, facts.spec, image, source) for source in dict.fromkeys(lacking.values())]
    models = " and ".join(dict.fromkeys(source.model for source in lacking.values()))
    doing = f"{jobs_that(jobs, 'download')} {models}"
    ready = working(DOWNLOADING, f"{doing} to claim {cache_claim(facts.spec)}; {WITHOUT_POD}")
    if blocked := DOWNLOADER.blocked(pods, lacking):
        ready = working(blocked.reason, blocked.message)
    done = [downloads_config_map(key, uid, sources, commits)] if len(lacking) < len(sources) else []
    return without_engines(facts.spec) or ready, [*done, *jobs]


def at_commits(
    key: Key, uid: str, facts: Facts, commits: Mapping[str, str], written: SpecDecodeDeploymentSpec | None = None
) -> tuple[Facts, list[Body]]:
    """Return the facts with commits instead of branches and tags, and the ConfigMap that stores the commits.

    ``written`` is the written spec if a policy put another one in force; its downloads are kept.
    """
    sources, spec = wanted_downloads(facts.spec), facts.spec
    if not sources:
        return facts, []
    target = spec.target.model_copy(update={"revision": commits[sources[TARGET].key]})
    speculation = spec.speculation
    if speculation is not None and speculation.draft is not None and DRAFT in sources:
        draft = speculation.draft.model_copy(update={"revision": commits[sources[DRAFT].key]})
        speculation = speculation.model_copy(update={"draft": draft})
    adapters = [
        each.model_copy(update={"revision": commits[sources[field].key]}) if field in sources else each
        for field, each in ((f"{ADAPTERS}[{index}]", each) for index, each in enumerate(spec.adapters))
    ]
    spec = spec.model_copy(update={"target": target, "speculation": speculation, "adapters": adapters})
    kept = {**(wanted_downloads(written) if written is not None else {}), **sources}
    return replace(facts, spec=spec), [downloads_config_map(key, uid, kept, commits)]


def downloads_name(key: Key) -> str:
    """Return the name of the ConfigMap with an object's downloaded commits."""
    return f"{key.name}-downloads"


def read_downloads(config_map: Body | None) -> dict[str, str]:
    """Parse the commits in a ConfigMap, by model key; invalid entries are skipped."""
    entries = (config_map or {}).get("data") or {}
    found = {key: _commit_in(entry) for key, entry in entries.items()}
    return {key: commit for key, commit in found.items() if commit is not None}


def downloads_config_map(key: Key, uid: str, sources: Mapping[str, ModelSource], commits: Mapping[str, str]) -> Body:
    """Return the ConfigMap with the downloaded commits of these models."""
    data = {}
    for source in sources.values():
        if source.key in commits:
            entry = {"model": source.model, "revision": source.revision, "claim": source.claim}
            data[source.key] = json.dumps({**entry, "commit": commits[source.key]}, sort_keys=True)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": downloads_name(key)}, "data": data}
    return owned(body, key, uid)


def _download_values(spec: SpecDecodeDeploymentSpec, source: ModelSource) -> dict[str, Any]:
    products = spec.accelerator.products
    among = {"operator": "In", "values": [*products]} if products else {"operator": "Exists"}
    revision = [f"--revision={source.revision}"] if source.revision else []
    return {
        "arguments": [f"--model={source.model}", *revision, f"--cache={HUB_CACHE_PATH}"],
        "claim": source.claim,
        "user": container_user(spec, ""),
        "volume_group": volume_group(spec),
        "hub_token": secret_key(spec.models.hub_token_secret),
        "gpu_nodes": {"key": PRODUCT_LABEL, **among},
    }


def _commit(terminated: Body) -> str | Blocked:
    if terminated.get("exitCode") == 0 and (commit := _commit_in(terminated.get("message"))):
        return commit
    if terminated.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", "the download needed more memory than its limit and was killed")
    try:
        error = parse_json(str(terminated.get("message") or ""))["error"]
        reason, text = str(error["reason"]), clip(str(error["message"]), download_model.MESSAGE_LIMIT)
    except (ValueError, KeyError, TypeError):
        return Blocked("DownloadFailed", f"the download {_last_words(terminated)}")
    return Blocked(reason if reason in _DOWNLOAD_REMEDIES else "DownloadFailed", text)


def _commit_in(text: object) -> str | None:
    """Parse the commit of an untrusted answer or entry; it becomes part of a path, so anything else is rejected."""
    try:
        commit = parse_json(str(text))["commit"]
    except (ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None


DOWNLOADER: Final = ModelJob(
    template="download-job",
    container="download-model",
    name_suffix="model",
    # The script is an argument, so it needs no ConfigMap and always matches this operator.
    command=("python3", "-c", Path(download_model.__file__).read_text(encoding="utf-8")),
    key_annotation=resources.DOWNLOAD_KEY_ANNOTATION,
    patch=lambda given: {name: given[name] for name in _DOWNLOAD_FROM_POD_TEMPLATE if name in given},
    values=_download_values,
    remedies=_DOWNLOAD_REMEDIES,
    read=_commit,
    place=lambda source: source.model,
)
