"""The models that a spec names, and where their files lie."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.models import ModelCheckpoint, ServedModel
from specdecode_operator.api.values import Quantization
from specdecode_operator.resolver.read_model_facts import Checkpoint
from specdecode_operator.sizing.base.units import MIB, gib_to_bytes
from specdecode_operator.sizing.estimated.assumed import Assumption
from specdecode_operator.sizing.families.catalogue import find_entry

NOTHING_ASSUMED: Final = Assumption()

TARGET: Final = "spec.target"
DRAFT: Final = "spec.speculation.draft"


@dataclass(frozen=True)
class ModelSource:
    """Where the files of a model lie: on the hub, on a PersistentVolumeClaim, or in a directory of the nodes."""

    model: str
    """Hub id, or path inside the volume."""

    revision: str | None = None
    """Revision of the hub repository; absent for its default, and on a volume."""

    claim: str | None = None
    host_path: str | None = None

    @property
    def on_volume(self) -> bool:
        """Whether it is there already, as opposed to on the hub."""
        return self.claim is not None or self.host_path is not None

    @property
    def key(self) -> str:
        """Key of the model in ConfigMaps: readable, and different for each source."""
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
"""What was read of models that neither a spec nor the catalogue describes."""

NO_MODELS: Final[KnownModels] = MappingProxyType({})


def served_models(spec: SpecDecodeDeploymentSpec) -> dict[str, ServedModel]:
    """Return the target and, where there is one, the draft, by field."""
    draft = spec.speculation.draft if spec.speculation else None
    return {TARGET: spec.target} | ({DRAFT: draft} if draft else {})


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


def undescribed_models(spec: SpecDecodeDeploymentSpec) -> dict[str, ModelSource]:
    """Return the models that neither spec nor catalogue describes, by the field that names them."""
    return {
        field: model_source(spec, model)
        for field, model in _without_config(spec).items()
        if not assumption_of(model).is_complete
    }


def sources_without_config(spec: SpecDecodeDeploymentSpec) -> frozenset[ModelSource]:
    """Return the models without a config.json in spec or catalogue, with those that ``assume`` describes in full."""
    return frozenset(model_source(spec, model) for model in _without_config(spec).values())


def _without_config(spec: SpecDecodeDeploymentSpec) -> dict[str, ServedModel | ModelCheckpoint]:
    written = served_models(spec)
    models: dict[str, ServedModel | ModelCheckpoint] = dict(written)
    for field, model in written.items():
        models |= {
            f"{field}.checkpoints[{index}]": checkpoint
            for index, checkpoint in enumerate(model.checkpoints)
            if may_be_served(model, checkpoint)
        }
    return {field: model for field, model in models.items() if model.config is None and find_entry(model.model) is None}


def assumption_of(model: ServedModel | ModelCheckpoint) -> Assumption:
    """Return what the spec assumes of a model; other checkpoints of it have no numbers of their own."""
    given = model.assume if isinstance(model, ServedModel) else None
    if given is None:
        return NOTHING_ASSUMED
    return Assumption(
        weights_bytes=None if given.weights_gib is None else gib_to_bytes(float(given.weights_gib)),
        kv_bytes_per_token=given.kv_bytes_per_token,
        state_bytes_per_request=None if given.state_mib_per_request is None else given.state_mib_per_request * MIB,
    )


def may_be_served(model: ServedModel, checkpoint: ModelCheckpoint) -> bool:
    """Whether the spec asks for a checkpoint, or lets the plan ask for it."""
    return model.quantization.value in (Quantization.AUTO.value, checkpoint.quantization.value)
