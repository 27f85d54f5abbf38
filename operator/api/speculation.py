"""Fields of a SpecDecodeDeployment for its models and speculation: target, draft, sources, method, K."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import (
    BOUNDED,
    GIBIBYTES,
    STRETCH,
    ApiModel,
    PersistentVolumeClaimRef,
    SecretKey,
    map_by,
)
from specdecode_operator.enums import (
    DraftHeadQuantization,
    DraftSampling,
    Method,
    Precision,
    Quantization,
    RejectionSampling,
    RopeType,
)

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


Checkpoints = Annotated[list[ModelCheckpoint], Field(max_length=6, json_schema_extra=map_by("quantization"))]


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


class Ngram(ApiModel):
    """Bounds of the prompt lookup that methods ngram and ngram_gpu do."""

    prompt_lookup_min: StrictInt | None = Field(default=None, ge=1, le=64)
    """Shortest n-gram looked up, in tokens."""

    prompt_lookup_max: StrictInt | None = Field(default=None, ge=1, le=64)
    """Longest n-gram looked up, in tokens."""


class Suffix(ApiModel):
    """How method suffix looks proposals up in earlier answers."""

    max_tree_depth: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Longest sequence that its trees hold, in tokens. Absent: the engine's 24."""

    max_cached_requests: StrictInt | None = Field(default=None, ge=0, le=10_000_000)
    """Earlier answers that are kept; 0 keeps none. Absent: the engine's 10,000."""

    max_spec_factor_percent: StrictInt | None = Field(default=None, ge=0, le=10_000)
    """Tokens proposed for each that matched, in percent. Absent: the engine's 100."""

    min_token_probability_percent: StrictInt | None = Field(default=None, ge=0, le=100)
    """How often a token must have followed to be proposed, in percent. Absent: the engine's 10."""


class BatchSizeRange(ApiModel):
    """K for one range of running requests."""

    from_: StrictInt = Field(alias="from", ge=1, le=65_536)
    """First number of running requests, inclusive."""

    to: StrictInt = Field(ge=1, le=65_536)
    """Last number of running requests, inclusive."""

    num_speculative_tokens: StrictInt = Field(ge=0, le=32)
    """K in this range; 0 turns speculation off."""


class Speculation(ApiModel):
    """How the engine speculates."""

    method: Method
    """What proposes tokens: a draft model (draft_model); a head trained for the target (eagle, eagle3, dflash, dspark,
    and medusa up to vLLM 0.32); layers of the target's own checkpoint (mtp); a lookup in the prompt (ngram, ngram_gpu)
    or in earlier answers (suffix). With none, the engine does not speculate."""

    num_speculative_tokens: StrictInt | None = Field(default=None, ge=0, le=64)
    """Number of tokens proposed per step (vLLM's num_speculative_tokens, often called K). For suffix it is the maximum,
    and at most 64; for other methods at most 32. Required unless method is none."""

    num_speculative_tokens_by_batch_size: list[BatchSizeRange] = Field(default=[], max_length=256)
    """K by the number of running requests, from 1 up. Where no range applies, numSpeculativeTokens holds."""

    draft: Draft | None = None
    """Draft model or head, for the methods draft_model, eagle, eagle3, dflash, dspark and medusa. Method mtp takes one
    that holds layers for multi-token prediction, such as an assistant of Gemma 4, and drafts with the target's own
    layers without one. Method dspark without one drafts with stages inside the target's checkpoint (DeepSeek V4)."""

    use_heterogeneous_vocab: StrictBool = False
    """Whether the draft may have another vocabulary than the target, for method draft_model: the engine maps the tokens
    that both have, and the draft proposes no others. Then the engine's older model runner serves both, and the draft
    proposes the likeliest tokens."""

    ngram: Ngram | None = None
    """Lookup bounds, for methods ngram and ngram_gpu."""

    suffix: Suffix | None = None
    """Lookup bounds, for method suffix."""

    rejection_sampling: RejectionSampling | None = None
    """How drafted tokens are checked. The target's distribution is kept: one after another (standard), or all of a step
    together (block), by which more of them pass. It is not kept: tokens pass that the target would have rejected, where
    it was unsure itself and would accept the next ones (fly, of vLLM 0.33 on GPUs; needs lossy). Absent: the engine's,
    standard."""

    lossy: StrictBool = False
    """Accept answers that differ from the target's own. Required for rejectionSampling fly, which accepts tokens that
    the target would reject."""

    draft_sampling: DraftSampling | None = None
    """How a draft picks its tokens: the likeliest ones (greedy), or by chance as the target does (probabilistic), by
    which more of them pass where requests have a temperature; its logits then take memory. Absent: the engine's,
    greedy."""

    adaptive_verification: StrictBool | None = None
    """Whether each step verifies only as many of the drafted tokens as pay, by costs that the engine measures while it
    starts (true), or all of them (false). Those left out count as drafted and not accepted: acceptance reads low, mean
    acceptance length stays true. Absent: the engine's, false."""

    draft_lm_head_quantization: DraftHeadQuantization | None = None
    """Precision of the draft's own copy of the target's output head, for methods eagle and mtp: reading it takes less
    time, and the copy takes memory. What the target answers stays the same. Absent: both use one head."""

    xpress_top_c: StrictInt | None = Field(default=None, ge=0, le=1_048_576)
    """From how many of the likeliest tokens the refiner of an XPress head chooses at each place, for method dflash; 0
    for all, which takes much memory. Absent: as many as its config.json says, or 512."""

    extra_config: Annotated[dict[str, Any], Field(max_length=32), BOUNDED] | None = None
    """Further keys of vLLM's --speculative-config, by vLLM's names, for what has no field: attention_backend,
    moe_backend, kv_cache_dtype, enforce_eager, draft_load_config, disable_padded_drafter_batch and others. Keys that a
    field decides, and keys that this vLLM version lacks, are refused. The plan does not count what they change."""
