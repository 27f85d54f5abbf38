"""Parse the start-up log of a vLLM engine: its settings and its memory figures.

The patterns match the wording of vLLM 0.17 to 0.32, from v1/worker/gpu_worker.py, v1/worker/gpu_model_runner.py,
v1/worker/gpu/model_runner.py, v1/core/kv_cache_utils.py, v1/engine/core.py and utils/mem_utils.py. Sizes are
printed in GiB with two decimals.
"""

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from specdecode_operator.problems import shown
from specdecode_operator.untrusted import MOST_DIGITS, whole_number

_GIB: Final = 2**30
_SIZE: Final = r"(-?\d+(?:\.\d+)?) ?GiB"

_NUMBER: Final = r"(\d{1,4}\.\d{1,4})\b[.\w+]*"
_VERSIONS: Final = (
    re.compile(rf"LLM engine \(v{_NUMBER}\)"),
    re.compile(rf"vLLM (?:API )?server version:? {_NUMBER}"),
    re.compile(rf"█\s+version {_NUMBER}"),
)
"""Most reliable first; the last one matches the logo."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_NON_DEFAULT_ARGS: Final = re.compile(r"non-default args: (\{.*\})")
_ENGINE_CONFIG: Final = re.compile(r"Initializing a V1 LLM engine \(v[^)]*\) with config: (.*)")
_SPECULATIVE_CONFIG: Final = re.compile(
    r"SpeculativeConfig\(method='(?P<method>\w+)', model=(?:'(?P<model>[^']*)'|None), num_spec_tokens=(?P<tokens>\d+)\)"
)
_BATCHED_TOKENS: Final = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_V2_RUNNER: Final = re.compile(r"Using V2 Model Runner|\[model_runner\.py:\d+\] Model loading took")
_V1_RUNNER: Final = re.compile(r"\[gpu_model_runner\.py:\d+\] (?:Model loading took|Graph capturing finished)")

_LOADED: Final = re.compile(rf"Model loading took {_SIZE}")
_AVAILABLE: Final = re.compile(rf"Available KV cache memory: {_SIZE}")
_TOKENS: Final = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY: Final = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_ON_STARTUP: Final = re.compile(
    rf"Free memory on device \(([\d.]+)/([\d.]+) GiB\) on startup\."
    rf" Desired GPU memory utilization is \(([\d.]+), {_SIZE}\)"
)
_CONSUMED: Final = re.compile(rf"Actual usage is {_SIZE} for consumed memory")
_CONSUMED_DEBUG: Final = re.compile(rf"total consumed \(from mem_get_info\): {_SIZE}")
_NON_TORCH: Final = re.compile(rf"{_SIZE} for non-torch memory")
_NON_TORCH_DEBUG: Final = re.compile(rf"non-torch forward increase memory: {_SIZE}")
_GRAPHS_ESTIMATED: Final = re.compile(rf"Estimated CUDA graph memory: {_SIZE} total")
_GRAPHS_REAL: Final = re.compile(rf"Graph capturing finished in \d+ secs, took {_SIZE}")
_REQUESTED_DEBUG: Final = re.compile(rf"Requested memory: ([\d.]+) \(util\), {_SIZE}")
_DECIMAL: Final = re.compile(rf"-?\d{{1,{MOST_DIGITS}}}(?:\.\d{{1,{MOST_DIGITS}}})?", re.ASCII)


class MalformedLogError(ValueError):
    """A line of a log whose value cannot be what vLLM prints."""

    def __init__(self, line: int, what: str, value: object, expected: str) -> None:
        super().__init__(f"line {line}: {what}: {shown(value, 40)}: {expected}; give the log as vLLM wrote it")


@dataclass(frozen=True)
class LoggedSettings:
    """Settings in an engine's log; None for each that the log does not contain."""

    model: str | None
    draft_model: str | None
    method: str | None
    """``none`` if the log shows that the engine does not speculate."""
    num_speculative_tokens: int | None
    tensor: int | None
    pipeline: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    utilization: float | None
    """Share of the GPU's memory, 0 to 1."""
    enforce_eager: bool | None
    quantization: str | None
    draft_quantization: str | None
    kv_cache_dtype: str | None
    dtype: str | None = None


@dataclass(frozen=True)
class LoggedMemory:
    """Memory of one GPU as an engine logs it; None for each figure that the log does not contain.

    If ranks differ, the values are those of the rank with the least free memory: largest use, smallest remainder.
    """

    total_bytes: int | None
    requested_bytes: int | None
    model_load_bytes: int | None
    """Weights of target and draft, and the buffers loaded with them."""
    non_model_bytes: int | None
    """Non-torch memory in use before the KV cache.

    From 0.27 on, it includes persistent buffers if the engine counts them.
    """
    graphs_estimated_bytes: int | None
    """Profiled before the KV cache is sized; the graphs are captured later."""
    graphs_real_bytes: int | None
    available_kv_bytes: int | None
    kv_cache_tokens: int | None
    max_concurrency: float | None


@dataclass(frozen=True)
class StartupLog:
    """Content of the log of one start."""

    version: str | None
    runner: str | None
    settings: LoggedSettings
    memory: LoggedMemory


def read_startup_log(text: str) -> StartupLog:
    """Return the settings and the memory in a log; every part may be missing.

    Raises MalformedLogError if a line that vLLM writes holds a value that vLLM cannot have written.
    """
    text = _COLOUR.sub("", text)
    versions = filter(None, (pattern.search(text) for pattern in _VERSIONS))
    return StartupLog(
        version=next((found[1] for found in versions), None),
        runner="V2" if _V2_RUNNER.search(text) else "V1" if _V1_RUNNER.search(text) else None,
        settings=_settings(text),
        memory=_memory(text),
    )


def _memory(text: str) -> LoggedMemory:
    loaded = _bytes(_LOADED, text, max)
    consumed = _bytes(_CONSUMED, text, max) or _bytes(_CONSUMED_DEBUG, text, max)
    non_model = consumed - loaded if consumed is not None and loaded is not None else None
    for pattern in (_NON_TORCH, _NON_TORCH_DEBUG):
        non_model = _bytes(pattern, text, max) if non_model is None else non_model
    requested = _bytes(_ON_STARTUP, text, min, group=4)
    tokens = [_whole(found, 1, "KV cache size") for found in _TOKENS.finditer(text)]
    concurrency = [_decimal(found, 2, "Maximum concurrency") for found in _CONCURRENCY.finditer(text)]
    return LoggedMemory(
        total_bytes=_bytes(_ON_STARTUP, text, min, group=2),
        requested_bytes=_bytes(_REQUESTED_DEBUG, text, min, group=2) if requested is None else requested,
        model_load_bytes=loaded,
        non_model_bytes=non_model,
        graphs_estimated_bytes=_bytes(_GRAPHS_ESTIMATED, text, max),
        graphs_real_bytes=_bytes(_GRAPHS_REAL, text, max),
        available_kv_bytes=_bytes(_AVAILABLE, text, min),
        kv_cache_tokens=min(tokens, default=None),
        max_concurrency=min(concurrency, default=None),
    )


def _settings(text: str) -> LoggedSettings:
    arguments = _given_arguments(text)
    config = _ENGINE_CONFIG.search(text)
    resolved = config[1] if config else ""
    speculative = _speculation(arguments, resolved)

    def number(key: str) -> int | None:
        return arguments.whole(key) or whole_number(_value(resolved, key))

    length = _CONCURRENCY.search(text)
    on_startup = _ON_STARTUP.search(text) or _REQUESTED_DEBUG.search(text)
    utilization = arguments.decimal("gpu_memory_utilization")
    if utilization is None and on_startup is not None:
        utilization = _decimal(on_startup, 3 if on_startup.re is _ON_STARTUP else 1, "memory utilization")
    batched = _BATCHED_TOKENS.search(text)
    model = arguments.text("model_tag") or arguments.text("model") or _value(resolved, "model")
    return LoggedSettings(
        model=model or None,
        draft_model=speculative.text("model"),
        method=speculative.text("method"),
        num_speculative_tokens=speculative.whole("num_speculative_tokens"),
        tensor=number("tensor_parallel_size"),
        pipeline=number("pipeline_parallel_size"),
        max_model_len=number("max_seq_len")
        or (_whole(length, 1, "Maximum concurrency") if length else None)
        or arguments.whole("max_model_len"),
        max_num_seqs=arguments.whole("max_num_seqs"),
        max_num_batched_tokens=arguments.whole("max_num_batched_tokens")
        or (_whole(batched, 1, "max_num_batched_tokens") if batched else None),
        block_size=arguments.whole("block_size"),
        utilization=utilization or None,
        enforce_eager={"True": True, "False": False}.get(_value(resolved, "enforce_eager") or ""),
        quantization=_named(arguments.text("quantization") or _value(resolved, "quantization")),
        draft_quantization=_named(speculative.text("quantization")),
        kv_cache_dtype=_named(arguments.text("kv_cache_dtype") or _value(resolved, "kv_cache_dtype")),
        dtype=_named(_value(resolved, "dtype")),
    )


@dataclass(frozen=True)
class _Arguments:
    """Arguments that a log line shows as a dictionary. Getters check types and return None for absent keys."""

    values: Mapping[str, Any]
    line: int

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise MalformedLogError(self.line, key, value, "must be a string")
        return value

    def whole(self, key: str) -> int | None:
        value = self.values.get(key)
        number = whole_number(value)
        if value is not None and number is None:
            raise MalformedLogError(self.line, key, value, f"must be a whole number of at most {MOST_DIGITS} digits")
        return number

    def decimal(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10**MOST_DIGITS:
            raise MalformedLogError(self.line, key, value, "must be a number")
        return float(value)


def _given_arguments(text: str) -> _Arguments:
    """Return the arguments that differ from their defaults; empty if they are cut off or contain objects."""
    found = _NON_DEFAULT_ARGS.search(text)
    given: Any = None
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        given = ast.literal_eval(found[1]) if found else None
    return _Arguments(given if isinstance(given, dict) else {}, _line(found, 1) if found else 0)


def _speculation(arguments: _Arguments, resolved: str) -> _Arguments:
    config = arguments.values.get("speculative_config")
    if config is not None and not isinstance(config, dict):
        raise MalformedLogError(arguments.line, "speculative_config", config, "must be a dictionary")
    values: Mapping[str, Any] = {"method": "none"} if "speculative_config=None" in resolved else {}
    if found := _SPECULATIVE_CONFIG.search(resolved):
        draft = None if found["method"] in {"ngram", "ngram_gpu", "suffix"} else found["model"]
        read = {"method": found["method"], "model": draft, "num_speculative_tokens": found["tokens"]}
        values = {**(config or {}), **read}
    elif config:
        values = {"method": "draft_model", **config}
    return replace(arguments, values=values)


def _value(config: str, key: str) -> str | None:
    found = re.search(rf"(?:^|, ){key}=(?:'([^']*)'|([^,]*))", config)
    return (found[1] or found[2]) if found else None


def _named(value: object) -> str | None:
    return None if value in (None, "", "None") else str(value)


def _bytes(pattern: re.Pattern[str], text: str, choose: Callable[[list[int]], int], group: int = 1) -> int | None:
    found = [round(_decimal(match, group, "size in GiB") * _GIB) for match in pattern.finditer(text)]
    return choose(found) if found else None


def _whole(match: re.Match[str], group: int, what: str) -> int:
    value = whole_number(match[group].replace(",", ""))
    if value is None:
        expected = f"must be a whole number of at most {MOST_DIGITS} digits"
        raise MalformedLogError(_line(match, group), what, match[group], expected)
    return value


def _decimal(match: re.Match[str], group: int, what: str) -> float:
    if _DECIMAL.fullmatch(match[group]) is None:
        raise MalformedLogError(_line(match, group), what, match[group], "must be a number such as 71.5")
    return float(match[group])


def _line(match: re.Match[str], group: int) -> int:
    return match.string.count("\n", 0, match.start(group)) + 1
