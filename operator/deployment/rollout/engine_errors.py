"""Explain why an engine ended: match its last log lines against known vLLM errors, and name the fix.

If a container leaves no termination message, the kubelet keeps the end of its log, and with
``--enable-log-requests`` vLLM logs prompts and answers there. INFO and DEBUG records are dropped, so that prompts
and answers never reach a status or an Event.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from signal import Signals
from typing import Final

from specdecode_operator.redaction import after_cut, before_cut, clip, redact
from specdecode_operator.vllm.flag_values import FLAG_CHECKS

# The kubelet keeps the end of a log (MaxContainerTerminationMessageLogLength), so the first line may be cut.
_KEPT_OF_A_LOG_BYTES: Final = 2048
# The containers of a pod share this evenly, and the kubelet cuts the end of longer messages (normalizeStatus in
# pkg/kubelet/status/status_manager.go, MaxPodTerminationMessageLogLength).
_KEPT_OF_A_POD_BYTES: Final = 12_288
# With fewer containers, a share exceeds the 4,096 bytes of the longest message; more than 24 would be unusual.
_CONTAINERS: Final = range(4, 25)
_SHARES: Final = frozenset(_KEPT_OF_A_POD_BYTES // containers for containers in _CONTAINERS)
# Around the process name if VLLM_LOGGING_COLOR is set (vllm/logging_utils/formatter.py).
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
# vLLM's prefix of each line: the process and, for log records, level, time and place.
_PREFIX: Final = re.compile(r"^\([\w-]+ pid=\d+\)(?: \w+ [\d-]+ [\d:]+ \[[^\]]+\])? ?")
_CHATTER: Final = re.compile(r"(?:\([\w-]+ pid=\d+\) ?)?(?:TRACE|DEBUG|INFO)\b")
# Start of an error that one client's request caused; it does not end the engine (vllm/v1/engine/core.py,
# vllm/renderers/hf.py).
_OF_ONE_REQUEST: Final = re.compile(r"pre-processing request|Chat template rejected the request")
# Start of the lines about an engine core or worker that ends.
_OF_THE_ENGINE: Final = re.compile(
    r"EngineCore (?:encountered|failed)|engine core|core proc|WorkerProc|Worker proc|\bdied\b"
)


def error_lines(last_words: str) -> list[str]:
    """Return the log lines that may explain how a container ended, without vLLM's prefixes."""
    # Not `splitlines`: a request's JSON may contain Unicode line separators, and the rest would lack its prefix.
    lines = _COLOURS.sub("", _without_cut_edges(last_words)).split("\n")
    kept, of_one_request = [], False
    for line in lines:
        of_one_request = not _OF_THE_ENGINE.search(line) and (of_one_request or bool(_OF_ONE_REQUEST.search(line)))
        if not (of_one_request or _CHATTER.match(line)):
            kept.append(_PREFIX.sub("", line))
    return kept


def _without_cut_edges(last_words: str) -> str:
    """Remove words, and secrets, that the kubelet cut at the start or end of a message."""
    size = len(last_words.encode())
    # The cut may be inside a multi-byte character.
    sizes = {size} if last_words.isascii() else {*range(size, size + 4)}
    end_is_cut = not sizes.isdisjoint(_SHARES) and not last_words.endswith("\n")
    if size >= _KEPT_OF_A_LOG_BYTES or end_is_cut:
        last_words = after_cut(last_words)
    return before_cut(last_words) if end_is_cut else redact(last_words)


_LENGTH_LIMIT: Final = 300
_ANY: Final = re.DOTALL | re.MULTILINE


@dataclass(frozen=True)
class EngineError:
    """Known vLLM error; a ``permanent`` error repeats at each start until the spec changes."""

    reason: str
    pattern: re.Pattern[str]
    fix: str
    permanent: bool = True


_refused: Final = partial(EngineError, "EngineRefusesArguments")


# In order of precedence: causes come before the errors that wrap them.
ENGINE_ERRORS: Final = (
    # Values that validation already rejects; a vLLM version that is not known yet may reject others.
    *(
        _refused(
            re.compile(r"\s+".join(map(re.escape, check.words.split())) + r"[^\n]*"), f"{check.place}: {check.fix}"
        )
        for check in FLAG_CHECKS
        if check.words
    ),
    # vllm/utils/argparse_utils.py and Python's argparse, with exit code 2.
    _refused(
        re.compile(r"^\S+(?: serve)?: error: .*$", re.MULTILINE),
        "look at spec.engine.extraArgs and spec.engine.version",
    ),
    # vllm/v1/worker/utils.py request_memory
    EngineError(
        "GpuMemoryInUse",
        re.compile(r"Free memory on device.*?\) on startup is less than desired GPU memory utilization", _ANY),
        "another process holds memory of that GPU: end it, or lower spec.serving.gpuMemoryUtilizationPercent",
        permanent=False,
    ),
    # vllm/v1/core/kv_cache_utils.py _check_enough_kv_cache_memory
    EngineError(
        "NoKvCacheMemory",
        re.compile(r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory"),
        "weights and activations leave no memory for the KV cache: raise spec.serving.gpuMemoryUtilizationPercent or"
        " spec.parallelism.tensor, or quantize (spec.target.quantization)",
    ),
    EngineError(
        "LengthDoesNotFit",
        re.compile(
            r"To serve at least one request with the model's max seq len.*?available KV cache memory \([^)]*\)"
            r"(?:\. Based on the available memory, the estimated maximum model length is \d+)?",
            _ANY,
        ),
        "lower spec.serving.maxModelLen, or leave more memory for the KV cache",
    ),
    # vllm/config/compilation.py resolve_cudagraph_mode_and_sizes
    EngineError(
        "TooFewBlocks",
        re.compile(r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks \(\d+\)"),
        "lower spec.serving.maxNumSeqs to that many blocks, raise spec.serving.gpuMemoryUtilizationPercent, or set"
        " spec.serving.cudagraphMode to PIECEWISE",
    ),
    # vllm/v1/core/encoder_cache_manager.py compute_mm_encoder_budget
    EngineError(
        "ItemExceedsStep",
        re.compile(
            r"Chunked MM input disabled but max_tokens_per_mm_item \(\d+\) is larger than"
            r" max_num_batched_tokens \(\d+\)"
        ),
        "raise spec.serving.maxNumBatchedTokens to the tokens of that item, or limit images and videos with"
        " --limit-mm-per-prompt in spec.engine.extraArgs",
    ),
    # vllm/config/model.py _get_and_verify_max_len
    EngineError(
        "LengthNotSupported",
        re.compile(r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len[^)]*\)"),
        "lower spec.serving.maxModelLen",
    ),
    # vllm/config/compilation.py resolve_cudagraph_mode_and_sizes
    _refused(
        re.compile(r"CUDAGraphMode\.\w+ is not supported with [^\n]*please try cudagraph_mode=PIECEWISE[^\n]*"),
        "set spec.serving.cudagraphMode to PIECEWISE, or remove --attention-backend from spec.engine.extraArgs",
    ),
    # vllm/config/model.py verify_with_parallel_config
    _refused(
        re.compile(r"Pipeline parallelism is not supported for this model[^\n]*"),
        "set spec.parallelism.pipeline to 1",
    ),
    # vllm/config/lora.py verify_with_model_config
    _refused(
        re.compile(r"LoRA is not supported for [^\n]*"),
        "remove spec.adapters, or --enable-lora from spec.engine.extraArgs",
    ),
    # vllm/lora/peft_helper.py validate_legal
    _refused(
        re.compile(r"LoRA rank \d+ is greater than max_lora_rank \d+[^\n]*"),
        "set the rank of that adapter in spec.adapters to r of its adapter_config.json",
    ),
    # vllm/config/speculative.py _validate_suffix_decoding
    _refused(
        re.compile(r"Arctic Inference is required for suffix decoding[^\n]*"),
        "set spec.engine.image to one that holds arctic-inference, or use another spec.speculation.method",
    ),
    # vllm/forward_context.py DPMetadata.make, up to vLLM 0.29, for drafts that propose blocks
    EngineError(
        "DraftFailsInCopies",
        re.compile(r"assert num_tokens_across_dp_cpu\[dp_rank\] == batchsize.*?^AssertionError: \d+ \d+", _ANY),
        "set spec.parallelism.data to 1, or spec.engine.version to 0.30 or newer",
    ),
    # vllm/v1/worker/gpu_model_runner.py load_model and profiling; torch/cuda/memory.py
    EngineError(
        "GpuOutOfMemory",
        re.compile(r"CUDA out of memory[^\n]*|Failed to load model - not enough GPU memory"),
        "raise spec.parallelism.tensor, quantize (spec.target.quantization), or lower spec.serving.maxNumSeqs,"
        " spec.serving.maxNumBatchedTokens or spec.serving.gpuMemoryUtilizationPercent",
        permanent=False,
    ),
    # vllm/transformers_utils/config.py get_config, repo_utils.py get_model_path, model_loader/default_loader.py
    EngineError(
        "ModelMissing",
        re.compile(
            r"Invalid repository ID or local directory specified: *'[^']*'"
            r"|Repo id must be in the form [^\n]*|Cannot find any model weights with [^\n]*"
            r"|Cannot find an appropriate cached snapshot folder[^\n]*"
        ),
        "correct the model's path in the spec, or put the model there",
    ),
    # `specdecode replay serve`: an invalid recording, or a setting that does not match it
    EngineError(
        "RecordingNotReplayed",
        re.compile(r"^error: (?:/recording/|--).*$", re.MULTILINE),
        "correct spec.engine.replay, or put the recording there",
        permanent=False,
    ),
    # vllm/v1/worker/gpu/spec_decode/adaptive_verification.py, for attention without full graphs of shortened drafts;
    # vllm/v1/attention/backend.py, where the backend is chosen; vllm/config
    EngineError(
        "AdaptiveVerificationRefused",
        re.compile(
            r"Adaptive verification (?:captures|estimates|is not|needs|only|replays|requires|trims|without)[^\n]*"
            r"|device-cpu query lens mismatch not supported, this is needed for adaptive verification"
        ),
        "set spec.speculation.adaptiveVerification to false, or remove the setting that the message names",
    ),
    # vllm/platforms/cuda.py get_attn_backend_cls
    _refused(
        re.compile(
            r"No valid attention backend found for [^\n]*"
            r"|Selected backend \S+ is not valid for this configuration[^\n]*"
        ),
        "set spec.serving.kvCacheDtype to auto, or remove --attention-backend and --attention-config from"
        " spec.engine.extraArgs; the message has the reason of each backend",
    ),
    # pydantic, for the classes in vllm/config
    _refused(
        re.compile(r"\d+ validation errors? for \w+.*?(?= \[type=|\Z)", _ANY),
        "look at spec.engine.extraArgs and at the field that the message names",
    ),
)
_WRAPPERS: Final = re.compile(
    r"See root cause above|EngineCore encountered an issue|\bdied (?:unexpectedly|with exit code)"
)
# vllm/v1: engine/core_client.py start_engine_core_monitor, engine/utils.py wait_for_engine_startup (negative exit codes
# are signals), utils.py wait_for_completion_or_failure, executor/multiproc_executor.py monitor_workers
_CORE_DIED: Final = re.compile(
    r"engine core exited unexpectedly|Failed core proc\(s\): \{[^}]*?: (?P<core>-\d+)[^}]*\}"
    r"|Engine core process \S+ died unexpectedly|died with exit code (?P<process>-\d+)"
    r"|Worker proc \S+ died unexpectedly \(exit code: (?P<worker>-\d+)\)"
)
_CORE_FIX: Final = (
    "no cause was logged; the node may have run out of memory (see kubectl describe node). Raise"
    " spec.accelerator.memoryGiB on CPU, or else the engine's memory limit in spec.podTemplate"
)
_NAMED: Final = re.compile(r"(?:^|\s)((?:\w+\.)*\w+(?:Error|Exception|Interrupt): .+)$")


def find_error(last_words: str) -> tuple[EngineError, str] | None:
    """Return the known error in an engine's last log lines, and the matching text."""
    text = "\n".join(error_lines(last_words))
    for error in ENGINE_ERRORS:
        if match := error.pattern.search(text):
            return error, _in_one_line(match[0])
    return None


def telling_line(last_words: str) -> str:
    """Return the most informative line: the last one with a cause, or with an error, or the last line."""
    lines = [line.strip() for line in error_lines(last_words) if line.strip()]
    if not lines:
        return "its log does not say why" if last_words.strip() else "no message was logged"
    named = _named(lines)
    causes = [line for line in named if not _WRAPPERS.search(line)]
    return _in_one_line([lines[-1], *named[-1:], *causes[-1:]][-1])


def dead_core(last_words: str) -> str | None:
    """Return a message about a killed engine process, with a fix; None without a kill, or if a cause was logged."""
    text = "\n".join(error_lines(last_words))
    died = _CORE_DIED.search(text)
    if died is None or any(not _WRAPPERS.search(line) for line in _named(text.splitlines())):
        return None
    number = next((each for each in died.groupdict().values() if each), None)
    return f"a process of the engine's core was killed{_by_signal(number)}: {_CORE_FIX}"


def _by_signal(number: str | None) -> str:
    try:
        return f" by {Signals(-int(number)).name}" if number else ""
    except ValueError:
        return f" by signal {number}"


def _named(lines: Iterable[str]) -> list[str]:
    return [match[1] for line in lines if (match := _NAMED.search(line))]


def _in_one_line(text: str) -> str:
    return clip(" ".join(text.split()), _LENGTH_LIMIT)
