"""Fields of a SpecDecodeDeployment for its models and speculation: target, draft, adapters, sources, method, K."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import (
    BOUNDED,
    GIBIBYTES,
    MODULE_NAME,
    SERVED_NAME,
    STRETCH,
    ApiModel,
    PersistentVolumeClaimRef,
    SecretKey,
    map_by,
)
from specdecode_operator.enums import (
    DraftHeadQuantization,
    DraftSampling,
    DraftUpdate,
    Method,
    Precision,
    Quantization,
    RejectionSampling,
    RopeType,
)

ModelId = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ModelConfig = Annotated[dict[str, Any], Field(max_length=512), BOUNDED]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ModuleName = Annotated[str, StringConstraints(max_length=128, pattern=MODULE_NAME)]
ImageReference = Annotated[str, StringConstraints(min_length=1, max_length=512)]
HostDirectory = Annotated[str, StringConstraints(min_length=2, max_length=1024)]


class ModelCheckpoint(ApiModel):
    """Checkpoint of the same model, stored in another precision."""

    quantization: Precision
    """Precision in which this checkpoint is stored."""

    model: ModelId
    """Hugging Face Hub ID, such as Qwen/Qwen3-8B-FP8, or the path inside models.volume if one is set."""

    revision: ShortText | None = None
    """Branch, tag or commit of the Hub repository. Use a commit to pin the files."""

    config: ModelConfig | None = None
    """Contents of the checkpoint's config.json, for a checkpoint that is not in the catalogue."""


Checkpoints = Annotated[list[ModelCheckpoint], Field(max_length=6, json_schema_extra=map_by("quantization"))]


class AssumedModel(ApiModel):
    """Sizes for a model that the operator cannot size exactly, for the whole model on one GPU. They are not checked."""

    weights_gib: Annotated[str, StringConstraints(max_length=9, pattern=GIBIBYTES)] | None = Field(
        default=None, alias="weightsGiB"
    )
    """Size of the weights in GiB, as a quoted decimal such as '14.5'. If not set, it follows from the checkpoint's
    files."""

    kv_bytes_per_token: StrictInt | None = Field(default=None, ge=1, le=1_073_741_824)
    """Size of one token in the KV cache in bytes, for 16-bit elements. If not set, it follows from config.json."""

    state_mib_per_request: StrictInt | None = Field(default=None, ge=1, le=1_048_576, alias="stateMiBPerRequest")
    """Size of one request's recurrent state in MiB, which does not depend on the request's length (Mamba, linear
    attention). If not set, it follows from config.json."""


class ServedModel(ApiModel):
    """Fields that target and draft share."""

    model: ModelId
    """Hugging Face Hub ID, such as Qwen/Qwen3-8B, or the path inside models.volume if one is set."""

    revision: ShortText | None = None
    """Branch, tag or commit of the Hub repository. Use a commit to pin the files."""

    quantization: Quantization = Quantization.AS_CHECKPOINT
    """Precision in which the model is served."""

    checkpoints: Checkpoints = Field(default=[])
    """Checkpoints of the same model in other precisions, which quantization can select."""

    config: ModelConfig | None = None
    """Contents of the model's config.json, for a model that is not in the catalogue."""

    assume: AssumedModel | None = None
    """Sizes for a model that the operator cannot size exactly; a warning lists them. With weightsGiB and
    kvBytesPerToken set and config unset, the operator does not read the model's files. For known models, the known
    sizes take precedence."""


class RopeScaling(ApiModel):
    """Scaling of rotary positions (RoPE), which allows longer sequences than the model was trained for."""

    type: RopeType
    """Scaling algorithm: yarn, linear or dynamic."""

    factor: Annotated[str, StringConstraints(max_length=8, pattern=STRETCH)]
    """Factor by which the context length grows, as a quoted decimal such as '4.0'."""

    original_max_position_embeddings: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Context length in tokens that yarn multiplies by factor. Defaults to max_position_embeddings in config.json."""


class Target(ServedModel):
    """Target model, which produces the served output."""

    quantization: Quantization = Quantization.AS_CHECKPOINT
    """Precision in which the target is served. AsCheckpoint keeps the precision of the checkpoint. FP8 quantizes a BF16
    checkpoint while loading it; INT8 and INT4 need a checkpoint in that precision. With Auto, the plan picks an
    available precision according to spec.objective."""

    rope_scaling: RopeScaling | None = None
    """RoPE scaling of the target, which replaces any scaling in its config.json. It does not apply to the draft."""


class ModelImage(ApiModel):
    """OCI image with models, which the nodes pull and mount as a volume. Needs Kubernetes 1.35 or newer."""

    reference: ImageReference
    """Reference of the image, with a tag or a digest. Use a digest to pin the files. Secrets for private registries
    come from spec.podTemplate.spec.imagePullSecrets."""


class Draft(ServedModel):
    """Draft model, or draft head trained for the target, that proposes tokens."""

    quantization: Quantization = Quantization.AS_CHECKPOINT
    """Precision in which the draft is served; it is not inherited from the target. With Auto, the plan picks one
    according to spec.objective. Draft heads are always served as stored."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the draft; model is then the path inside it. Engines mount it read-only. If not set, the draft
    comes from the same place as the target."""

    image: ModelImage | None = None
    """OCI image that holds the draft; model is then the path inside it. If not set, the draft comes from the same place
    as the target."""

    max_model_len: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Longest sequence, in tokens, for which the draft proposes tokens."""


class Adapter(ApiModel):
    """LoRA adapter of the target, which clients request by its name."""

    name: Annotated[str, StringConstraints(max_length=256, pattern=SERVED_NAME)]
    """Model name that clients request to get answers with this adapter."""

    model: ModelId
    """Hugging Face Hub ID of the adapter, or the path of its folder inside models.volume if one is set."""

    revision: ShortText | None = None
    """Branch, tag or commit of the Hub repository. Use a commit to pin the files."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the adapter; model is then the path inside it. Engines mount it read-only. If not set, the
    adapter comes from the same place as the target."""

    rank: StrictInt = Field(ge=1, le=512)
    """Rank of the adapter: r in its adapter_config.json, or the largest value of its rank_pattern."""

    target_modules: list[ModuleName] = Field(default=[], max_length=64)
    """Names of the adapted layers, as in target_modules of its adapter_config.json, such as q_proj. If all adapters set
    it, vLLM reserves memory for these layers only (--lora-target-modules); otherwise for all layers."""


class AdapterSlots(ApiModel):
    """Memory that engines reserve for adapters, whether they are in use or not."""

    gpu: StrictInt | None = Field(default=None, ge=1, le=64)
    """Number of adapters that the requests of one step can use (vLLM's --max-loras). Requests for further adapters
    wait. Each slot takes memory on all GPUs. Defaults to the number of adapters."""

    host: StrictInt | None = Field(default=None, ge=1, le=4096)
    """Number of adapters that each engine process keeps in host memory (vLLM's --max-cpu-loras). Engines read
    other adapters from disk again. Defaults to the number of adapters, or to gpu if that is more."""

    max_rank: StrictInt | None = Field(default=None, ge=1, le=512)
    """Largest rank for which memory is reserved (vLLM's --max-lora-rank): 1, 8, 16, 32, 64, 128, 256, 320 or 512.
    Defaults to the smallest of these that is not below the rank of any adapter."""


class HostPath(ApiModel):
    """Directory on the nodes."""

    path: HostDirectory
    """Absolute path of the directory, which must exist on every node that can run engines. The operator must be started
    with --allow-host-path for it or for a parent directory."""


class ModelVolume(ApiModel):
    """Volume that already holds the models: a claim, a directory on the nodes, or an image."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """PersistentVolumeClaim that holds the models. Engines mount it read-only."""

    host_path: HostPath | None = None
    """Directory on the nodes that holds the models. Engines mount it read-only."""

    image: ModelImage | None = None
    """OCI image that holds the models. Engines mount it read-only."""


class ModelCache(ApiModel):
    """Cache for downloaded models and compiled code, shared by all replicas and kept across restarts."""

    persistent_volume_claim: PersistentVolumeClaimRef
    """Claim for the cache. A Job downloads each model once, in the layout of the Hub's own cache, and engines mount it
    read-only. The claim also stores the code that engines compile. Several objects can share it."""


class Models(ApiModel):
    """Source of the model files: a volume that already holds them, or the Hugging Face Hub with an optional cache."""

    volume: ModelVolume | None = None
    """Volume that already holds the models. If not set, the models are downloaded from the Hub."""

    cache: ModelCache | None = None
    """Claim to which models are downloaded once, and which keeps compiled code. If not set, each pod downloads the
    models into its own emptyDir and compiles again."""

    hub_token_secret: SecretKey | None = None
    """Secret key that holds the access token for the Hub. Only the download receives the token."""


class Ngram(ApiModel):
    """Limits of the prompt lookup, for methods ngram and ngram_gpu."""

    prompt_lookup_min: StrictInt | None = Field(default=None, ge=1, le=64)
    """Shortest n-gram to look up in the prompt, in tokens."""

    prompt_lookup_max: StrictInt | None = Field(default=None, ge=1, le=64)
    """Longest n-gram to look up in the prompt, in tokens."""


class Suffix(ApiModel):
    """Limits of the lookup in earlier outputs, for method suffix."""

    max_tree_depth: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Longest sequence that the suffix trees store, in tokens. Defaults to vLLM's 24."""

    max_cached_requests: StrictInt | None = Field(default=None, ge=0, le=10_000_000)
    """Number of earlier outputs to keep; 0 keeps none. Defaults to vLLM's 10,000."""

    max_spec_factor_percent: StrictInt | None = Field(default=None, ge=0, le=10_000)
    """Maximum number of proposed tokens, in percent of the matched tokens. Defaults to vLLM's 100."""

    min_token_probability_percent: StrictInt | None = Field(default=None, ge=0, le=100)
    """Minimum frequency, in percent, with which a token must have followed the match to be proposed. Defaults to vLLM's
    10."""


class BatchSizeRange(ApiModel):
    """K for a range of running requests."""

    from_: StrictInt = Field(alias="from", ge=1, le=65_536)
    """Lowest number of running requests in the range, inclusive."""

    to: StrictInt = Field(ge=1, le=65_536)
    """Highest number of running requests in the range, inclusive."""

    num_speculative_tokens: StrictInt = Field(ge=0, le=32)
    """Number of tokens proposed per step (K) in this range; 0 proposes none, but keeps the draft and its memory."""


class SpeculationSettings(ApiModel):
    """Speculation method and its settings."""

    method: Method
    """Method that proposes tokens: a draft model (draft_model); a head trained for the target (eagle, eagle3, dflash,
    dspark, and medusa up to vLLM 0.32); layers of the target's own checkpoint (mtp); a lookup in the prompt (ngram,
    ngram_gpu) or in earlier outputs (suffix). With none, the engine does not speculate."""

    num_speculative_tokens: StrictInt | None = Field(default=None, ge=0, le=64)
    """Number of tokens proposed per step (vLLM's num_speculative_tokens, often called K). For suffix it is the upper
    limit, with a maximum of 64; for other methods the maximum is 32. Required unless method is none."""

    num_speculative_tokens_by_batch_size: list[BatchSizeRange] = Field(default=[], max_length=256)
    """K by number of running requests. Outside these ranges, numSpeculativeTokens applies."""

    draft: Draft | None = None
    """Draft model or head. Required for draft_model, eagle, eagle3, dflash and medusa. If not set, mtp uses the
    target's own layers, and dspark uses the stages inside the target's checkpoint (DeepSeek V4). For mtp, set it to a
    checkpoint with layers for multi-token prediction, such as a Gemma 4 assistant."""

    use_heterogeneous_vocab: StrictBool = False
    """Allow a draft with a different vocabulary than the target, for method draft_model. The draft proposes only tokens
    that both vocabularies contain, and always the most likely ones. vLLM uses its older model runner in this mode."""

    ngram: Ngram | None = None
    """Limits of the prompt lookup, for methods ngram and ngram_gpu."""

    suffix: Suffix | None = None
    """Limits of the lookup in earlier outputs, for method suffix."""

    rejection_sampling: RejectionSampling | None = None
    """How the target verifies drafted tokens. standard verifies one token after another; block verifies all tokens of a
    step together and accepts more; both keep the target's distribution. fly (vLLM 0.33 on GPUs, needs lossy) also
    accepts a rejected token if the target was unsure and would accept the tokens that follow it. Defaults to vLLM's
    standard."""

    lossy: StrictBool = False
    """Allow output that differs from the target's own. Required for rejectionSampling fly, which accepts tokens that
    the target would reject."""

    draft_sampling: DraftSampling | None = None
    """How the draft picks tokens: the most likely ones (greedy), or sampled like the target's (probabilistic). With a
    temperature above 0, probabilistic raises acceptance but needs memory for the draft's logits. Defaults to vLLM's
    greedy."""

    adaptive_verification: StrictBool | None = None
    """Verify only as many drafted tokens per step as pay off, based on costs that the engine measures at start. Skipped
    tokens count as drafted but not accepted, so acceptance reads low; the mean acceptance length stays correct.
    Defaults to vLLM's false, which verifies all."""

    draft_lm_head_quantization: DraftHeadQuantization | None = None
    """Precision of a separate copy of the target's output head for the draft, for methods eagle and mtp. Steps get
    faster, and the copy takes memory; the target's output does not change. If not set, target and draft share one
    head."""

    xpress_top_c: StrictInt | None = Field(default=None, ge=0, le=1_048_576)
    """Number of most likely tokens from which the refiner of an XPress head chooses at each position, for method
    dflash; 0 means all tokens and takes much memory. Defaults to the value in the head's config.json, or to 512."""

    extra_config: Annotated[dict[str, Any], Field(max_length=32), BOUNDED] | None = None
    """Additional keys of vLLM's --speculative-config that have no field here, such as attention_backend, moe_backend,
    kv_cache_dtype, enforce_eager, draft_load_config and disable_padded_drafter_batch. Keys that a field controls and
    keys unknown to the vLLM version are rejected. The plan does not account for these keys."""


class Speculation(SpeculationSettings):
    """Speculation method and its settings."""

    trained_drafts: StrictBool = False
    """Serve the head of the newest SpecDecodeTraining of this deployment that has promote OnBetter and whose condition
    Better is True. It replaces method, numSpeculativeTokens and draft; the spec is not changed. The head rolls out like
    a change of the spec. It is withdrawn if this field is false, or if the training is deleted or has promote
    Manual."""

    draft_update: DraftUpdate = DraftUpdate.RESTART
    """How engines get the next trained head. Restart rolls out new pods. InPlace replaces the weights in the serving
    engines, one engine at a time, while requests wait for less than a second; it needs trainedDrafts. The operator
    restarts the engines instead if the head has another shape, claim or method, and status.trainedDraft says why.
    Changing this field restarts the engines."""
