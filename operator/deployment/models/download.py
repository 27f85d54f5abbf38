"""The Jobs that download models to a cache, what their pods tell, and where that is kept.

A Job is there only while it downloads. The commit that it fetched lies in a
ConfigMap beside the other children: engines are started with that one and no
other until the object names another model or revision. Whoever deletes an
entry, or the ConfigMap, has the model fetched anew, which costs nothing for
files that are there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.readiness import Readiness, without_engines, working
from specdecode_operator.deployment.pods.rollout import blocked_pod
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.model_sources import DRAFT, TARGET, ModelSource, served_models
from specdecode_operator.deployment.spec.model_storage import (
    COMMIT,
    HUB_CACHE_PATH,
    cache_claim,
    downloads_to_cache,
    hub_environment,
)
from specdecode_operator.deployment.spec.pod_template import merge
from specdecode_operator.kube.labels import DOWNLOAD_KEY_ANNOTATION, MANAGED_BY_LABEL, MANAGER, READS_FOR_LABEL
from specdecode_operator.kube.manifests import content_hash, owned, render_template, secret_key
from specdecode_operator.kube.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.resolver import download_model

CONTAINER: Final = "download-model"
_SCRIPT: Final = Path(download_model.__file__).read_text(encoding="utf-8")
_NAME_DIGITS: Final = 4
_TAKEN_FROM_OVERLAY: Final = (
    "imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName", "securityContext",
)  # fmt: skip
"""What decides where engines run, whether their image can be had, and as whom they write."""

_TOKEN: Final = "spec.models.hubTokenSecret"  # noqa: S105  the name of a field
_REMEDIES: Final = {
    "ModelGated": f"accept its licence on the hub, and name a Secret with a token of that account in {_TOKEN}",
    "ModelNotFound": f"correct {{field}}.model; a private one needs a token in {_TOKEN}",
    "RevisionNotFound": "correct {field}.revision",
    "NoSpaceLeft": "enlarge claim {claim}, or delete models from it that nobody serves",
    "VolumeNotWritable": "set runAsUser or fsGroup in spec.podTemplate.spec.securityContext to who may write there",
    "HubUnreachable": "let pods reach the hub, or put the models on a volume and name it in spec.models.volume",
    "OutOfMemory": "put the models on a volume and name it in spec.models.volume",
    "DownloadFailed": "kubectl logs of its pod tells more",
}
"""What to do, by the reason that the download gives. All of them may pass: it is tried again."""


def wanted_downloads(spec: SpecDecodeDeploymentSpec) -> dict[str, ModelSource]:
    """Return what a spec with a cache serves from the hub, by the field that names it; nothing without a cache."""
    if not downloads_to_cache(spec):
        return {}
    return {
        field: ModelSource(model.model, model.revision, claim=cache_claim(spec))
        for field, model in served_models(spec).items()
    }


def commits_read(pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> dict[str, str]:
    """Return the commits that pods have fetched, by the key of the model."""
    found = {}
    for source in sources.values():
        for pod in _pods_of(pods, source):
            ended = _ended(pod)
            if ended is not None and ended.get("exitCode") == 0 and (commit := _commit(ended)):
                found[source.key] = commit
    return found


def downloading_trouble(pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> Blocked | None:
    """Return why a model is not there yet, or None while nothing is wrong."""
    for field, source in sources.items():
        for pod in _pods_of(pods, source):
            ended = _ended(pod)
            blocked = blocked_pod(pod) if ended is None else _failure(ended)
            if blocked is not None:
                remedy = _REMEDIES.get(blocked.reason, "").format(field=field, claim=source.claim)
                parts = [f"{field}.model: {source.model}: {blocked.message}", remedy, "it is tried again by itself"]
                return Blocked(blocked.reason, "; ".join(filter(None, parts)))
    return None


def download_first(
    key: Key, uid: str, facts: Facts, commits: Mapping[str, str], pods: Sequence[Body]
) -> tuple[Readiness, list[Body]] | None:
    """Return what to say, and the objects that must exist, while models are fetched; None when all of them are there.

    ``commits`` are those that are there. Suspended objects fetch theirs too, so that they start at once later.
    """
    sources = wanted_downloads(facts.spec)
    lacking = {field: source for field, source in sources.items() if source.key not in commits}
    if not lacking:
        return None
    jobs = [_job(key, uid, facts, source) for source in dict.fromkeys(lacking.values())]
    names = " and ".join(job["metadata"]["name"] for job in jobs)
    models = " and ".join(dict.fromkeys(source.model for source in lacking.values()))
    message = f"Job {names} downloads {models} to claim {cache_claim(facts.spec)}"
    summary = working("DownloadingModels", message)
    if blocked := downloading_trouble(pods, lacking):
        summary = working(blocked.reason, blocked.message)
    known = [render_downloads(key, uid, sources, commits)] if len(lacking) < len(sources) else []
    return without_engines(facts.spec) or summary, [*known, *jobs]


def downloads_name(key: Key) -> str:
    """Return the name of the ConfigMap that holds what was downloaded for an object."""
    return f"{key.name}-downloads"


def read_downloads(config_map: Body | None) -> dict[str, str]:
    """Return the commits that a ConfigMap holds, by the key of the model; what makes no sense is not there."""
    found = {}
    for key, text in ((config_map or {}).get("data") or {}).items():
        try:
            commit = json.loads(text)["commit"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(commit, str) and COMMIT.fullmatch(commit):
            found[key] = commit
    return found


def downloaded(key: Key, uid: str, facts: Facts, commits: Mapping[str, str]) -> tuple[Facts, list[Body]]:
    """Return the facts of the spec that names the commits that are there, and the object that keeps them."""
    sources = wanted_downloads(facts.spec)
    if not sources:
        return facts, []
    return replace(facts, spec=pinned(facts.spec, commits)), [render_downloads(key, uid, sources, commits)]


def render_downloads(key: Key, uid: str, sources: Mapping[str, ModelSource], commits: Mapping[str, str]) -> Body:
    """Return the ConfigMap with what is known of these models."""
    data = {
        source.key: json.dumps(
            {"model": source.model, "revision": source.revision, "claim": source.claim, "commit": commits[source.key]},
            sort_keys=True,
        )
        for source in sources.values()
        if source.key in commits
    }
    return owned(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": downloads_name(key)}, "data": data}, key, uid
    )


def pinned(spec: SpecDecodeDeploymentSpec, commits: Mapping[str, str]) -> SpecDecodeDeploymentSpec:
    """Return the spec with the commits that were fetched in the place of branches and tags."""
    sources, speculation = wanted_downloads(spec), spec.speculation
    target = spec.target.model_copy(update={"revision": commits[sources[TARGET].key]})
    if speculation is not None and speculation.draft is not None:
        draft = speculation.draft.model_copy(update={"revision": commits[sources[DRAFT].key]})
        speculation = speculation.model_copy(update={"draft": draft})
    return spec.model_copy(update={"target": target, "speculation": speculation})


def _pods_of(pods: Sequence[Body], source: ModelSource) -> list[Body]:
    """Return the newest pod that fetches this model; none while there is none."""
    mine = [
        pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(DOWNLOAD_KEY_ANNOTATION) == source.key
    ]
    return sorted(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))[-1:]


def _ended(pod: Body) -> Body | None:
    """How the download ended last, this time or the time before."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if container["name"] == CONTAINER:
            now, before = container.get("state") or {}, container.get("lastState") or {}
            ended: Body | None = now.get("terminated") or before.get("terminated")
            return ended
    return None


def _commit(ended: Body) -> str | None:
    """Return the commit that the answer tells; nothing else of a user's namespace becomes part of a path."""
    try:
        commit = json.loads(str(ended.get("message")))["commit"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None


def _failure(ended: Body) -> Blocked | None:
    """Why a download ended without a commit."""
    if ended.get("exitCode") == 0 and _commit(ended):
        return None
    if ended.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", "the download needed more memory than its limit and was killed")
    message = str(ended.get("message") or "")
    try:
        told = json.loads(message)["error"]
        reason, text = str(told["reason"]), str(told["message"])[: download_model.MESSAGE_LIMIT]
    except (ValueError, KeyError, TypeError, RecursionError):
        last_line = (message.strip() or "it said nothing").splitlines()[-1][:300]
        return Blocked("DownloadFailed", f"the download ended with exit code {ended.get('exitCode')}: {last_line}")
    return Blocked(reason if reason in _REMEDIES else "DownloadFailed", text)


def _gpu_nodes(products: Sequence[str]) -> Body:
    """Say on which nodes engines may run."""
    if not products:
        return {"key": PRODUCT_LABEL, "operator": "Exists"}
    return {"key": PRODUCT_LABEL, "operator": "In", "values": [*products]}


def _job(key: Key, uid: str, facts: Facts, source: ModelSource) -> Body:
    spec = facts.spec
    values = {
        "name": "",
        "labels": {MANAGED_BY_LABEL: MANAGER, READS_FOR_LABEL: key.name},
        "annotations": {DOWNLOAD_KEY_ANNOTATION: source.key},
        "container": CONTAINER,
        "image": facts.image,
        # As an argument it needs no object of its own, and is always the one of this operator.
        "command": ["python3", "-c", _SCRIPT],
        "arguments": [
            f"--model={source.model}",
            *([f"--revision={source.revision}"] if source.revision else []),
            f"--cache={HUB_CACHE_PATH}",
        ],
        "claim": source.claim,
        "hub_env": hub_environment(spec),
        "hub_token": secret_key(spec.models.hub_token_secret),
        "gpu_resource": None if facts.on_cpu else GPU_RESOURCE,
        "gpu_nodes": _gpu_nodes(spec.accelerator.product),
    }
    job = render_template("download-job", values)
    template = job["spec"]["template"]
    given = (spec.pod_template.spec if spec.pod_template else None) or {}
    template["spec"] = merge(template["spec"], {name: given[name] for name in _TAKEN_FROM_OVERLAY if name in given})
    # A Job's template cannot be changed: another one needs another name.
    job["metadata"]["name"] = f"{key.name}-model-{content_hash(template)[:_NAME_DIGITS]}"
    return owned(job, key, uid)
