"""Resolve the references of a spec: engine profile, models, precisions, limits and image."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from specdecode_operator.api.deployment import Replay, Serving, SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import ServedModel
from specdecode_operator.deployment.models.checkpoints import (
    choices,
    config_of,
    geometry_of,
    is_made_up,
    named_checkpoints,
    overridden_geometry,
    spec_at,
    stored_type,
    wanted_precision,
)
from specdecode_operator.deployment.models.model_locations import (
    DRAFT,
    NO_MODELS,
    TARGET,
    KnownModels,
    model_source,
    served_models,
)
from specdecode_operator.enums import (
    DTYPE_BYTES,
    KV_ELEMENT_BYTES,
    AcceleratorType,
    DraftSampling,
    LiveTokenIds,
    Method,
    Platform,
    Precision,
    RejectionSampling,
)
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.geometry import BLOCK_TOKENS, ModelGeometry
from specdecode_operator.sizing.kernel_support import Available
from specdecode_operator.sizing.memory.adapters import allowed_rank
from specdecode_operator.sizing.pair import AdapterSlots, EngineLimits, Pair, Parallelism, longest_sequence
from specdecode_operator.sizing.plan import PLACE_ONLY, Plan, PlanOptions, pair_at
from specdecode_operator.vllm.extra_args_parser import attention_backend, last_option
from specdecode_operator.vllm.hf_overrides import ConfigOverrides, config_overrides
from specdecode_operator.vllm.profiles import EngineProfile, UnknownEngineVersionError, find_profile


@dataclass(frozen=True)
class Facts:
    """A spec with its references resolved."""

    spec: SpecDecodeDeploymentSpec
    profile: EngineProfile  # Profile of its vLLM version
    pair: Pair  # Models at the requested precisions, or at those of the checkpoints if the plan may choose
    options: PlanOptions = PLACE_ONLY
    stored_type: str | None = None
    operator_image: str | None = None
    live_token_ids: LiveTokenIds = LiveTokenIds.NONE  # that live captures may record
    trained_draft: str | None = None  # SHA-256 of a trained head that replaces the draft of the object's spec

    def at(self, target: Precision, draft: Precision | None, fewer_seqs: int | None = None) -> "Facts":
        """Return the facts with these precisions chosen and, if given, with ``fewer_seqs`` as maxNumSeqs."""
        pair = pair_at(self.pair, self.options.available, target, draft)
        if fewer_seqs is not None:
            pair = replace(pair, limits=replace(pair.limits, max_num_seqs=fewer_seqs, may_run_fewer=False))
        return replace(self, spec=spec_at(self.spec, target, draft), pair=pair)

    @property
    def method(self) -> Method:
        """Speculation method; `Method.NONE` without spec.speculation."""
        return self.spec.speculation.method if self.spec.speculation else Method.NONE

    @property
    def image(self) -> str:
        """Image of the engine."""
        return engine_image(self.spec, self.profile)

    @property
    def replay(self) -> Replay | None:
        """Replay settings; None if the engine runs the models."""
        return self.spec.engine.replay

    def models(self) -> Iterator[tuple[str, ServedModel, ModelGeometry]]:
        """Yield field, spec and geometry of the target and, if there is one, of the draft."""
        draft = self.spec.speculation.draft if self.spec.speculation else None
        yield "target", self.spec.target, self.pair.target
        if draft is not None and self.pair.draft is not None:
            yield "speculation.draft", draft, self.pair.draft

    def takes_pods_of(self, plan: Plan) -> int:
        """Return the number of pods of one replica: one per node, or one for a replay."""
        return plan.chosen.nodes if self.replay is None else 1

    @property
    def on_cpu(self) -> bool:
        """Whether the engine runs on CPU."""
        return self.spec.accelerator.type is AcceleratorType.CPU


def gather_facts(
    spec: SpecDecodeDeploymentSpec, known: KnownModels = NO_MODELS, calibration: Calibration = UNCALIBRATED
) -> Facts:
    """Resolve the references of a spec without validating it; `validation.valid_facts` does both.

    ``known`` has the models that were read because they are not in the spec or the catalogue. Raises
    InvalidSpecError for an unknown vLLM version, model, checkpoint or precision.
    """
    profile = engine_profile(spec)
    told = config_overrides(spec.target.rope_scaling, spec.engine.extra_args, profile)
    own = _own_geometries(spec, known, told)
    models = served_models(spec)
    named = {
        field: named_checkpoints(field, own[field], spec, known, told if field == TARGET else None) for field in models
    }
    free = {field: choices(model.quantization, own[field], named[field]) for field, model in models.items()}
    options = PlanOptions(
        objective=spec.objective,
        target=free[TARGET],
        draft=free.get(DRAFT, frozenset()),
        available=Available(named[TARGET], named.get(DRAFT, ())),
        spread=Parallelism(1, spec.parallelism.pipeline, spec.parallelism.data, spec.parallelism.expert),
    )
    pair = replace(_pair(spec, profile, own, options.available), calibration=calibration)
    if not options.target and not options.draft:
        spec = spec_at(spec, pair.target_precision, pair.draft_precision)
    config = config_of(spec.target, known.get(model_source(spec, spec.target)))
    return Facts(spec, profile, pair, options, stored_type(config or {}))


def _own_geometries(
    spec: SpecDecodeDeploymentSpec, known: KnownModels, told: ConfigOverrides | None
) -> dict[str, ModelGeometry]:
    read = {field: known.get(model_source(spec, model)) for field, model in served_models(spec).items()}
    speculation, like, found = spec.speculation, None, None
    draft = speculation.draft if speculation else None
    # Method that decides how a head's config.json is read; None for a separate draft model.
    head = None if speculation is None or speculation.method is Method.DRAFT_MODEL else speculation.method
    if draft is not None and is_made_up(spec.target, read[TARGET]) and not is_made_up(draft, read[DRAFT]):
        # A model known only from assumptions takes its shape from the other model.
        like = found = geometry_of(DRAFT, draft, read[DRAFT], head)
    target = overridden_geometry(TARGET, spec.target, read[TARGET], told, like)
    if draft is None:
        return {TARGET: target}
    return {TARGET: target, DRAFT: found or geometry_of(DRAFT, draft, read[DRAFT], head, target)}


def engine_profile(spec: SpecDecodeDeploymentSpec) -> EngineProfile:
    """Return the profile of a spec's vLLM version. Raises InvalidSpecError for an unknown version."""
    try:
        return find_profile(spec.engine.version)
    except UnknownEngineVersionError as error:
        raise InvalidSpecError([error.problem]) from error


def platform_of(spec: SpecDecodeDeploymentSpec) -> Platform:
    """Return the platform of a spec's engine: CPU or GPU."""
    return Platform.CPU if spec.accelerator.type is AcceleratorType.CPU else Platform.GPU


def engine_image(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> str:
    """Return the engine image: spec.engine.image, or the default of the vLLM version."""
    return spec.engine.image or profile.images[platform_of(spec)]


def _pair(
    spec: SpecDecodeDeploymentSpec, profile: EngineProfile, own: Mapping[str, ModelGeometry], available: Available
) -> Pair:
    speculation, draft = spec.speculation, own.get(DRAFT)
    target_precision = wanted_precision(TARGET, spec.target.quantization, own[TARGET], available.target)
    draft_precision = None
    if speculation and speculation.draft and draft:
        draft_precision = wanted_precision(DRAFT, speculation.draft.quantization, draft, available.draft)
    tokens = (speculation.num_speculative_tokens or 0) if speculation else 0
    ranges = speculation.num_speculative_tokens_by_batch_size if speculation else []
    lengths = [part.num_speculative_tokens for part in ranges if part.from_ <= spec.serving.max_num_seqs]
    return Pair(
        target=own[TARGET],
        target_precision=target_precision,
        draft=draft,
        draft_precision=draft_precision,
        method=speculation.method.value if speculation else Method.NONE.value,
        num_speculative_tokens=tokens,
        limits=_limits(spec, own[TARGET], profile),
        other_draft_lengths=frozenset(lengths) - {tokens},
        maps_vocabulary=speculation is not None and speculation.use_heterogeneous_vocab,
        samples_drafts=speculation is not None and speculation.draft_sampling is DraftSampling.PROBABILISTIC,
        adaptive_verification=speculation is not None and speculation.adaptive_verification is True,
        checks_by_entropy=speculation is not None and speculation.rejection_sampling is RejectionSampling.FLY,
        draft_head_quantization=speculation.draft_lm_head_quantization if speculation else None,
        refined_candidates=speculation.xpress_top_c if speculation else None,
        adapters=_adapter_slots(spec, profile),
    )


def _adapter_slots(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> AdapterSlots | None:
    """Return the slots for adapters; by default as many as there are adapters, for the largest rank."""
    if not spec.adapters:
        return None
    count, given = len(spec.adapters), spec.adapter_slots
    gpu = (given.gpu if given else None) or count
    rank = (given.max_rank if given else None) or allowed_rank(max(each.rank for each in spec.adapters))
    # vLLM adapts all layers unless it knows the layers of all adapters.
    named = all(each.target_modules for each in spec.adapters)
    modules = frozenset(name for each in spec.adapters for name in each.target_modules) if named else frozenset()
    sharded = last_option("--fully-sharded-loras", spec.engine.extra_args, profile)
    return AdapterSlots(
        gpu=gpu,
        host=(given.host if given else None) or max(gpu, count),
        rank=rank,
        modules=modules,
        fully_sharded=sharded is not None and not sharded.negated,
    )


def _limits(spec: SpecDecodeDeploymentSpec, target: ModelGeometry, profile: EngineProfile) -> EngineLimits:
    serving = spec.serving
    # The index of sparse attention has a fixed block size, and the KV cache must use the same.
    default_block_size = BLOCK_TOKENS if target.has_sparse_attention else profile.default_block_sizes[platform_of(spec)]
    # The API server fills in the default, so an explicit 256 looks the same as no value. A schedule's ranges end at
    # maxNumSeqs, so it must not be lowered then.
    is_default = serving.max_num_seqs == Serving.model_fields["max_num_seqs"].default
    scheduled = spec.speculation is not None and bool(spec.speculation.num_speculative_tokens_by_batch_size)
    return EngineLimits(
        max_model_len=serving.max_model_len or longest_sequence(target, profile.version),
        max_num_seqs=serving.max_num_seqs,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        block_size=serving.block_size or default_block_size,
        dtype_bytes=DTYPE_BYTES[serving.dtype],
        kv_cache_element_bytes=KV_ELEMENT_BYTES[serving.kv_cache_dtype],
        memory_utilization_percent=serving.gpu_memory_utilization_percent,
        enforce_eager=serving.enforce_eager,
        min_concurrency=serving.min_concurrency,
        engine_version=profile.version,
        graph_mode=serving.cudagraph_mode.value if serving.cudagraph_mode else None,
        max_graph_tokens=serving.max_cudagraph_capture_size,
        attention_backend=attention_backend(spec.engine.extra_args, profile),
        may_run_fewer=is_default and not scheduled,
        # The compile cache is empty in each pod, or in the first pod of each spec with a cache on a claim.
        compiles_anew=True,
    )
