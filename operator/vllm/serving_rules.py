"""Check settings other than speculation against vLLM's rules: CUDA graphs, batches, caches, arguments.

`combination_problems` reports arguments in `spec.engine.extraArgs` that contradict the rest of the spec, so that
vLLM would not start or would reject requests.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from specdecode_operator.enums import (
    METHODS_WITH_HIDDEN_STATES,
    CudagraphMode,
    DraftSampling,
    Dtype,
    KvCacheDtype,
    Platform,
    RejectionSampling,
)
from specdecode_operator.problems import Problem
from specdecode_operator.untrusted import parse_json
from specdecode_operator.vllm.arguments import ARGUMENTS, COMPILATION_CONFIG
from specdecode_operator.vllm.extra_args_parser import Option, json_value, options
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile, find_profile
from specdecode_operator.vllm.settings import EngineSettings, SpeculationSettings

_MODE = "spec.serving.cudagraphMode"
_LARGEST = "spec.serving.maxCudagraphCaptureSize"

_FIELD_OF_KEY = {"cudagraph_mode": _MODE, "max_cudagraph_capture_size": _LARGEST}
"""Keys of ``--compilation-config`` that have a field, because the plan depends on them."""

_WHOLE_GRAPHS = (CudagraphMode.FULL, CudagraphMode.FULL_DECODE_ONLY, CudagraphMode.FULL_AND_PIECEWISE)
"""Modes with a graph of a whole step, which fixes the number of tokens per request (vLLM, has_full_cudagraphs)."""

_WITHOUT_PIECES = {
    CudagraphMode.PIECEWISE: CudagraphMode.NONE,
    CudagraphMode.FULL_AND_PIECEWISE: CudagraphMode.FULL_DECODE_ONLY,
}
"""Modes with pieces, and the mode that remains without compilation (CUDAGraphMode.without_piecewise)."""

_IN_PIECES = ("3", "VLLM_COMPILE")
"""The only compilation mode that splits a model into pieces (CompilationMode)."""

_SMALL_SIZES, _SIZES_APART = (1, 2, 4), 8
"""Smallest graphs in tokens, and the step up to 256 (vllm/config/vllm.py, _set_cudagraph_sizes).
"""


def graph_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the CUDA graph settings that the engine would reject, or silently change."""
    return [
        *_needless_problems(settings),
        *_size_problems(settings, profile),
        *_mode_problems(settings, profile),
        *_option_problems(settings, profile),
    ]


def _needless_problems(settings: EngineSettings) -> Iterator[Problem]:
    """Check settings of an engine without CUDA graphs (vllm/platforms/cpu.py; vllm/config/vllm.py, __post_init__)."""
    mode, largest = settings.serving.cudagraph_mode, settings.serving.max_cudagraph_capture_size
    without = "with serving.enforceEager; remove one of the two" if settings.serving.enforce_eager else ""
    without = "on the CPU; remove it" if settings.platform is Platform.CPU else without
    for field, value in {_MODE: mode, _LARGEST: largest}.items():
        if value is not None and without:
            yield Problem(field, str(value), f"there are no CUDA graphs {without}")
    if mode is CudagraphMode.NONE and largest is not None:
        message = "there are no CUDA graphs with serving.cudagraphMode NONE; remove one of the two"
        yield Problem(_LARGEST, str(largest), message)


def _size_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check the largest graph, of a multiple of K + 1 tokens on model runner V1.

    vllm/config/compilation.py, adjust_cudagraph_sizes_for_spec_decode. V2 accepts fewer, but then has no graph of a
    verification step.
    """
    largest, speculation = settings.serving.max_cudagraph_capture_size, settings.speculation
    in_pieces = settings.serving.cudagraph_mode not in (None, *_WHOLE_GRAPHS) or settings.serving.enforce_eager
    if largest is None or speculation is None or in_pieces or settings.platform is Platform.CPU:
        return
    tokens = speculation.num_speculative_tokens + 1
    needed = next((size for size in _SMALL_SIZES if size >= tokens), -(-tokens // _SIZES_APART) * _SIZES_APART)
    # With drafts of varying length, only pieces remain.
    if largest < needed and not speculation.schedule and runs_on_v1(settings, profile):
        message = f"must be at least {needed}, the smallest size for the {tokens} tokens that one request has verified"
        yield Problem(_LARGEST, str(largest), message)


def _mode_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    mode, speculation = settings.serving.cudagraph_mode, settings.speculation
    # vllm/config/vllm.py, _maybe_override_dynamic_sd_cudagraph_mode: V1 changes to PIECEWISE and only logs it.
    if speculation is not None and speculation.schedule and mode in _WHOLE_GRAPHS and runs_on_v1(settings, profile):
        message = (
            f"with numSpeculativeTokensByBatchSize and method {speculation.method} vLLM {profile.version} captures in"
            " pieces only; write PIECEWISE, or remove it"
        )
        yield Problem(_MODE, str(mode), message)
    # vllm/config/vllm.py, _normalize_piecewise_cudagraph_mode: compilation creates the pieces.
    given = {(option.flag.name, option.path): option.value.upper() for option in options(settings.extra_args, profile)}
    level = given.get(("--optimization-level", ""))
    compiled = given.get((COMPILATION_CONFIG, "mode"), "NONE" if level == "0" else "VLLM_COMPILE")
    if mode in _WITHOUT_PIECES and compiled not in _IN_PIECES:
        message = (
            f"extraArgs turn off the compilation that makes the pieces; write {_WITHOUT_PIECES[mode]}, or leave it on"
        )
        yield Problem(_MODE, str(mode), message)


def _option_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check whole JSON values that contain keys with a field, and spellings that override one.

    vllm/utils/argparse_utils.py merges dotted paths by the spelling of the flag, and the last spelling wins:
    ``-cc.mode=3`` would override the keys under the long name.
    """
    for option in options(settings.extra_args, profile):
        if option.flag.name != COMPILATION_CONFIG:
            continue
        place = f"spec.engine.extraArgs[{option.index}]"
        fields = [field for key, field in _FIELD_OF_KEY.items() if not option.path and f'"{key}"' in option.value]
        if fields:
            yield Problem(
                place, option.shown, f"contains keys that are not allowed in extraArgs; use {' and '.join(fields)}"
            )
        elif settings.serving.cudagraph_mode is not None and (option.spelled != COMPILATION_CONFIG or not option.path):
            message = (
                f"vLLM keeps only one of this and serving.cudagraphMode; write {COMPILATION_CONFIG}.KEY VALUE for each"
                " key"
            )
            yield Problem(place, option.shown, message)


_MICROBATCH_BACKENDS: Final = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
"""All-to-all backends that support microbatching (vllm/config/vllm.py, __post_init__)."""

_GENERATES: Final = ("auto", "generate")

_NO_PROBABILITY: Final = 1e-5
"""Value below which vLLM treats a probability as 0 (vllm/sampling_params.py, _SAMPLING_EPS)."""

_MARKS_DRAFTS: Final = "dual_key_gumbel"
"""Algorithm that also marks drafted tokens (vllm/config/watermarking.py, supports_speculative_decoding)."""


def combination_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the arguments in extraArgs that conflict with a field, or with another argument."""
    given = {option.flag.name: option for option in options(settings.extra_args, profile) if not option.path}
    # The last option wins; a negated flag counts as absent.
    on = {name: option for name, option in given.items() if not option.negated}
    speculation = settings.speculation
    return [
        *_size_and_expert_problems(settings, profile, on),
        *_limit_problems(settings, given),
        *_runner_problems(settings, profile, on),
        *_serving_problems(settings, on),
        *([] if speculation is None else _drafting_problems(settings, speculation, profile, on)),
    ]


def _size_and_expert_problems(
    settings: EngineSettings, profile: EngineProfile, on: dict[str, Option]
) -> Iterator[Problem]:
    # vllm/config/vllm.py, _set_cudagraph_sizes: the largest size must equal the largest of the listed sizes.
    largest = settings.serving.max_cudagraph_capture_size
    for option in options(settings.extra_args, profile) if largest is not None else ():
        named = (option.flag.name, option.path)
        if named in {("--cudagraph-capture-sizes", ""), (COMPILATION_CONFIG, "cudagraph_capture_sizes")}:
            yield _problem(option, "conflicts with serving.maxCudagraphCaptureSize; remove one of the two")
    # vllm/config/parallel.py: enable_expert_parallel must be True to use EPLB.
    balanced = on.get("--enable-eplb")
    if balanced is not None and not settings.expert_parallel:
        yield _problem(balanced, "moves whole experts between GPUs; set parallelism.expert, or remove it")
    elif balanced is not None and settings.tensor_parallel_size * settings.data_parallel_size == 1:
        message = "moves experts between the GPUs of a stage; set parallelism.tensor or data above 1, or remove it"
        yield _problem(balanced, message)


def _limit_problems(settings: EngineSettings, given: dict[str, Option]) -> Iterator[Problem]:
    """Check limits that arguments share with fields.

    vllm/config/scheduler.py, verify_max_model_len; vllm/config/lora.py, _validate_lora_config.
    """
    on = {name: option for name, option in given.items() if not option.negated}
    limits = {
        "--max-num-active-seqs": ("serving.maxNumSeqs", settings.max_num_seqs),
        "--long-prefill-token-threshold": ("serving.maxModelLen", settings.max_model_len),
    }
    for name, (field, most) in limits.items():
        if (value := _number(on.get(name))) is not None and value > most:
            yield _problem(on[name], f"exceeds {field}, {most}; lower it, or raise {field}")
    adapters, on_host = _number(on.get("--max-loras")) or 1, _number(on.get("--max-cpu-loras"))
    if "--enable-lora" in on and on_host is not None and on_host < adapters:
        yield _problem(
            on["--max-cpu-loras"], f"must be at least --max-loras, {adapters}; raise it, or lower --max-loras"
        )
    # vllm/config/observability.py, _validate_tracing_config: detailed traces need an endpoint.
    option = on.get("--collect-detailed-traces")
    if option is not None and "--otlp-traces-endpoint" not in on:
        yield _problem(option, "needs --otlp-traces-endpoint URL, where traces go; add it, or remove this")
    # vllm/config/scheduler.py, verify_max_model_len: without chunks a whole prompt must fit into one step.
    option = given.get("--enable-chunked-prefill")
    if option is not None and option.negated and settings.max_num_batched_tokens < settings.max_model_len:
        message = (
            f"without chunked prefill this must be at least serving.maxModelLen, {settings.max_model_len}; raise it, "
            f"or remove {option.name}"
        )
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)
    # vllm/config/vllm.py, __post_init__: microbatching only supports some all-to-all backends.
    option, backend = on.get("--enable-dbo"), on.get("--all2all-backend")
    if option is not None and (backend is None or backend.value not in _MICROBATCH_BACKENDS):
        known = ", ".join(_MICROBATCH_BACKENDS)
        yield _problem(option, f"needs --all2all-backend with one of {known}; add it, or remove this")


def _runner_problems(settings: EngineSettings, profile: EngineProfile, on: dict[str, Option]) -> Iterator[Problem]:
    on_v1, tensor = runs_on_v1(settings, profile), settings.tensor_parallel_size
    # vllm/config/vllm.py, _validate_batch_sharded_sampling, and features that model runner V1 lacks.
    if (option := on.get("--enable-batch-sharded-sampling")) is not None:
        if tensor == 1:
            message = "splits sampling over tensor-parallel GPUs; set parallelism.tensor above 1, or remove it"
            yield _problem(option, message)
        elif settings.max_num_seqs < tensor:
            yield _problem(option, f"needs serving.maxNumSeqs of {tensor} or more, one request per GPU; raise it")
        elif on_v1:
            yield _problem(option, "needs vLLM's model runner V2, and V1 serves this; remove it")
    # vllm/config/vllm.py, _verify_trace_replay_config: trace replay requires model runner V2.
    if (option := on.get("--enable-trace-replay")) is not None and on_v1:
        yield _problem(option, "needs vLLM's model runner V2, and V1 serves this; remove it")
    # vllm/config/vllm.py, __post_init__: pipeline parallelism with async scheduling, on model runner V1.
    waits = settings.pipeline_parallel_size > 1 and not profile.asynchronous_over_stages_on_v1
    if (option := on.get("--async-scheduling")) is not None and waits and on_v1:
        yield _problem(option, "needs vLLM's model runner V2 over pipeline stages, and V1 serves this; remove it")


def _serving_problems(settings: EngineSettings, on: dict[str, Option]) -> Iterator[Problem]:
    # vllm/config/model.py: a pooling model does not serve completions.
    option = on.get("--runner")
    if option is not None and option.value not in _GENERATES:
        yield _problem(option, "turns off generation, which this object requires; remove it")
    # vllm/entrypoints/launchers/cli_args.py, validate_parsed_serve_args: the flag needs a parser.
    option = on.get("--enable-auto-tool-choice")
    if option is not None and "--tool-call-parser" not in on:
        yield _problem(
            option, "needs --tool-call-parser NAME, the format of the model's tool calls; add it, or remove this"
        )
    # vllm/config/vllm.py: per_request_spec_decode_metrics requires speculation, unless its value is none.
    option = on.get("--per-request-spec-decode-metrics")
    if settings.speculation is None and option is not None and option.value != "none":
        yield _problem(option, "there is no speculation to measure; remove it, or set spec.speculation")


def _drafting_problems(
    settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile, on: dict[str, Option]
) -> Iterator[Problem]:
    """Check arguments that conflict with speculation."""
    # vllm/engine/arg_utils.py create_engine_config: adapters need slots for every request's drafted tokens.
    needed = settings.max_num_seqs * (speculation.num_speculative_tokens + 1)
    has_adapters = "--enable-lora" in on or settings.adapters is not None
    if has_adapters and settings.max_num_batched_tokens < needed:
        message = (
            f"with adapters vLLM needs maxNumSeqs x (K + 1) = {needed} or more; raise it, or lower maxNumSeqs or"
            " numSpeculativeTokens"
        )
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)
    # vllm/config/vllm.py: such a prefill leaves incomplete hidden states for the draft.
    option = on.get("--kv-sharing-fast-prefill")
    if option is not None and speculation.method in METHODS_WITH_HIDDEN_STATES:
        yield _problem(option, f"method {speculation.method} reads hidden states that it skips; remove it")
    # vllm/v1/sample/logits_processor/__init__.py: model runner V1 rejects them with speculation.
    option = on.get("--logits-processors")
    if option is not None and runs_on_v1(settings, profile):
        message = f"vLLM {profile.version} does not support custom logits processors with method {speculation.method}"
        yield _problem(option, f"{message}; remove it")
    # vllm/sampling_params.py _validate_spec_decode: with a server-wide min_p vLLM would reject each request that sets
    # none.
    for option in options(settings.extra_args, profile):
        if option.flag.name == "--override-generation-config" and _least_probability(option) > _NO_PROBABILITY:
            message = "vLLM rejects requests with min_p during speculation, so all would fail; leave min_p out"
            yield _problem(option, message)
    marks = [option for option in options(settings.extra_args, profile) if option.flag.name == "--watermark-config"]
    for message in _unmarked(marks, speculation, profile):
        yield _problem(marks[-1], message)


def _unmarked(given: list[Option], speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[str]:
    """Yield what would leave tokens unmarked (vllm/config/vllm.py, _check_supports_watermarking)."""
    config, method = json_value(given), speculation.method
    if not given or config is None:
        return
    if method not in profile.watermarked_methods or speculation.drafts_in_parallel:
        drafts = f"method {method}" if method not in profile.watermarked_methods else speculation.draft_model
        known = ", ".join(sorted(profile.watermarked_methods))
        yield f"vLLM {profile.version} marks no tokens of {drafts}; remove it, or use one of {known}, token by token"
        return
    if speculation.spec.draft_sampling is not DraftSampling.PROBABILISTIC:
        yield "marks what a draft samples: set speculation.draftSampling to probabilistic, or remove this"
    checks = speculation.spec.rejection_sampling
    if checks not in (None, RejectionSampling.STANDARD):
        yield f"conflicts with speculation.rejectionSampling {checks}; remove one of the two"
    if config.get("algorithm") != _MARKS_DRAFTS and config.get("allow_target_only_watermarking") is not True:
        yield (
            f"does not mark drafted tokens with this algorithm; write algorithm {_MARKS_DRAFTS}, or"
            " allow_target_only_watermarking true if they may go unmarked"
        )


def _least_probability(option: Option) -> float:
    value: Any = None
    with suppress(ValueError):
        value = parse_json(option.value)
    config = {option.path: value} if option.path else value
    found = config.get("min_p") if isinstance(config, dict) else None
    return found if isinstance(found, int | float) else 0


def _number(option: Option | None) -> int | None:
    return int(option.value) if option is not None and option.value.isdecimal() else None


def _problem(option: Option, message: str) -> Problem:
    return Problem(f"spec.engine.extraArgs[{option.index}]", option.shown, message)


def serving_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the settings of model, batch, KV cache and CUDA graphs that the engine would reject or change."""
    return [
        *_basic_problems(settings, profile),
        *_version_problems(settings, profile),
        *graph_problems(settings, profile),
        *combination_problems(settings, profile),
    ]


def _version_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check that the version has the flag of each field that is set."""
    for argument in ARGUMENTS:
        flag = argument.flag.partition(".")[0]
        if argument.field is None or flag in profile.flags:
            continue
        if (values := argument.values(settings, profile)) is not None:
            yield Problem(argument.field, " ".join(values) or "true", profile.lacks(profile.later_flags.get(flag)))


def image_problems(image: str | None, platform: Platform, profile: EngineProfile) -> list[Problem]:
    """Return a problem when no image is given and the profile has none for the platform."""
    if image is not None or platform in profile.images:
        return []
    message = f"no {platform.upper()} image of vLLM {profile.version} is known; set it"
    newest = KNOWN_VERSIONS[-1]
    if not profile.tested and platform in find_profile(newest).images:
        message += f', or write spec.engine.version: "{newest}", the newest that this operator knows'
    return [Problem("spec.engine.image", "absent", message)]


def _basic_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    named = [
        ("spec.target.model", settings.model),
        *((f"spec.serving.servedModelNames[{i}]", name) for i, name in enumerate(settings.served_model_names)),
    ]
    for field, value in named:
        if value.startswith("-"):
            yield Problem(field, value, "must not start with a dash; vLLM would parse it as a flag")
    # vllm/config/scheduler.py: max_num_batched_tokens is at least max_num_seqs.
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        message = f"must be at least serving.maxNumSeqs, {settings.max_num_seqs}: one token per running request"
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)
    # The attention backends have no kernel for other block sizes, and fail only after loading.
    multiple, usual = profile.block_size_multiples[settings.platform], profile.default_block_sizes[settings.platform]
    if settings.block_size % multiple:
        message = f"must be a multiple of {multiple} for accelerator type {settings.platform.upper()}, such as {usual}"
        yield Problem("spec.serving.blockSize", str(settings.block_size), message)
    # vllm/config/vllm.py, _reject_mismatched_float_kv_cache.
    known = settings.dtype in (Dtype.FLOAT16, Dtype.FLOAT32)
    if profile.cache_follows_dtype and known and settings.serving.kv_cache_dtype == KvCacheDtype.BFLOAT16:
        message = f"vLLM {profile.version} takes it with serving.dtype bfloat16 only, which is {settings.dtype} here"
        yield Problem("spec.serving.kvCacheDtype", settings.serving.kv_cache_dtype, f"{message}: write auto")
