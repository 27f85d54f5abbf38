"""What is known of models that neither the catalogue nor the spec describes, and where it is kept.

Facts lie in one ConfigMap a namespace, one entry a model, so that all objects of
the namespace share them. It has no owner: it outlives the object that asked first.
Whoever deletes an entry, or all, has the model read again.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.pair import ModelCheckpoint, ServedModel
from specdecode_operator.api.values import Quantization
from specdecode_operator.deployment.spec.served_models import served_models
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER, MODEL_FACTS_LABEL
from specdecode_operator.problems import Problem
from specdecode_operator.resolver.answer import checkpoint_of
from specdecode_operator.resolver.read_model_facts import Checkpoint
from specdecode_operator.sizing.families.catalogue import find_entry
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.sizing.weights.checkpoint_bytes import checkpoint_disagreement

CONFIG_MAP_NAME: Final = "specdecode-model-facts"


@dataclass(frozen=True)
class ModelSource:
    """Where the files of a model lie.

    Attributes
    ----------
    model
        Hub id, or path inside the volume.
    revision
        Revision of the hub repository; None for its default, and for a volume.
    claim
        PersistentVolumeClaim of the volume; None for the hub and for nodes.
    host_path
        Directory of the nodes that holds it.
    """

    model: str
    revision: str | None = None
    claim: str | None = None
    host_path: str | None = None

    @property
    def on_volume(self) -> bool:
        """Whether it is there already, as opposed to on the hub."""
        return self.claim is not None or self.host_path is not None

    @property
    def key(self) -> str:
        """Name of the model's entry: readable, and different for each source."""
        place = [self.model, self.revision, self.claim, *filter(None, [self.host_path])]
        digest = hashlib.sha256(json.dumps(place).encode()).hexdigest()
        return f"{re.sub(r'[^-._a-zA-Z0-9]+', '.', self.model)[-180:].strip('.')}-{digest[:12]}"

    def __str__(self) -> str:
        """The place in words."""
        if self.claim is not None:
            return f"{self.model} on PersistentVolumeClaim {self.claim}"
        if self.host_path is not None:
            return f"{self.model} in {self.host_path} of the node"
        return f"{self.model} on the hub" + (f" at revision {self.revision}" if self.revision else "")


KnownModels = Mapping[ModelSource, Checkpoint]
NO_MODELS: Final[KnownModels] = MappingProxyType({})


def model_source(spec: SpecDecodeDeploymentSpec, model: ServedModel | ModelCheckpoint) -> ModelSource:
    """Return where a model of the spec lies."""
    volume = spec.models.volume
    if volume is None:
        return ModelSource(model.model, model.revision)
    claim, host = volume.persistent_volume_claim, volume.host_path
    return ModelSource(
        model.model.strip("/"),
        claim=claim.claim_name if claim else None,
        host_path=host.path if host else None,
    )


def sources_without_description(spec: SpecDecodeDeploymentSpec) -> dict[str, ModelSource]:
    """Return the models that neither spec nor catalogue describes, by the field that names them."""
    written = served_models(spec)
    models: dict[str, ServedModel | ModelCheckpoint] = dict(written)
    for field, model in written.items():
        models |= {
            f"{field}.checkpoints[{index}]": checkpoint
            for index, checkpoint in enumerate(model.checkpoints)
            if may_be_served(model, checkpoint)
        }
    return {
        field: model_source(spec, model)
        for field, model in models.items()
        if model.config is None and find_entry(model.model) is None
    }


def may_be_served(model: ServedModel, checkpoint: ModelCheckpoint) -> bool:
    """Whether the spec asks for a checkpoint, or lets the plan ask for it."""
    return model.quantization.value in (Quantization.AUTO.value, checkpoint.quantization.value)


def path_problems(sources: Mapping[str, ModelSource]) -> list[Problem]:
    """Return the models that are looked for outside of their volume."""
    return [
        Problem(f"{field}.model", source.model, "must be a path inside the volume, without ..")
        for field, source in sources.items()
        if source.on_volume and ".." in source.model.split("/")
    ]


def known_models(spec: SpecDecodeDeploymentSpec, entries: Mapping[str, str]) -> KnownModels:
    """Return what the entries of the ConfigMap know of a spec's models; what makes no sense is not known."""
    sources = set(sources_without_description(spec).values())
    found = {source: _checkpoint(source, entries.get(source.key)) for source in sources}
    return {source: checkpoint for source, checkpoint in found.items() if checkpoint is not None}


def entry(source: ModelSource, checkpoint: Checkpoint) -> str:
    """Return the entry that keeps what was read of a model."""
    return json.dumps({**asdict(source), "checkpoint": asdict(checkpoint)}, sort_keys=True)


def checkpoint_doubts(spec: SpecDecodeDeploymentSpec, pair: Pair, known: KnownModels) -> list[str]:
    """Return a sentence for each model whose files hold other bytes than its config.json describes."""
    draft = spec.speculation.draft if spec.speculation else None
    models: list[tuple[ServedModel, ModelGeometry]] = [(spec.target, pair.target)]
    if draft is not None and pair.draft is not None:
        models.append((draft, pair.draft))
    found = [(geometry, known.get(model_source(spec, model))) for model, geometry in models]
    doubts = [
        checkpoint_disagreement(
            geometry,
            checkpoint.weights.total_bytes,
            output_head=checkpoint.weights.output_head,
            bytes_by_dtype=checkpoint.weights.bytes_by_dtype,
            bytes_by_part=checkpoint.weights.bytes_by_part,
        )
        for geometry, checkpoint in found
        if checkpoint is not None
    ]
    return [doubt for doubt in doubts if doubt is not None]


def facts_config_map(namespace: str, entries: Mapping[str, str]) -> Body:
    """Return the ConfigMap with these entries, to be laid over the one that is there."""
    labels = {"app.kubernetes.io/part-of": "specdecode", MANAGED_BY_LABEL: MANAGER, MODEL_FACTS_LABEL: "true"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": CONFIG_MAP_NAME, "labels": labels},
        "data": dict(entries),
    }


def _checkpoint(source: ModelSource, text: str | None) -> Checkpoint | None:
    if text is None:
        return None
    try:
        body = json.loads(text)
        if {field: body.get(field) for field in asdict(source)} != asdict(source):
            return None
        return checkpoint_of(body["checkpoint"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
