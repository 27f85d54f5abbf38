"""Reading start-up logs: lines of public logs, with their source, and the wording of vLLM's source.

The lines are vLLM's; times, process ids and what is not about memory are cut.
"""

import dataclasses

import pytest

from specdecode_operator.vllm.startup_log import LoggedMemory, read_startup_log

GIB = 2**30

V0_31 = """
INFO [model_runner.py:407] Model loading took 15.0 GiB memory and 5.420225 seconds
INFO [kv_cache_utils.py:2464] GPU KV cache size: 460,496 tokens, Maximum concurrency for 131,072 tokens per request: 3.51x
INFO [gpu_worker.py:955] Free memory on device (78.84/79.25 GiB) on startup. Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is 15.26 GiB for consumed memory (weights + non-torch), 1.44 GiB for peak activation, and 0.23 GiB for CUDAGraph memory.
INFO [gpu_worker.py:692] Available KV cache memory: 56.21 GiB
"""  # noqa: E501  as printed
"""vLLM 0.31, one A100 80GB, Llama-3.1-8B-Instruct: public notes of a course on inference."""

V0_10_TP2 = """
(Worker_TP1 pid=2) INFO [gpu_model_runner.py:3118] Graph capturing finished in 25 secs, took 2.37 GiB
(Worker_TP1 pid=2) INFO [gpu_worker.py:391] Free memory on device (139.21/139.81 GiB) on startup. Desired GPU memory utilization is (0.9, 125.83 GiB). Actual usage is 74.28 GiB for weight, 5.58 GiB for peak activation, 1.38 GiB for non-torch memory, and 2.37 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=45175492096` to fit into requested memory.
"""  # noqa: E501  as printed
"""vLLM 0.10, two H200, Qwen3-Next-80B: a log in a public repository."""

V0_27_TP2 = """
(Worker_TP1 pid=448) INFO [gpu_model_runner.py:6806] Estimated CUDA graph memory: 0.36 GiB total
(Worker_TP0 pid=447) INFO [gpu_worker.py:563] Available KV cache memory: 6.87 GiB
"""
"""gpustack/runner pull request 251."""

V0_21 = """
(EngineCore pid=284) INFO [gpu_model_runner.py:5132] Model loading took 21.42 GiB memory and 175.218386 seconds
(EngineCore pid=284) INFO [gpu_model_runner.py:6365] Estimated CUDA graph memory: 0.61 GiB total
(EngineCore pid=284) INFO [gpu_worker.py:466] Available KV cache memory: 71.15 GiB
(EngineCore pid=284) INFO [kv_cache_utils.py:1733] GPU KV cache size: 3,131,683 tokens
(EngineCore pid=284) INFO [kv_cache_utils.py:1734] Maximum concurrency for 200,000 tokens per request: 15.66x
"""
"""After 0.21, an NVFP4 model with MTP: a log in a public repository."""

DEBUG_0_19 = "DEBUG Memory profiling takes 1.2 seconds. Total non KV cache memory: 16.22GiB; torch peak memory increase: 1.19GiB; non-torch forward increase memory: 0.04GiB; weights memory: 14.99GiB."  # noqa: E501
"""Sizes as a public benchmark quotes them from its vLLM's DEBUG log."""


def memory(**known: float) -> LoggedMemory:
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(LoggedMemory)), None)
    sizes = {name: round(value * GIB) if name.endswith("_bytes") else value for name, value in known.items()}
    return LoggedMemory(**{**nothing, **sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "runner", "expected"),
    [
        (
            V0_31,
            "V2",
            memory(
                total_bytes=79.25,
                requested_bytes=72.91,
                model_load_bytes=15.0,
                non_model_bytes=0.26,
                available_kv_bytes=56.21,
                kv_cache_tokens=460_496,
                max_concurrency=3.51,
            ),
        ),
        (
            V0_10_TP2,
            "V1",
            memory(total_bytes=139.81, requested_bytes=125.83, non_model_bytes=1.38, graphs_real_bytes=2.37),
        ),
        (V0_27_TP2, None, memory(graphs_estimated_bytes=0.36, available_kv_bytes=6.87)),
        (
            V0_21,
            "V1",
            memory(
                model_load_bytes=21.42,
                graphs_estimated_bytes=0.61,
                available_kv_bytes=71.15,
                kv_cache_tokens=3_131_683,
                max_concurrency=15.66,
            ),
        ),
        (DEBUG_0_19, None, memory(non_model_bytes=0.04)),
    ],
    ids=["0.31", "0.10 on two GPUs", "0.27 on two GPUs", "0.21 with a drafter", "debug"],
)
def test_memory_figures_are_read_from_public_logs(text: str, runner: str | None, expected: LoggedMemory) -> None:
    log = read_startup_log(text)
    found, wanted = dataclasses.asdict(log.memory), dataclasses.asdict(expected)
    assert found == {name: pytest.approx(value, abs=1) if value else value for name, value in wanted.items()}
    assert log.runner == runner


def test_memory_is_that_of_the_rank_with_the_least_left() -> None:
    lines = ["Available KV cache memory: 19.27 GiB", "Available KV cache memory: 17.14 GiB"]
    lines += ["Model loading took 7.5 GiB memory and 1 seconds", "Model loading took 7.9 GiB memory and 1 seconds"]
    for order in (lines, lines[::-1]):
        found = read_startup_log("\n".join(order)).memory
        assert (found.available_kv_bytes, found.model_load_bytes) == (round(17.14 * GIB), round(7.9 * GIB))


# Wording of vLLM 0.32: v1/engine/core.py, config/vllm.py VllmConfig.__str__, entrypoints/serve/utils/api_utils.py.
HEAD_0_32 = """
(APIServer pid=1) INFO [api_utils.py:288] non-default args: {'model_tag': 'meta-llama/Llama-3.1-70B-Instruct', 'max_num_seqs': 128, 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.9, 'quantization': 'fp8_per_tensor', 'speculative_config': {'method': 'draft_model', 'model': 'meta-llama/Llama-3.1-8B-Instruct', 'num_speculative_tokens': 5}}
(APIServer pid=1) INFO [scheduler.py:308] Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore pid=9) INFO [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: model='meta-llama/Llama-3.1-70B-Instruct', speculative_config=SpeculativeConfig(method='draft_model', model='meta-llama/Llama-3.1-8B-Instruct', num_spec_tokens=5), tokenizer='x', dtype=torch.bfloat16, max_seq_len=8192, load_format=auto, tensor_parallel_size=2, pipeline_parallel_size=1, quantization=fp8_per_tensor, enforce_eager=False, kv_cache_dtype=auto, device_config=cuda
(Worker_TP0 pid=10) INFO [gpu_worker.py:518] Using V2 Model Runner
"""  # noqa: E501  as printed


def test_settings_are_read_from_arguments_and_config() -> None:
    log = read_startup_log(HEAD_0_32)
    assert (log.version, log.runner) == ("0.32", "V2")
    found = log.settings
    assert (found.model, found.draft_model) == (
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
    )
    assert (found.method, found.num_speculative_tokens, found.tensor, found.pipeline) == ("draft_model", 5, 2, 1)
    assert (found.max_model_len, found.max_num_seqs, found.max_num_batched_tokens) == (8192, 128, 8192)
    assert (found.utilization, found.enforce_eager, found.quantization) == (0.9, False, "fp8_per_tensor")


def test_log_without_speculation_has_method_none() -> None:
    config = "Initializing a V1 LLM engine (v0.31.0) with config: model='m', speculative_config=None, tokenizer='m'"
    assert read_startup_log(config).settings.method == "none"
    assert read_startup_log("INFO nothing of the kind").settings.method is None


@pytest.mark.parametrize(
    "text", ["", "\x00\xff", "non-default args: {'a': <object>}", "Model loading took GiB", "█" * 99]
)
def test_text_that_is_no_log_gives_nothing(text: str) -> None:
    log = read_startup_log(text)
    assert log.version is None
    assert log.memory == memory()


def test_version_is_read_from_the_coloured_logo() -> None:
    assert read_startup_log("\x1b[34m▄█\x1b[97m█ █\x1b[0m  version \x1b[97m0.32.0\x1b[0m").version == "0.32"
