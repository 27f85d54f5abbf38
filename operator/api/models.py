"""The models of a SpecDecodeDeployment: target and draft, the precisions that they can be had in, and their source."""

from typing import Annotated, Any

from pydantic import Field, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel, PersistentVolumeClaimRef, SecretKey
from specdecode_operator.api.open_objects import BOUNDED
from specdecode_operator.api.patterns import GIBIBYTES, STRETCH
from specdecode_operator.api.values import Quantization, RopeType
from specdecode_operator.vocabulary import Precision

ModelId = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ModelConfig = Annotated[dict[str, Any], Field(max_length=512), BOUNDED]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
HostDirectory = Annotated[str, StringConstraints(min_length=2, max_length=1024)]


class ModelCheckpoint(ApiModel):
    """The same model, stored in another precision."""

    quantization: Precision
    """Precision that it was stored in."""

    model: ModelId
    """Hub id, or path inside models.volume when a volume is given."""

    revision: ShortText | None = None
    """Pinned revision of the hub repository."""

    config: ModelConfig | None = None
    """Content of its config.json, for checkpoints that the catalogue does not know."""


Checkpoints = Annotated[
    list[ModelCheckpoint],
    Field(
        max_length=6,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["quantization"]},
    ),
]


class AssumedModel(ApiModel):
    """Numbers for a model that sizing does not know exactly, all of it on one GPU. Nothing checks them."""

    weights_gib: Annotated[str, StringConstraints(max_length=9, pattern=GIBIBYTES)] | None = Field(
        default=None, alias="weightsGiB"
    )
    """GiB of its weights, as a decimal: 14.5. Absent: by its files."""

    kv_bytes_per_token: StrictInt | None = Field(default=None, ge=1, le=1_073_741_824)
    """Bytes that a token takes in the KV cache, in 16 bits. Absent: by its config.json."""

    state_mib_per_request: StrictInt | None = Field(default=None, ge=1, le=1_048_576, alias="stateMiBPerRequest")
    """MiB of recurrent state per request, which does not depend on its length (Mamba, linear attention).
    If absent, it follows from config.json."""


class ServedModel(ApiModel):
    """What target and draft have in common."""

    model: ModelId
    """Hub id, or path inside models.volume when a volume is given."""

    revision: ShortText | None = None
    """Pinned revision of the hub repository."""

    quantization: Quantization = Quantization.AS_CHECKPOINT
    """Precision to serve in."""

    checkpoints: Checkpoints = Field(default=[])
    """The same model in other precisions, which quantization or its Auto may ask for."""

    config: ModelConfig | None = None
    """Content of the model's config.json, for models that the catalogue does not know."""

    assume: AssumedModel | None = None
    """Numbers for a model that sizing does not know exactly. With weightsGiB and kvBytesPerToken, and without config,
    nothing is read of the model. A warning says what was assumed; for a known model the known numbers hold."""


class RopeScaling(ApiModel):
    """How rotary positions are stretched, so that sequences may be longer than those that the model was made for."""

    type: RopeType
    """How: yarn, linear or dynamic."""

    factor: Annotated[str, StringConstraints(max_length=8, pattern=STRETCH)]
    """By how much, as a decimal: 4.0."""

    original_max_position_embeddings: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Length in tokens that yarn multiplies. Absent: max_position_embeddings of the model's config.json."""


class Target(ServedModel):
    """The model whose outputs are served."""

    quantization: Quantization = Quantization.AS_CHECKPOINT
    """Precision to serve in. FP8 of a BF16 checkpoint is made on loading; INT8 and INT4 exist only as checkpoints.
    Auto: the plan picks one that can be had, by the objective."""

    rope_scaling: RopeScaling | None = None
    """How its rotary positions are stretched, beyond what its own config.json says. The draft's are not."""


class Draft(ServedModel):
    """The model, or the head made for the target, that proposes tokens."""

    quantization: Quantization = Quantization.AS_CHECKPOINT
    """Precision to serve in; not inherited from the target. Auto: the plan picks one, by the objective. Heads are
    served as they were stored."""

    max_model_len: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Longest sequence that is drafted for, in tokens."""


class HostPath(ApiModel):
    """A directory of the node."""

    path: HostDirectory
    """The same directory on every node that engines may run on. The operator must be started with --allow-host-path
    for it, or for a directory above it."""


class ModelVolume(ApiModel):
    """Where models lie: on a claim, or on the nodes."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the models; mounted read-only."""

    host_path: HostPath | None = None
    """Directory of the nodes that holds the models; mounted read-only."""


class ModelCache(ApiModel):
    """What is kept for all replicas and for the next start."""

    persistent_volume_claim: PersistentVolumeClaimRef
    """Claim that a Job downloads the models to, once, in the layout of the hub's own cache; engines mount it read-only.
    What engines compile is kept there too. Several objects may name the same claim."""


class Models(ApiModel):
    """Where models come from: a volume that holds them, or else the hub, with a cache or without."""

    volume: ModelVolume | None = None
    """A volume that already holds them. Absent: they are downloaded from the hub."""

    cache: ModelCache | None = None
    """A claim to download to once, and for what engines compile. Absent: each pod downloads into an emptyDir of its
    own, and compiles anew."""

    hub_token_secret: SecretKey | None = None
    """Token for the hub; only the download sees it."""
