"""Map the last log lines of vLLM 0.32 and torch to reasons and fixes."""

import pytest

from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from specdecode_operator.deployment.rollout.engine_errors import ENGINE_ERRORS, find_error, telling_line
from specdecode_operator.vllm.flag_values import FLAG_CHECKS, FlagCheck
from tests.support.objects import ended, pod

NO_KV_CACHE = """\
EngineCore failed to start.
Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/vllm/v1/core/kv_cache_utils.py", line 1011, in _check_enough_kv_cache_memory
    raise ValueError(
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the \
engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See \
https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.
"""
TOO_LONG = """\
  File "/usr/lib/python3/dist-packages/vllm/v1/core/kv_cache_utils.py", line 1030, in _check_enough_kv_cache_memory
    raise ValueError(
ValueError: To serve at least one request with the model's max seq len (4194304), (8.0 GiB KV cache is needed, which \
is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum model \
length is 524160. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or \
decreasing `max_model_len` when initializing the engine. See \
https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.
Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.
"""
OUT_OF_MEMORY = """\
Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for weights, \
increasing --tensor-parallel-size, or using --quantization. See \
https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more tips. (original error: CUDA out of memory. \
Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 257.88 MiB is free.)
EngineCore failed to start.
Traceback (most recent call last):
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.10 GiB of \
which 257.88 MiB is free. Including non-PyTorch memory, this process has 78.84 GiB memory in use.
"""
IN_USE = """\
(EngineCore pid=112) ERROR 11-21 17:11:00 [core.py:1510] ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on \
startup is less than desired GPU memory utilization (0.92, 72.8 GiB). Decrease GPU memory utilization or reduce GPU \
memory used by other processes.
"""
TOO_LONG_FOR_MODEL = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len \
(max_position_embeddings=2048.0 or model_max_length=None in model's config.json). To allow overriding this maximum, \
set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. [type=value_error, input_value=ArgsKwargs((), {'model': ...1})]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
NO_DRAFT = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
  Value error, Invalid repository ID or local directory specified: '/models/gone'.
Please verify the following requirements:
1. Provide a valid Hugging Face repository ID.
2. Specify a local directory that contains a recognized configuration file.
   - For Hugging Face models: ensure the presence of a 'config.json'.
 [type=value_error, input_value=ArgsKwargs((), {'model': ...config_format': 'auto'}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
NO_TARGET = """\
  File "/usr/lib/python3/dist-packages/huggingface_hub/utils/_validators.py", line 133, in validate_repo_id
    raise HFValidationError(
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': \
'/models/gone'. Use `repo_type` argument if needed.
"""
REFUSED = """\
usage: vllm [-h] [-v]
            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}
            ...
vllm: error: unrecognized arguments: --max-model-lenn 4096
"""
INVALID = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
  Value error, Unknown kv cache dtype: fp9 [type=value_error, input_value=ArgsKwargs((), {'block_size': 16})]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
NO_RECORDING = """\
error: /recording/gone.jsonl: holds no trace.jsonl: name a capture's folder or a trace
"""
WRAPPED = """\
  File "/usr/lib/python3/dist-packages/vllm/v1/engine/utils.py", line 1432, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 \
leaked shared_memory objects to clean up at shutdown
"""

NOT_ADAPTIVE = """\
ValueError: Adaptive verification trims verification requests on device, which the FlashInferBackend attention backend \
does not support. Pass enable_adaptive_verification=false in the speculative config, or use a backend that does.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
NO_BACKEND = """\
ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['device-cpu \
query lens mismatch not supported, this is needed for adaptive verification']
"""
BLOCKS = """\
ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (79). Each decode sequence requires one Mamba \
cache block, so CUDA graph capture cannot proceed.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
ITEM = """\
ValueError: Chunked MM input disabled but max_tokens_per_mm_item (2496) is larger than max_num_batched_tokens (2048). \
Please increase max_num_batched_tokens.
"""
COPIES = """\
  File "/usr/lib/python3/dist-packages/vllm/forward_context.py", line 96, in make
    assert num_tokens_across_dp_cpu[dp_rank] == batchsize, (
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError: 4096 20
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""

WORDS = {
    "DraftFailsInCopies": (COPIES, "AssertionError: 4096 20", "spec.parallelism.data"),
    "ItemExceedsStep": (ITEM, "max_tokens_per_mm_item (2496) is larger", "spec.serving.maxNumBatchedTokens"),
    "TooFewBlocks": (BLOCKS, "max_num_seqs (256) exceeds available Mamba cache blocks (79)", "spec.serving.maxNumSeqs"),
    "AdaptiveVerificationRefused": (NOT_ADAPTIVE, "the FlashInferBackend attention backend", "adaptiveVerification"),
    "NoKvCacheMemory": (NO_KV_CACHE, "No available memory for the cache blocks", "gpuMemoryUtilizationPercent"),
    "LengthDoesNotFit": (TOO_LONG, "the estimated maximum model length is 524160", "spec.serving.maxModelLen"),
    "GpuOutOfMemory": (OUT_OF_MEMORY, "not enough GPU memory", "spec.parallelism.tensor"),
    "GpuMemoryInUse": (IN_USE, "Free memory on device cuda:0 (3.1/79.1 GiB)", "another process"),
    "LengthNotSupported": (TOO_LONG_FOR_MODEL, "max_position_embeddings=2048.0", "spec.serving.maxModelLen"),
    "ModelMissing": (NO_DRAFT, "'/models/gone'", "put the model there"),
    "RecordingNotReplayed": (NO_RECORDING, "/recording/gone.jsonl: holds no trace.jsonl", "spec.engine.replay"),
    "EngineRefusesArguments": (REFUSED, "unrecognized arguments: --max-model-lenn 4096", "spec.engine.extraArgs"),
}


@pytest.mark.parametrize("reason", WORDS)
def test_engine_failure_reports_its_cause_and_a_fix(reason: str) -> None:
    words, said, fix = WORDS[reason]
    blocked = blocked_pod(pod(containerStatuses=[ended(1, words)]))
    assert blocked is not None
    assert blocked.reason == reason
    assert said in blocked.message
    assert fix in blocked.message
    assert "\n" not in blocked.message


REFUSED_REQUEST = """Unexpected error pre-processing request cmpl-1
Traceback (most recent call last):
  File "/vllm/v1/engine/core.py", line 1900, in process_input_sockets
ValueError: no grammar:
root ::= what somebody asked"""
CUT = f"ValueError: {'ü' * 1024}\nINFO 11-21 17:11:00 [a.py:1] one"
"""As the kubelet cuts a log, by bytes: its first line may be the end of a record of INFO, with what somebody asked."""


def test_every_known_engine_error_has_a_log_example() -> None:
    assert {error.reason for error in ENGINE_ERRORS} == set(WORDS)


@pytest.mark.parametrize(
    ("words", "reason", "said"),
    [
        (NO_TARGET, "ModelMissing", "'/models/gone'"),
        (NO_BACKEND, "AdaptiveVerificationRefused", "needed for adaptive verification"),
        (INVALID, "EngineRefusesArguments", "1 validation error for CacheConfig Value error, Unknown kv cache dtype"),
    ],
)
def test_other_wordings_map_to_the_same_engine_error(words: str, reason: str, said: str) -> None:
    found = find_error(words)
    assert found is not None
    assert found[0].reason == reason
    assert said in found[1]
    assert "input_value" not in found[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "no message was logged"),
        (WRAPPED, "RuntimeError: Engine core initialization failed."),
        ("ValueError: the cause\nRuntimeError: Engine core initialization failed. See root cause above.", "the cause"),
        ("(EngineCore pid=7) ERROR 11-21 17:11:00 [core.py:1510] NCCLError: no route", "NCCLError: no route"),
        ("loading\nKilled", "Killed"),
        ("INFO 11-21 17:11:00 [a.py:1] one\nDEBUG 11-21 17:11:00 [a.py:1] ValueError: two", "its log does not say why"),
        ("\x1b[0;36m(APIServer pid=7)\x1b[0;0m INFO 11-21 17:11:00 [a.py:1] ValueError: a", "its log does not say why"),
        (REFUSED_REQUEST, "its log does not say why"),
        (CUT, "its log does not say why"),
        (f"{REFUSED_REQUEST}\nEngineCore encountered a fatal error.\nRuntimeError: no route", "RuntimeError: no route"),
    ],
)
def test_most_informative_line_of_an_unknown_error_is_shown(words: str, line: str) -> None:
    assert find_error(words) is None
    assert line in telling_line(words)


@pytest.mark.parametrize("exit_code", [137, 143])
def test_killed_engine_is_distinguished_from_a_failed_one(exit_code: int) -> None:
    blocked = blocked_pod(pod(containerStatuses=[ended(exit_code, "WARNING slow disk\nINFO loading weights")]))
    assert blocked is not None
    assert (blocked.reason, blocked.permanent) == ("EngineKilled", False)
    assert "slow disk" in blocked.message


def test_engine_exit_code_zero_is_a_failure() -> None:
    blocked = blocked_pod(pod(containerStatuses=[ended(0, "INFO [shutdown] API server: shutting down")]))
    assert blocked is not None
    assert blocked.reason == "EngineFailed"
    assert blocked_pod(pod(initContainerStatuses=[ended(0, container="download-target")])) is None


DEATH = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
"""All that the API server says of it; it ends with exit code 0."""
START = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "


@pytest.mark.parametrize(
    ("exit_code", "words", "said"),
    [
        (0, DEATH, "was killed: "),
        (1, f"{START}{{'EngineCore': -9}}", "was killed by SIGKILL: "),
        (1, f"{START}{{'EngineCore_DP0': -11, 'EngineCore_DP1': 0}}", "was killed by SIGSEGV: "),
        (1, "RuntimeError: Process ApiServer_0 (PID: 7) died with exit code -9", "was killed by SIGKILL: "),
        (1, "RuntimeError: Engine core process EngineCore_DP1 died unexpectedly.", "was killed: "),
        (1, "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "by SIGKILL: "),
        (1, f"{START}{{'EngineCore': -99}}", "was killed by signal -99: "),
    ],
)
def test_killed_engine_core_is_reported_with_signal_and_fix(exit_code: int, words: str, said: str) -> None:
    blocked = blocked_pod(pod(containerStatuses=[ended(exit_code, words)]))
    assert blocked is not None
    assert (blocked.reason, blocked.permanent) == ("EngineKilled", False)
    for each in (said, "spec.accelerator.memoryGiB on CPU", "spec.podTemplate", f"exit code {exit_code}"):
        assert each in blocked.message


@pytest.mark.parametrize("check", [check for check in FLAG_CHECKS if check.words], ids=lambda check: check.source)
def test_flag_value_that_vllm_rejects_gets_a_fix(check: FlagCheck) -> None:
    wrapped = f"1 validation error for VllmConfig\n  Value error, a {check.words} b. [type=value_error]"
    broken = check.words.replace(" ", "\n  ", 1)
    for said in (f"ValueError: {check.words}", f"ValueError: {broken}", f"vllm serve: error: argument --x: {wrapped}"):
        found = find_error(said)
        assert found is not None
        assert found[0].reason == "EngineRefusesArguments"
        assert found[0].fix.endswith(f": {check.fix}")
        assert found[0].permanent


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            "No valid attention backend found for cuda with AttentionSelectorConfig(head_size=576). Reasons: {}.",
            "kvCacheDtype",
        ),
        (
            "Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['sinks']",
            "--attention-backend",
        ),
        (
            "CUDAGraphMode.FULL is not supported with Cpu backend (support: 0); please try cudagraph_mode=PIECEWISE",
            "cudagraphMode",
        ),
        ("Pipeline parallelism is not supported for this model. Supported models implement", "parallelism.pipeline"),
        ("LoRA is not supported for LlamaForCausalLM (a). Supported models implement", "--enable-lora"),
        ("LoRA rank 64 is greater than max_lora_rank 16.", "spec.adapters"),
        ("Arctic Inference is required for suffix decoding. Install via `pip install`.", "engine.image"),
    ],
)
def test_error_that_only_vllm_can_detect_gets_a_fix(said: str, field: str) -> None:
    wrapped = f"1 validation error for VllmConfig\n  Value error, {said} [type=value_error, input_value=1]"
    for text in (f"ValueError: {said}", wrapped):
        found = find_error(text)
        assert found is not None
        assert found[0].reason == "EngineRefusesArguments"
        assert field in found[0].fix
        assert found[0].permanent
