"""Answers questions about the installed vLLM; runs in the engine's Python.

Each line of standard input is a question, a JSON list with the name of a
function of `QUESTIONS` and its arguments. Each line written to the file
descriptor that the first argument names (standard output is full of log
lines) is its answer: ``{"value": …}`` or ``{"error": …}``.
Imported after fake_h100.py it speaks for an engine on H100s, else for the CPU
build that it is. vLLM is imported once: it takes 10 to 30 seconds, a question
milliseconds.
"""

import contextlib
import copy
import io
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine_copies
import missing_libraries
import torch
from dump_engine_flags import cli_args, flags, serve_parser, speculative_keys
from engine_attention import adaptive_attention
from engine_later import CHECKS
from prometheus_client import REGISTRY, generate_latest
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.utils import select_common_block_size

# Models that see import it from 0.33 on, and the CPU build comes without.
sys.meta_path.append(missing_libraries.MissingPackages("torchvision"))
PARSER = serve_parser()


def parse(argv: list[str]) -> Any:
    """Return the options of one command line."""
    options = PARSER.parse_args(argv)
    cli_args().validate_parsed_serve_args(options)
    return options


def options_of(argv: list[str]) -> dict[str, Any]:
    """Return the options as JSON."""
    options: dict[str, Any] = json.loads(json.dumps(vars(parse(argv)), default=repr))
    return options


def engine_config(argv: list[str]) -> Any:
    """Return the engine's whole configuration, built as at start."""
    # vLLM writes into defaults that the parser keeps, such as that of --aux-output-config.
    options = copy.deepcopy(parse(argv))
    options.model = options.model_tag  # as vllm/entrypoints/cli/serve.py does
    engine_args = AsyncEngineArgs.from_cli_args(options)
    # vllm/entrypoints/cli/serve.py run_headless says so too.
    return engine_args.create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=bool(options.headless)
    )


def start(argv: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what the engine's configuration says, with further environment variables."""
    with mock.patch.dict(os.environ, environment or {}):
        config = engine_config(argv)
    speculative, cache, scheduler = config.speculative_config, config.cache_config, config.scheduler_config
    return {
        "method": speculative.method if speculative else None,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else None,
        "num_speculative_tokens_per_batch_size": (
            speculative.num_speculative_tokens_per_batch_size if speculative else None
        ),
        "extra_draft_slots": speculative.max_num_new_slots_for_drafting if speculative else None,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": scheduler.async_scheduling,
        "--dtype": str(config.model_config.dtype).removeprefix("torch."),
        "--quantization": config.model_config.quantization,
        "--tensor-parallel-size": config.parallel_config.tensor_parallel_size,
        "--pipeline-parallel-size": config.parallel_config.pipeline_parallel_size,
        "--data-parallel-size": config.parallel_config.data_parallel_size,
        "--enable-expert-parallel": config.parallel_config.enable_expert_parallel,
        "--distributed-executor-backend": config.parallel_config.distributed_executor_backend,
        "--max-model-len": config.model_config.max_model_len,
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--kv-cache-dtype": cache.cache_dtype,
        "--block-size": cache.block_size,
        "--gpu-memory-utilization": cache.gpu_memory_utilization,
        "--enforce-eager": config.model_config.enforce_eager,
        "--shutdown-timeout": config.shutdown_timeout,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "--max-cudagraph-capture-size": config.compilation_config.max_cudagraph_capture_size,
        "rejection_sample_method": speculative.rejection_sample_method if speculative else None,
        "entropy": [getattr(speculative, f"fly_{name}", None) for name in ("window_size", "entropy_threshold")],
        "draft_sample_method": speculative.draft_sample_method if speculative else None,
        "enable_adaptive_verification": speculative.enable_adaptive_verification if speculative else None,
        "use_heterogeneous_vocab": speculative.use_heterogeneous_vocab if speculative else None,
        "parallel_drafting": speculative.parallel_drafting if speculative else None,
        "speculative_config": {
            name: value
            for name, value in (vars(speculative) if speculative else {}).items()
            if value is None or isinstance(value, (str, int, float, list))
        },
    }


def after_start(argv: list[str], check: str) -> None:
    """Fail where the engine does once its configuration stands: see engine_later.py."""
    CHECKS[check](engine_config(argv))


def adapting(argv: list[str]) -> dict[str, list[str]]:
    """Return with which attention an engine verifies by what it costs: see engine_attention.py."""
    return adaptive_attention(engine_config(argv))


def place(argv: list[str]) -> dict[str, Any]:
    """Return which ranks an engine on several nodes has on this one, and whether it meets the others for them.

    ``first_copy`` is the number of the first data-parallel copy here, ``copies`` how many there are; ``ranks`` those
    of one copy here, beginning with ``first_rank``. Copies of dense models are engines of their own, so that
    ``meets`` is of how many nodes the processes of one copy are.
    """
    options, parallel = parse(argv), engine_config(argv).parallel_config
    found = {
        "serves": not options.headless,
        "first_copy": parallel.data_parallel_rank,
        "copies": parallel.data_parallel_size_local,
        "first_rank": parallel.node_rank_within_dp * parallel.local_world_size,
        "ranks": parallel.local_world_size,
        "backend": parallel.distributed_executor_backend,
        "leader": parallel.master_addr,
        "copies_meet_at": parallel.data_parallel_master_ip,
        "timeout_s": parallel.distributed_timeout_seconds,
    }
    if not parallel.is_moe_model:
        parallel.reconfigure_for_independent_dp_rank()
    return found | {"meets": parallel.nnodes}


def metrics(argv: list[str]) -> str:
    """Return what /metrics says right after the start of such an engine."""
    config = engine_config(argv)
    config.cache_config.num_gpu_blocks = 100
    config.cache_config.kv_cache_size_tokens = 1600
    config.cache_config.kv_cache_max_concurrency = 2.5
    for collector in list(REGISTRY._collector_to_names):
        REGISTRY.unregister(collector)
    PrometheusStatLogger(config, [0]).log_engine_initialized()
    return generate_latest().decode()


def schedule(ranges: list[list[int]], max_num_seqs: int, num_speculative_tokens: int) -> list[int]:
    """Return K for 1, 2, … running requests, as the scheduler expands it."""
    lookup: list[int] = build_dynamic_sd_schedule_lookup(ranges, max_num_seqs, num_speculative_tokens)[1:]
    return lookup


def default_cpu_block_size(argv: list[str]) -> int:
    """Return the block size on the CPU where none is given: from 0.33 on, workers choose it once layers are there.

    Up to 0.30 a platform knows no list of backends, and asks nobody for a model without states.
    """
    config = engine_config(argv)
    backends = [CPUAttentionBackend]
    with mock.patch.object(type(current_platform), "_find_non_ssm_backends", return_value=backends, create=True):
        current_platform.update_block_size_for_backend(config)
    return int(config.cache_config.block_size)


def cpu_block_size(size: int) -> int:
    """Return the block size that the CPU's attention computes with."""
    return int(select_common_block_size(size, [CPUAttentionBackend]))


def target_traits(architectures: list[str]) -> dict[str, dict[str, bool]]:
    """Return what the classes of architectures can do; those that lack a library here are left out."""
    found = {}
    for name in architectures:
        known = ModelRegistry.models.get(name)
        with contextlib.suppress(ImportError):
            if known is not None and (model := known.load_model_cls()):
                inner = [
                    each
                    for each in vars(sys.modules[model.__mro__[0].__module__]).values()
                    if getattr(each, "supports_aux_hidden_states_over_pp", False)
                ]
                found[name] = {
                    "hidden_states": bool(getattr(model, "supports_eagle3", False)),
                    "stages": bool(getattr(model, "supports_pp", False)),
                    "hidden_states_over_stages": bool(inner),
                }
    return found


def draft_classes() -> dict[str, str]:
    """Return the class of each draft that vLLM registers, modules of a target's own included."""
    return {name: kind for name, (_, kind) in registry._SPECULATIVE_DECODING_MODELS.items()}


def temperatures_of_tokens(temperatures: list[float], counts: list[int]) -> list[float]:
    """Return the temperature of each token to verify on a CPU without Triton, by request and number of tokens.

    The kernel itself, which only takes int64, is played: versions beside the served one come without theirs.
    """

    def expand(output: Any, values: Any, ends: Any, replace_from: int, replace_to: int) -> None:
        assert {each.dtype for each in (output, values, ends)} == {torch.int64}
        start = 0
        for value, end in zip(values.tolist(), ends.tolist(), strict=True):
            output[start:end] = replace_to if value == replace_from else value
            start = end

    output = torch.full((sum(counts),), -1.0)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    with mock.patch.object(torch.ops, "_C", SimpleNamespace(expand_kernel_impl=expand)):
        cpu_triton_utils._expand_kernel_impl(output, torch.tensor(temperatures), ends, 0, 1)
    return [round(each, 3) for each in output.tolist()]


def variables() -> list[str]:
    """Return the environment variables that vLLM reads."""
    return sorted(envs.environment_variables)


QUESTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        flags,
        speculative_keys,
        options_of,
        start,
        after_start,
        adapting,
        place,
        metrics,
        schedule,
        default_cpu_block_size,
        cpu_block_size,
        target_traits,
        draft_classes,
        temperatures_of_tokens,
        variables,
        engine_copies.begin,
        engine_copies.ended,
    )
}


def answer(question: list[Any]) -> dict[str, Any]:
    """Return what a question gives, or the error that it ends in."""
    name, *arguments = question
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            return {"value": QUESTIONS[name](*arguments)}
    except SystemExit as stop:
        return {"error": f"exit {stop.code}: {complaints.getvalue()[-400:]}"}
    except Exception as error:  # noqa: BLE001 (any error is the answer)
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer until nobody asks."""
    registry._run_in_subprocess = lambda inspect: inspect()  # or each architecture costs a process, and 6 s
    engine_copies.WITH_PARENT_ONLY.append(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
