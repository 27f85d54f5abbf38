"""Model facts from untrusted sources: the reader's message and the namespace's ConfigMap.

The ConfigMap has one entry per model, shared by all objects of the namespace. It has no owner, so it outlives the
object that needed the facts first. The administrator's facts files take precedence.
"""

import base64
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.cluster.manifests import shared_config_map
from specdecode_operator.cluster.resources import MODEL_FACTS_NAME
from specdecode_operator.deployment.configmap_digests import digests
from specdecode_operator.deployment.models.checkpoint_reader import (
    ERROR_LIMIT,
    MESSAGE_LIMIT_BYTES,
    Checkpoint,
    CheckpointError,
    Weights,
)
from specdecode_operator.deployment.models.model_locations import (
    KnownModels,
    ModelSource,
    model_source,
    models_without_config,
    undescribed_models,
)
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import parse_json

_UNPACKED_LIMIT_BYTES = 256 * 1024


def unpack_facts(message: str) -> Checkpoint:
    """Parse a termination message; return its facts or raise its error as a CheckpointError."""
    try:
        answer = parse_json(message[:MESSAGE_LIMIT_BYTES])
        if "error" not in answer:
            packed = io.BytesIO(base64.b64decode(answer["facts"], validate=True))
            with gzip.GzipFile(fileobj=packed) as stream:
                return checkpoint_of(parse_json(stream.read(_UNPACKED_LIMIT_BYTES)))
        told = answer["error"]
        failure = CheckpointError(str(told["reason"])[:64], clip(str(told["message"]), ERROR_LIMIT))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise CheckpointError("ReaderFailed", f"the reader's answer is invalid: {clip(message, 200)!r}") from error
    raise failure


def checkpoint_of(body: Mapping[str, Any]) -> Checkpoint:
    """Parse a checkpoint; raise ValueError, KeyError, TypeError or AttributeError if it is invalid."""
    weights = Weights(**body["weights"])
    counts = (weights.total_bytes, weights.tensors, *weights.bytes_by_dtype.values(), *weights.bytes_by_part.values())
    config, commit = body["config"], body.get("commit")
    holds_facts = isinstance(config, dict) and type(weights.output_head) is bool
    if not holds_facts or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("not the facts of a checkpoint")
    return Checkpoint(config, weights, None if commit is None else str(commit)[:64])


CONFIG_MAP_NAME: Final = MODEL_FACTS_NAME


@dataclass(frozen=True)
class SiteFacts:
    """Facts about one model in a file that the operator's administrator provides."""

    file: str
    digest: str  # Compared instead of the checkpoint
    checkpoint: Checkpoint = field(compare=False)


def site_facts_of(spec: SpecDecodeDeploymentSpec, facts: Mapping[str, SiteFacts]) -> dict[ModelSource, SiteFacts]:
    """Return the site's facts about a spec's models without ``config`` or catalogue entry."""
    if not facts:
        return {}
    sources = {model_source(spec, model) for model in models_without_config(spec).values()}
    found = {source: facts.get(source.model) for source in sources}
    return {source: each for source, each in found.items() if each is not None}


def known_checkpoints(
    spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str], site_facts: Mapping[ModelSource, SiteFacts]
) -> KnownModels:
    """Return the facts about a spec's models: from the site's facts files, or else from ConfigMap entries."""
    return {**read_entries(spec, entries), **{source: each.checkpoint for source, each in site_facts.items()}}


def facts_config_map(namespace: str, entries: Mapping[str, str]) -> Body:
    """Return the ConfigMap with these entries, to be merged into the existing one."""
    return shared_config_map(namespace, CONFIG_MAP_NAME, {"data": dict(entries)})


def facts_entry(source: ModelSource, checkpoint: Checkpoint) -> str:
    """Return the ConfigMap entry for a model that was read."""
    return json.dumps({**asdict(source), "checkpoint": asdict(checkpoint)}, sort_keys=True)


def believed_entries(
    spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str], proofs: Iterable[Mapping[str, str]]
) -> dict[str, str]:
    """Return the entries for a spec's models that the operator wrote.

    ``proofs`` are the digests in the status of each object of the namespace; one matching object is enough.
    """
    keys = {source.key for source in undescribed_models(spec).values()} & entries.keys()
    # Hash each entry once, not once per object: users of the namespace may write up to 1 MiB.
    own = {digest: key for key in keys for digest in digests(CONFIG_MAP_NAME, {key: entries[key]}).items()}
    found: dict[str, str] = {}
    for each in proofs:
        found |= {key: entries[key] for digest, key in own.items() if digest in each.items()}
        if len(found) == len(keys):
            break
    return found


def read_entries(spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str]) -> KnownModels:
    """Parse the ConfigMap entries for a spec's models; invalid entries are skipped."""
    found = {}
    for source in set(undescribed_models(spec).values()):
        if source.key in entries:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                body = parse_json(entries[source.key])
                # A user may have copied the entry from another model.
                if {field: body.get(field) for field in asdict(source)} == asdict(source):
                    found[source] = checkpoint_of(body["checkpoint"])
    return found
