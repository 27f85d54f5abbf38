"""What of ``spec.engine.extraArgs`` contradicts the rest of the spec: vLLM refuses it, or requests because of it."""

from collections.abc import Iterator
from typing import Final

from specdecode_operator.api.values import DraftSampling, RejectionSampling
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.engine.arguments import COMPILATION_CONFIG
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import Option, json_value, options
from specdecode_operator.engine.rules.runners import runs_on_v1
from specdecode_operator.engine.settings import EngineSettings, SpeculationSettings
from specdecode_operator.problems import Problem
from specdecode_operator.vocabulary import METHODS_WITH_HIDDEN_STATES

_MICROBATCH_BACKENDS: Final = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
"""All-to-all backends with which vLLM splits a batch in two (vllm/config/vllm.py, __post_init__)."""

_GENERATES: Final = ("auto", "generate")

_NO_PROBABILITY: Final = 1e-5
"""What passes for none (vllm/sampling_params.py, _SAMPLING_EPS)."""

_MARKS_DRAFTS: Final = "dual_key_gumbel"
"""Algorithm that marks drafted tokens, too (vllm/config/watermarking.py, supports_speculative_decoding)."""


def combination_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the further arguments that do not go with a field, or with another argument."""
    given = {option.flag.name: option for option in options(settings.extra_args, profile) if not option.path}
    # The last counts; a negated flag is as one that is not there.
    on = {name: option for name, option in given.items() if not option.negated}
    speculation = settings.speculation
    return [
        *_size_problems(settings, profile),
        *_expert_problems(settings, on),
        *_limit_problems(settings, on),
        *_trace_problems(on),
        *_prefill_problems(settings, given),
        *_microbatch_problems(on),
        *_shard_problems(settings, profile, on),
        *_replay_problems(settings, profile, on),
        *_stage_problems(settings, profile, on),
        *_runner_problems(on),
        *_tool_problems(on),
        *(_metrics_problems(on) if speculation is None else _drafting_problems(settings, speculation, profile, on)),
    ]


def _size_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/config/vllm.py, _set_cudagraph_sizes: a largest size must be the largest of the sizes that are named."""
    if settings.max_cudagraph_capture_size is None:
        return
    for option in options(settings.extra_args, profile):
        named = (option.flag.name, option.path)
        if named in {("--cudagraph-capture-sizes", ""), (COMPILATION_CONFIG, "cudagraph_capture_sizes")}:
            yield _problem(option, "names the sizes beside serving.maxCudagraphCaptureSize; remove one of the two")


def _expert_problems(settings: EngineSettings, on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/parallel.py: enable_expert_parallel must be True to use EPLB."""
    option = on.get("--enable-eplb")
    if option is not None and not settings.expert_parallel:
        yield _problem(option, "moves whole experts between GPUs; set parallelism.expert, or remove it")
    elif option is not None and settings.tensor_parallel_size * settings.data_parallel_size == 1:
        message = "moves experts between the GPUs of a stage; set parallelism.tensor or data above 1, or remove it"
        yield _problem(option, message)


def _limit_problems(settings: EngineSettings, on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/scheduler.py, verify_max_model_len; vllm/config/lora.py, _validate_lora_config."""
    limits = {
        "--max-num-active-seqs": ("serving.maxNumSeqs", settings.max_num_seqs),
        "--long-prefill-token-threshold": ("serving.maxModelLen", settings.max_model_len),
    }
    for name, (field, most) in limits.items():
        if (given := _number(on.get(name))) is not None and given > most:
            yield _problem(on[name], f"must not be above {field}, {most}; lower it, or raise that")
    adapters, on_host = _number(on.get("--max-loras")) or 1, _number(on.get("--max-cpu-loras"))
    if "--enable-lora" in on and on_host is not None and on_host < adapters:
        yield _problem(on["--max-cpu-loras"], f"must be at least --max-loras, {adapters}; raise it, or lower that")


def _trace_problems(on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/observability.py, _validate_tracing_config: detailed traces go to an endpoint."""
    option = on.get("--collect-detailed-traces")
    if option is not None and "--otlp-traces-endpoint" not in on:
        yield _problem(option, "needs --otlp-traces-endpoint URL, where traces go; add it, or remove this")


def _prefill_problems(settings: EngineSettings, given: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/scheduler.py, verify_max_model_len: without chunks a prompt goes through one step."""
    option = given.get("--enable-chunked-prefill")
    if option is not None and option.negated and settings.max_num_batched_tokens < settings.max_model_len:
        message = (
            f"without chunks of prompts this must be at least serving.maxModelLen, {settings.max_model_len}; raise it, "
            f"or remove {option.name}"
        )
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)


def _microbatch_problems(on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/vllm.py, __post_init__: microbatching only supports some all-to-all backends."""
    option, backend = on.get("--enable-dbo"), on.get("--all2all-backend")
    if option is not None and (backend is None or backend.value not in _MICROBATCH_BACKENDS):
        known = ", ".join(_MICROBATCH_BACKENDS)
        yield _problem(option, f"needs --all2all-backend with one of {known}; add it, or remove this")


def _shard_problems(settings: EngineSettings, profile: EngineProfile, on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/vllm.py, _validate_batch_sharded_sampling, and what model runner V1 does not have."""
    option, tensor = on.get("--enable-batch-sharded-sampling"), settings.tensor_parallel_size
    if option is None:
        return
    if tensor == 1:
        yield _problem(
            option, "shares sampling among tensor-parallel GPUs; set parallelism.tensor above 1, or remove it"
        )
    elif settings.max_num_seqs < tensor:
        yield _problem(option, f"needs serving.maxNumSeqs of {tensor} or more, a request for each GPU; raise it")
    elif runs_on_v1(settings, profile):
        yield _problem(option, "needs vLLM's model runner V2, and V1 serves this; remove it")


def _replay_problems(settings: EngineSettings, profile: EngineProfile, on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/vllm.py, _verify_trace_replay_config: trace replay requires model runner V2."""
    option = on.get("--enable-trace-replay")
    if option is not None and runs_on_v1(settings, profile):
        yield _problem(option, "needs vLLM's model runner V2, and V1 serves this; remove it")


def _stage_problems(settings: EngineSettings, profile: EngineProfile, on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/vllm.py, __post_init__: pipeline parallelism with async scheduling, on model runner V1."""
    option = on.get("--async-scheduling")
    waits = settings.pipeline_parallel_size > 1 and not profile.asynchronous_over_stages_on_v1
    if option is not None and waits and runs_on_v1(settings, profile):
        yield _problem(option, "needs vLLM's model runner V2 over pipeline stages, and V1 serves this; remove it")


def _runner_problems(on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/model.py: a pooling model answers no completion."""
    option = on.get("--runner")
    if option is not None and option.value not in _GENERATES:
        yield _problem(option, "turns generation off, which all else here is about; remove it")


def _tool_problems(on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/entrypoints/launchers/cli_args.py, validate_parsed_serve_args: it takes a parser."""
    option = on.get("--enable-auto-tool-choice")
    if option is not None and "--tool-call-parser" not in on:
        yield _problem(option, "needs --tool-call-parser NAME, the form of the model's calls; add it, or remove this")


def _metrics_problems(on: dict[str, Option]) -> Iterator[Problem]:
    """vllm/config/vllm.py: per_request_spec_decode_metrics requires speculation, but for the value none."""
    option = on.get("--per-request-spec-decode-metrics")
    if option is not None and option.value != "none":
        yield _problem(option, "there is no speculation to measure; remove it, or set spec.speculation")


def _drafting_problems(
    settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile, on: dict[str, Option]
) -> Iterator[Problem]:
    """What does not go with speculation."""
    # vllm/engine/arg_utils.py create_engine_config: adapters want room for every request's drafted tokens.
    needed = settings.max_num_seqs * (speculation.num_speculative_tokens + 1)
    if "--enable-lora" in on and settings.max_num_batched_tokens < needed:
        message = (
            f"with adapters vLLM wants maxNumSeqs x (K + 1) = {needed} or more; raise it, or lower maxNumSeqs or"
            " numSpeculativeTokens"
        )
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)
    # vllm/config/vllm.py: such a prefill leaves no right hidden states for a draft to read.
    option = on.get("--kv-sharing-fast-prefill")
    if option is not None and speculation.method in METHODS_WITH_HIDDEN_STATES:
        yield _problem(option, f"method {speculation.method} reads hidden states that it leaves out; remove it")
    # vllm/v1/sample/logits_processor/__init__.py: model runner V1 refuses them with speculation.
    option = on.get("--logits-processors")
    if option is not None and runs_on_v1(settings, profile):
        message = f"vLLM {profile.version} has no logits processors of one's own with method {speculation.method}"
        yield _problem(option, f"{message}; remove it")
    # vllm/sampling_params.py _validate_spec_decode: every request without a min_p of its own would be refused.
    for option in options(settings.extra_args, profile):
        if option.flag.name == "--override-generation-config" and _least_probability(option) > _NO_PROBABILITY:
            message = "vLLM refuses requests with min_p while it speculates, so all would fail; leave min_p out"
            yield _problem(option, message)
    marks = [option for option in options(settings.extra_args, profile) if option.flag.name == "--watermark-config"]
    for message in _unmarked(marks, speculation, profile):
        yield _problem(marks[-1], message)


def _unmarked(given: list[Option], speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[str]:
    """vllm/config/vllm.py, _check_supports_watermarking: what would leave tokens without a mark."""
    config, method = json_value(given), speculation.method
    if not given or config is None:
        return
    if method not in profile.watermarked_methods or speculation.drafts_in_parallel:
        drafts = f"method {method}" if method not in profile.watermarked_methods else speculation.draft_model
        known = ", ".join(sorted(profile.watermarked_methods))
        yield f"vLLM {profile.version} marks no tokens of {drafts}; remove it, or use one of {known}, token by token"
        return
    if speculation.draft_sampling is not DraftSampling.PROBABILISTIC:
        yield "marks what a draft samples: set speculation.draftSampling to probabilistic, or remove this"
    checks = speculation.rejection_sampling
    if checks not in (None, RejectionSampling.STANDARD):
        yield f"does not go with speculation.rejectionSampling {checks}; remove one of the two"
    if config.get("algorithm") != _MARKS_DRAFTS and config.get("allow_target_only_watermarking") is not True:
        yield (
            f"marks no drafted tokens with this algorithm; write algorithm {_MARKS_DRAFTS}, or"
            " allow_target_only_watermarking true if they may go unmarked"
        )


def _least_probability(option: Option) -> float:
    """Return the min_p that an option sets; 0 where it sets none, or what vLLM's parser will refuse."""
    try:
        value = parse_json(option.value)
    except ValueError:
        return 0
    config = {option.path: value} if option.path else value
    found = config.get("min_p") if isinstance(config, dict) else None
    return found if isinstance(found, int | float) else 0


def _number(option: Option | None) -> int | None:
    """Return the number that an option gives; None where it gives none, or what vLLM's parser will refuse."""
    return int(option.value) if option is not None and option.value.isdecimal() else None


def _problem(option: Option, message: str) -> Problem:
    return Problem(f"spec.engine.extraArgs[{option.index}]", option.shown, message)
