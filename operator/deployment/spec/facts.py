"""Turns a spec into what sizing and rendering take: geometry, precision, limits.

Everything here can be told from one object alone. What is wrong is collected,
so that a user sees all of it at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.values import AcceleratorType, DraftSampling, KvCacheDtype, Method
from specdecode_operator.deployment.spec.checkpoints import (
    choices,
    geometry_of,
    named_checkpoints,
    settled,
    wanted_precision,
)
from specdecode_operator.deployment.spec.engine_settings import engine_settings
from specdecode_operator.deployment.spec.model_sources import NO_MODELS, KnownModels, model_source
from specdecode_operator.deployment.spec.pairing_rules import pairing_problems
from specdecode_operator.deployment.spec.pod_template import overlay_problems
from specdecode_operator.deployment.spec.schedule_rules import schedule_problems
from specdecode_operator.deployment.spec.served_models import DRAFT, TARGET, served_models
from specdecode_operator.engine.environment import env_problems
from specdecode_operator.engine.profiles import EngineProfile, UnknownEngineVersionError, find_profile
from specdecode_operator.engine.rules.extra_args import extra_args_problems
from specdecode_operator.engine.rules.features import feature_problems
from specdecode_operator.engine.rules.serving import image_problems, serving_problems
from specdecode_operator.engine.rules.speculation import speculation_problems
from specdecode_operator.engine.settings import Platform
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.choice.launchability import Available
from specdecode_operator.sizing.choice.matrix import FP8_ELEMENT_BYTES
from specdecode_operator.sizing.choice.objective import Objective
from specdecode_operator.sizing.choice.plan import AS_WRITTEN, Wish, pair_at
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.precision import Precision
from specdecode_operator.sizing.model.sparse import BLOCK_TOKENS
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.pair.pair import EngineLimits, Pair
from specdecode_operator.sizing.pair.spread import Spread, spread_problems
from specdecode_operator.sizing.weights.divisibility import tensor_problems
from specdecode_operator.sizing.weights.weights import parameter_count

_KV_ELEMENT_BYTES = {
    KvCacheDtype.AUTO: None,
    KvCacheDtype.BFLOAT16: 2,
    KvCacheDtype.FP8: 1,
    KvCacheDtype.FP8_E4M3: 1,
    KvCacheDtype.FP8_E5M2: 1,
}


_MOST_PARAMETERS = 10**14
"""A hundred times the largest models that are known."""


@dataclass(frozen=True)
class Facts:
    """A spec that holds together, with everything looked up that it refers to.

    Attributes
    ----------
    spec
        As written, until a plan settled what it left open.
    profile
        What is known of its engine.
    pair
        The models at the precisions that are asked for, or at their own where the plan may choose.
    wish
        What the plan may decide.
    """

    spec: SpecDecodeDeploymentSpec
    profile: EngineProfile
    pair: Pair
    wish: Wish = AS_WRITTEN

    def settled(self, target: Precision, draft: Precision | None) -> "Facts":
        """Return the facts of the spec that names what is served at these precisions."""
        pair = pair_at(self.pair, self.wish.available, target, draft)
        return replace(self, spec=settled(self.spec, target, draft), pair=pair)

    @property
    def method(self) -> Method:
        """How tokens are proposed; none where the spec says nothing."""
        return self.spec.speculation.method if self.spec.speculation else Method.NONE

    @property
    def image(self) -> str:
        """The engine's image."""
        platform = Platform.CPU if self.on_cpu else Platform.GPU
        return self.spec.engine.image or self.profile.images[platform]

    @property
    def on_cpu(self) -> bool:
        """Whether the engine runs on CPU."""
        return self.spec.accelerator.type is AcceleratorType.CPU


def gather_facts(
    spec: SpecDecodeDeploymentSpec, known: KnownModels = NO_MODELS, calibration: Calibration = UNCALIBRATED
) -> Facts:
    """Look up and check what one object alone can tell.

    ``known`` are models that neither the spec nor the catalogue describes and that were read,
    ``calibration`` is what measurements say of the estimates.

    Raises
    ------
    InvalidSpecError
        With every problem found.
    """
    profile = _profile(spec)
    own = {
        field: geometry_of(field, model, known.get(model_source(spec, model)), _head_method(spec, field))
        for field, model in served_models(spec).items()
    }
    wish = _wish(spec, own, known)
    pair = replace(_pair(spec, profile, own, wish.available), calibration=calibration)
    if not wish.target and not wish.draft:
        spec = settled(spec, pair.target_precision, pair.draft_precision)
    settings = engine_settings(spec, pair, spec.parallelism.tensor or 1)
    problems = [
        *_size_problems(pair),
        *_length_problems(spec, pair),
        *_workload_problems(spec, pair),
        *_block_problems(pair),
        *_cache_dtype_problems(spec, pair),
        *pairing_problems(spec, pair, profile),
        *_spread_problems(pair, wish),
        *_tensor_problems(spec, pair, wish),
        *serving_problems(settings, profile),
        *speculation_problems(settings, profile),
        *feature_problems(settings, profile),
        *_problems_without_models(spec, profile),
    ]
    if problems:
        raise InvalidSpecError(problems)
    return Facts(spec, profile, pair, wish)


def check_without_models(spec: SpecDecodeDeploymentSpec) -> EngineProfile:
    """Check what can be checked while a model is not known yet; return the engine's profile.

    Raises
    ------
    InvalidSpecError
        With every problem found.
    """
    profile = _profile(spec)
    if problems := _problems_without_models(spec, profile):
        raise InvalidSpecError(problems)
    return profile


def _profile(spec: SpecDecodeDeploymentSpec) -> EngineProfile:
    try:
        return find_profile(spec.engine.version)
    except UnknownEngineVersionError as error:
        raise InvalidSpecError([error.problem]) from error


def _problems_without_models(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> list[Problem]:
    platform = Platform.CPU if spec.accelerator.type is AcceleratorType.CPU else Platform.GPU
    return [
        *image_problems(spec.engine.image, platform, profile),
        *extra_args_problems(spec.engine.extra_args, profile),
        *env_problems(spec.engine.env),
        *overlay_problems(spec.pod_template, _owned_resources(platform)),
        *schedule_problems(spec.captures),
    ]


def _head_method(spec: SpecDecodeDeploymentSpec, field: str) -> Method | None:
    """The method that says how the config.json of a head is read; None for what is a model of its own."""
    speculation = spec.speculation
    if speculation is None or field != DRAFT or speculation.method is Method.DRAFT_MODEL:
        return None
    return speculation.method


def _wish(spec: SpecDecodeDeploymentSpec, own: Mapping[str, ModelGeometry], known: KnownModels) -> Wish:
    """What the plan may decide: the objective, and the checkpoints of each model."""
    models = served_models(spec)
    named = {field: named_checkpoints(field, model, own[field], spec, known) for field, model in models.items()}
    free = {field: choices(model.quantization, own[field], named[field]) for field, model in models.items()}
    return Wish(
        objective=Objective(spec.objective.value),
        target=free[TARGET],
        draft=free.get(DRAFT, frozenset()),
        available=Available(named[TARGET], named.get(DRAFT, ())),
        spread=Spread(spec.parallelism.pipeline, spec.parallelism.data, spec.parallelism.expert),
    )


def _pair(
    spec: SpecDecodeDeploymentSpec, profile: EngineProfile, own: Mapping[str, ModelGeometry], available: Available
) -> Pair:
    """The pair at the precisions that are asked for; where the plan may choose, at the models' own."""
    speculation, draft = spec.speculation, own.get(DRAFT)
    target_precision = wanted_precision(TARGET, spec.target.quantization, own[TARGET], available.target)
    draft_precision = None
    if speculation and speculation.draft and draft:
        draft_precision = wanted_precision(DRAFT, speculation.draft.quantization, draft, available.draft)
    return Pair(
        target=own[TARGET],
        target_precision=target_precision,
        draft=draft,
        draft_precision=draft_precision,
        method=speculation.method.value if speculation else Method.NONE.value,
        num_speculative_tokens=(speculation.num_speculative_tokens or 0) if speculation else 0,
        limits=_limits(spec, own[TARGET], profile),
        other_draft_lengths=_other_draft_lengths(spec),
        samples_drafts=speculation is not None and speculation.draft_sampling is DraftSampling.PROBABILISTIC,
    )


def _other_draft_lengths(spec: SpecDecodeDeploymentSpec) -> frozenset[int]:
    speculation = spec.speculation
    if speculation is None:
        return frozenset()
    ranges = [
        part for part in speculation.num_speculative_tokens_by_batch_size if part.from_ <= spec.serving.max_num_seqs
    ]
    return frozenset(part.num_speculative_tokens for part in ranges) - {speculation.num_speculative_tokens or 0}


def _limits(spec: SpecDecodeDeploymentSpec, target: ModelGeometry, profile: EngineProfile) -> EngineLimits:
    serving = spec.serving
    platform = Platform.CPU if spec.accelerator.type is AcceleratorType.CPU else Platform.GPU
    return EngineLimits(
        max_model_len=serving.max_model_len or target.max_position_embeddings,
        max_num_seqs=serving.max_num_seqs,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        block_size=serving.block_size or _default_block_size(target, profile, platform),
        kv_cache_element_bytes=_KV_ELEMENT_BYTES[serving.kv_cache_dtype],
        memory_utilization_percent=serving.memory_utilization_percent,
        enforce_eager=serving.enforce_eager,
        min_concurrency=serving.min_concurrency,
        engine_version=profile.version,
        graph_mode=serving.cudagraph_mode.value if serving.cudagraph_mode else None,
        max_graph_tokens=serving.max_cudagraph_capture_size,
    )


def _default_block_size(target: ModelGeometry, profile: EngineProfile, platform: Platform) -> int:
    return BLOCK_TOKENS if target.has_sparse_attention else profile.default_block_sizes[platform]


def _block_problems(pair: Pair) -> list[Problem]:
    """vllm/v1/attention/backends/mla/indexer.py: its cache has blocks of 64 tokens, and so has what it belongs to."""
    given = pair.limits.block_size
    if not pair.target.has_sparse_attention or given % BLOCK_TOKENS == 0:
        return []
    message = f"{pair.target.name} chooses tokens by an index with blocks of {BLOCK_TOKENS}: remove it, or write that"
    return [Problem("spec.serving.blockSize", str(given), message)]


def _cache_dtype_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> list[Problem]:
    """vllm/v1/attention/backends/mla/flashmla_sparse.py takes fp8 and bfloat16, not fp8_e4m3, ModelOpt's."""
    target, wanted = pair.target, spec.serving.kv_cache_dtype
    own_fp8 = target.cache_element_bytes == FP8_ELEMENT_BYTES
    if not (target.has_sparse_attention and own_fp8 and wanted in (KvCacheDtype.AUTO, KvCacheDtype.FP8_E4M3)):
        return []
    message = f"{target.name} asks for fp8_e4m3, which vLLM refuses with sparse attention: write fp8 or bfloat16"
    return [Problem("spec.serving.kvCacheDtype", wanted.value, message)]


def _size_problems(pair: Pair) -> list[Problem]:
    """Geometries whose numbers each look possible, but not together: sums of them fit no 64-bit field."""
    models = [("spec.target.config", pair.target), ("spec.speculation.draft.config", pair.draft)]
    return [
        Problem(
            field, geometry.name, f"describes a model of {parameter_count(geometry):.1e} parameters: check its sizes"
        )
        for field, geometry in models
        if geometry is not None and parameter_count(geometry) > _MOST_PARAMETERS
    ]


def _owned_resources(platform: Platform) -> dict[str, str]:
    """Resources of the engine container that the plan decides, with the field for each."""
    if platform is Platform.GPU:
        return {GPU_RESOURCE: "spec.parallelism"}
    return {"memory": "spec.accelerator.memoryGiB", "cpu": "spec.accelerator.cpuCores"}


def _length_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> list[Problem]:
    wanted, longest = spec.serving.max_model_len, pair.target.max_position_embeddings
    if wanted is None or wanted <= longest:
        return []
    message = f"{pair.target.name} was made for at most {longest} tokens: use that or less"
    return [Problem("spec.serving.maxModelLen", str(wanted), message)]


def _workload_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> list[Problem]:
    workload = spec.workload
    if workload is None or workload.prompt_tokens is None or workload.output_tokens is None:
        return []
    usual, longest = workload.prompt_tokens + workload.output_tokens, pair.limits.max_model_len
    if usual <= longest:
        return []
    message = f"with workload.outputTokens makes {usual} tokens, more than maxModelLen {longest}: lower one of them"
    return [Problem("spec.workload.promptTokens", str(workload.prompt_tokens), message)]


def _spread_problems(pair: Pair, wish: Wish) -> list[Problem]:
    return [
        Problem(f"spec.{bad.field}", str(bad.value), bad.message) for bad in spread_problems(pair.target, wish.spread)
    ]


def _tensor_problems(spec: SpecDecodeDeploymentSpec, pair: Pair, wish: Wish) -> list[Problem]:
    """What no plan can mend: where it may choose, or takes another checkpoint, it finds out by itself."""
    tensor, available = spec.parallelism.tensor, wish.available
    if tensor is None:
        return []
    on_cpu = spec.accelerator.type is AcceleratorType.CPU
    if on_cpu:
        # Nothing is chosen there.
        pair = pair_at(pair, available, pair.target_precision, pair.draft_precision)
    geometries = []
    if on_cpu or (not wish.target and pair.target_precision not in available.target_precisions):
        geometries.append(("target", pair.target, pair.target_precision))
    named = pair.draft_precision in available.draft_precisions
    settled_draft = on_cpu or not (wish.draft or named)
    if pair.draft is not None and pair.draft_precision is not None and settled_draft:
        geometries.append(("draft", pair.draft, pair.draft_precision))
    version, problems = pair.limits.engine_version, []
    for role, geometry, precision in geometries:
        found = tensor_problems(geometry, tensor, precision, version, data=wish.spread.data, expert=wish.spread.expert)
        reasons = "; ".join(problem.message for problem in found)
        if reasons:
            problems.append(Problem("spec.parallelism.tensor", str(tensor), f"{role}: {reasons}"))
    return problems
