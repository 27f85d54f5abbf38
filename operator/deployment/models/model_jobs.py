"""The Job that downloads a model to the cache, and the ConfigMap that keeps which commit is there.

The ConfigMap lies beside the other children: engines are started with that commit and no other until the object names
another model or revision. Whoever deletes an entry, or the ConfigMap, has the model downloaded anew, which costs
nothing for files that are there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.models.jobs import DOWNLOADING, WITHOUT_POD, ModelJob, last_words
from specdecode_operator.deployment.objects.pod_user import container_user, volume_group
from specdecode_operator.deployment.pods.readiness import Readiness, without_engines, working
from specdecode_operator.deployment.spec.facts import Facts, engine_image
from specdecode_operator.deployment.spec.model_sources import DRAFT, TARGET, ModelSource, served_models
from specdecode_operator.deployment.spec.model_storage import (
    COMMIT,
    HUB_CACHE_PATH,
    cache_claim,
    downloads_to_cache,
)
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.kube.labels import DOWNLOAD_KEY_ANNOTATION
from specdecode_operator.kube.manifests import owned, secret_key
from specdecode_operator.kube.nodes import PRODUCT_LABEL
from specdecode_operator.redaction import clip
from specdecode_operator.resolver import download_model

_FROM_POD_TEMPLATE: Final = (
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


def downloaded_commits(pods: Sequence[Body], spec: SpecDecodeDeploymentSpec) -> dict[str, str]:
    """Return the commits that pods have downloaded, by the key of the model."""
    commits = DOWNLOADER.answers(pods, wanted_downloads(spec))
    return {source.key: commit for source, commit in commits.items()}


def pending_downloads(
    key: Key, uid: str, facts: Facts, commits: Mapping[str, str], pods: Sequence[Body]
) -> tuple[Readiness, list[Body]] | None:
    """Return the status and the objects that must exist while models are downloaded; None when all of them are there.

    ``commits`` are those that are there. Suspended objects download theirs too, so that they start at once later.
    """
    sources = wanted_downloads(facts.spec)
    lacking = {field: source for field, source in sources.items() if source.key not in commits}
    if not lacking:
        return None
    image = engine_image(facts.spec, facts.profile)
    jobs = [DOWNLOADER.render(key, uid, facts.spec, image, source) for source in dict.fromkeys(lacking.values())]
    names = " and ".join(job["metadata"]["name"] for job in jobs)
    models = " and ".join(dict.fromkeys(source.model for source in lacking.values()))
    what = f"Job {names} downloads {models} to claim {cache_claim(facts.spec)}; {WITHOUT_POD}"
    ready = working(DOWNLOADING, what)
    if blocked := DOWNLOADER.blocked(pods, lacking):
        ready = working(blocked.reason, blocked.message)
    done = [downloads_config_map(key, uid, sources, commits)] if len(lacking) < len(sources) else []
    return without_engines(facts.spec) or ready, [*done, *jobs]


def at_commits(
    key: Key, uid: str, facts: Facts, commits: Mapping[str, str], written: SpecDecodeDeploymentSpec | None = None
) -> tuple[Facts, list[Body]]:
    """Return the facts with commits in the place of branches and tags, and the ConfigMap that keeps the commits.

    ``written`` is the spec as it is written, where a policy has put another in force: what it downloaded is kept.
    """
    sources, spec = wanted_downloads(facts.spec), facts.spec
    if not sources:
        return facts, []
    target = spec.target.model_copy(update={"revision": commits[sources[TARGET].key]})
    speculation = spec.speculation
    if speculation is not None and speculation.draft is not None:
        draft = speculation.draft.model_copy(update={"revision": commits[sources[DRAFT].key]})
        speculation = speculation.model_copy(update={"draft": draft})
    spec = spec.model_copy(update={"target": target, "speculation": speculation})
    kept = {**(wanted_downloads(written) if written is not None else {}), **sources}
    return replace(facts, spec=spec), [downloads_config_map(key, uid, kept, commits)]


def downloads_name(key: Key) -> str:
    """Return the name of the ConfigMap that holds what was downloaded for an object."""
    return f"{key.name}-downloads"


def read_downloads(config_map: Body | None) -> dict[str, str]:
    """Return the commits that a ConfigMap holds, by the key of the model; what makes no sense is not there."""
    entries = (config_map or {}).get("data") or {}
    found = {key: _commit_in(entry) for key, entry in entries.items()}
    return {key: commit for key, commit in found.items() if commit is not None}


def downloads_config_map(key: Key, uid: str, sources: Mapping[str, ModelSource], commits: Mapping[str, str]) -> Body:
    """Return the ConfigMap with what was downloaded of these models."""
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


def _values(spec: SpecDecodeDeploymentSpec, source: ModelSource) -> dict[str, Any]:
    products = spec.accelerator.product
    among = {"operator": "In", "values": [*products]} if products else {"operator": "Exists"}
    return {
        "arguments": [
            f"--model={source.model}",
            *([f"--revision={source.revision}"] if source.revision else []),
            f"--cache={HUB_CACHE_PATH}",
        ],
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
        return Blocked("DownloadFailed", f"the download {last_words(terminated)}")
    return Blocked(reason if reason in _REMEDIES else "DownloadFailed", text)


def _commit_in(text: object) -> str | None:
    """Return the commit of an answer or entry; nothing else of a user's namespace becomes part of a path."""
    try:
        commit = parse_json(str(text))["commit"]
    except (ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None


DOWNLOADER: Final = ModelJob(
    template="download-job",
    container="download-model",
    name_suffix="model",
    # As an argument the script needs no object of its own, and is always the one of this operator.
    command=("python3", "-c", Path(download_model.__file__).read_text(encoding="utf-8")),
    key_annotation=DOWNLOAD_KEY_ANNOTATION,
    patch=lambda given: {name: given[name] for name in _FROM_POD_TEMPLATE if name in given},
    values=_values,
    remedies=_REMEDIES,
    read=_commit,
    place=lambda source: source.model,
)
