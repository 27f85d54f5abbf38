"""The ConfigMap in which a namespace keeps what was read of its models.

There is one a namespace with one entry a model, so that all objects of the namespace share them. It has no owner: it
outlives the object that asked first. Whoever deletes an entry, or all, has the model read again.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.kept import digests
from specdecode_operator.deployment.spec.model_sources import (
    KnownModels,
    ModelSource,
    sources_without_config,
    undescribed_models,
)
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER, MODEL_FACTS_LABEL, MODEL_FACTS_NAME
from specdecode_operator.resolver.answer import checkpoint_of
from specdecode_operator.resolver.read_model_facts import Checkpoint

CONFIG_MAP_NAME: Final = MODEL_FACTS_NAME


@dataclass(frozen=True)
class SiteFacts:
    """Facts about one model in a file that the operator's administrator provides."""

    file: str
    """Name of the file in its folder, which is a key of the ConfigMap."""

    digest: str
    """Two of one file are equal if their digests are."""

    checkpoint: Checkpoint = field(compare=False)


def site_facts_of(spec: SpecDecodeDeploymentSpec, facts: Mapping[str, SiteFacts]) -> dict[ModelSource, SiteFacts]:
    """Return the site's facts about the models of a spec that neither its ``config`` nor the catalogue describes.

    ``facts`` are by model id without outer slashes.
    """
    if not facts:
        return {}
    found = {source: facts.get(source.model) for source in sources_without_config(spec)}
    return {source: each for source, each in found.items() if each is not None}


def known_checkpoints(
    spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str], site_facts: Mapping[ModelSource, SiteFacts]
) -> KnownModels:
    """Return what is known of a spec's models: from the site's facts files, or else from what Jobs have read."""
    return {**read_entries(spec, entries), **{source: each.checkpoint for source, each in site_facts.items()}}


def facts_config_map(namespace: str, entries: Mapping[str, str]) -> Body:
    """Return the ConfigMap with these entries, to be merged into the one that is there."""
    labels = {"app.kubernetes.io/part-of": "specdecode", MANAGED_BY_LABEL: MANAGER, MODEL_FACTS_LABEL: "true"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": CONFIG_MAP_NAME, "labels": labels},
        "data": dict(entries),
    }


def facts_entry(source: ModelSource, checkpoint: Checkpoint) -> str:
    """Return the entry that keeps what was read of a model."""
    return json.dumps({**asdict(source), "checkpoint": asdict(checkpoint)}, sort_keys=True)


def believed_entries(
    spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str], proofs: Iterable[Mapping[str, str]]
) -> dict[str, str]:
    """Return the entries for a spec's models that the operator wrote.

    ``proofs`` are the digests that it keeps for objects of the namespace: one that knows an entry is enough.
    """
    keys = {source.key for source in undescribed_models(spec).values()} & entries.keys()
    # Once, and not for each object of the namespace: anybody there may write a megabyte that nobody believes.
    own = {digest: key for key in keys for digest in digests(CONFIG_MAP_NAME, {key: entries[key]}).items()}
    found: dict[str, str] = {}
    for each in proofs:
        found |= {key: entries[key] for digest, key in own.items() if digest in each.items()}
        if len(found) == len(keys):
            break
    return found


def read_entries(spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str]) -> KnownModels:
    """Return what the entries of the ConfigMap know of a spec's models; an entry that makes no sense knows nothing."""
    sources = set(undescribed_models(spec).values())
    found = {source: _checkpoint(source, entries.get(source.key)) for source in sources}
    return {source: checkpoint for source, checkpoint in found.items() if checkpoint is not None}


def _checkpoint(source: ModelSource, entry: str | None) -> Checkpoint | None:
    if entry is None:
        return None
    try:
        body = parse_json(entry)
        # People may have copied it from another model's.
        if {field: body.get(field) for field in asdict(source)} != asdict(source):
            return None
        return checkpoint_of(body["checkpoint"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
