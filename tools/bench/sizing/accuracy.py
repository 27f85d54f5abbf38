"""How far sizing is from what vLLM printed in public start-up logs; all cases: `python -m bench.sizing.accuracy`."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, at_most
from specdecode_operator.enums import DTYPE_BYTES, Dtype, Precision
from specdecode_operator.sizing.arithmetic import GIB, ceil_div, gib_to_bytes
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.estimate import read_case
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.memory.budget import Budget, EngineLimits, Pair, Parallelism, estimate
from specdecode_operator.sizing.memory.kv_cache import pool_blocks, stage_groups
from specdecode_operator.sizing.memory.kv_pages import CacheKind, KvLayer, KvSettings, LayerRun
from specdecode_operator.sizing.version_rules import NEWEST_VERSION
from tests.support.kv_logs import printed_tokens

LOGS: Final = Path(__file__).parents[3] / "tests/unit/sizing/groundtruth"
H100: Final = "NVIDIA-H100-80GB-HBM3"
ROUNDING_GIB: Final = 0.005
"""vLLM prints memory with two decimals."""


@dataclass(frozen=True)
class MemoryRow:
    """One run whose settings are complete, and its estimate.

    Attributes
    ----------
    case
        Its name.
    budget
        The estimate from the run's settings alone.
    measured_gib
        Available KV cache memory in the log.
    measured_tokens
        GPU KV cache size in the log; None where it was not quoted.
    runner
        Model runner that its rules are of.
    """

    case: str
    budget: Budget
    measured_gib: float
    measured_tokens: int | None
    runner: str

    @property
    def error(self) -> float:
        """Signed error of the available KV memory, as a share of the measured."""
        return self.budget.available_kv_bytes / GIB / self.measured_gib - 1

    @property
    def error_gib(self) -> float:
        """Signed error of the available KV memory."""
        return self.budget.available_kv_bytes / GIB - self.measured_gib

    @property
    def promised_gib(self) -> float:
        """What is left of the estimate after the margin."""
        return (self.budget.available_kv_bytes - self.budget.margin_bytes) / GIB


@dataclass(frozen=True)
class TokenRow:
    """Tokens computed from the available memory that a log prints.

    Attributes
    ----------
    case
        Its name.
    fewest, most
        Tokens at both ends of the printed memory's rounding.
    measured
        GPU KV cache size in the log.
    """

    case: str
    fewest: int
    most: int
    measured: int

    @property
    def exact(self) -> bool:
        """Whether the printed tokens lie within the rounding."""
        return self.fewest <= self.measured <= self.most


def read_runs(name: str) -> list[dict[str, Any]]:
    """Return the runs of one file of logs."""
    return [json.loads(line) for line in (LOGS / name).read_text().splitlines()]


def memory_rows() -> list[MemoryRow]:
    """Return all H100 runs with their estimates."""
    return [_memory_row(run) for run in read_runs("h100_v019.jsonl")]


def other_rows() -> list[MemoryRow]:
    """Return runs of other GPUs and versions with their estimates; one gave a coefficient, the graphs of V2."""
    return [_memory_row(run) for run in read_runs("other_runs.jsonl")]


def later_rows() -> list[MemoryRow]:
    """Return runs of vLLM 0.20 to 0.26 with their estimates, most with a draft: lines of specdecode plan --batch."""
    return [_memory_row(run) for run in read_runs("later_runs.jsonl")]


def calibrated_rows(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Return those of GPUs whose terms public logs confirm."""
    return [row for row in rows if not row.budget.uncalibrated_gpu]


def mean_error_gib(rows: Sequence[MemoryRow]) -> float:
    """Return the mean absolute error of the available KV memory in GiB."""
    return sum(abs(row.error_gib) for row in rows) / len(rows)


def token_rows() -> list[TokenRow]:
    """Return the runs of all files that print memory and tokens, with full or latent attention alone.

    Left out are models guessed from the figures, and decode context
    parallelism, which the operator does not offer.
    """
    names = ("cases.jsonl", "h100_v019.jsonl", "other_runs.jsonl", "cold_and_warm.jsonl")
    runs = [run for name in names for run in read_runs(name)]
    return [_token_row(run) for run in runs if _tokens_can_be_compared(run)]


def mean_error(rows: Sequence[MemoryRow]) -> float:
    """Return the mean absolute error of the available KV memory, as a share."""
    return sum(abs(row.error) for row in rows) / len(rows)


def worst_row(rows: Sequence[MemoryRow]) -> MemoryRow:
    """Return the row with the largest absolute error."""
    return max(rows, key=lambda row: abs(row.error))


@dataclass(frozen=True)
class SizedRun:
    """Settings of a run as sizing takes them."""

    pair: Pair
    device: Device
    split: Parallelism


def run_pair(run: dict[str, Any]) -> SizedRun:
    """Return the settings of a run: the line of specdecode plan --batch, or the flags that it names."""
    if "case" in run:
        case = read_case(run["case"])
        if case.device is None:
            raise LookupError(run["id"])
        return SizedRun(case.pair, case.device, case.split)
    quantization = run["quantization"] or ""
    limits = EngineLimits(
        max_model_len=run["max_model_len"],
        max_num_seqs=run["max_num_seqs"],
        max_num_batched_tokens=run["max_num_batched_tokens"],
        block_size=run["block_size"] or 16,
        kv_cache_element_bytes=1 if run["kv_cache_dtype"] == "fp8" else None,
        memory_utilization_percent=100 * run["gpu_memory_utilization"],
        enforce_eager=run["enforce_eager"],
        min_concurrency=1,
        engine_version=run["vllm_version"],
        prefix_caching=False,
        dtype_bytes=_dtype_bytes(run),
    )
    geometry = find_geometry(run["model"]) or geometry_from_config(run["model"], run["model_config"])
    pair = Pair(geometry, _precision(quantization), None, None, "none", 0, limits)
    return SizedRun(pair, _device(run), _split(run))


def _memory_row(run: dict[str, Any]) -> MemoryRow:
    sized = run_pair(run)
    return MemoryRow(
        case=re.sub(r"^(h100v019|other|later)-", "", run["id"]),
        budget=estimate(sized.pair, sized.device, sized.split),
        measured_gib=run["observed"]["available_kv_gib"],
        measured_tokens=run["observed"].get("kv_cache_tokens"),
        runner=sized.pair.era.runner.value,
    )


def _dtype_bytes(run: dict[str, Any]) -> int:
    return DTYPE_BYTES[run.get("dtype", Dtype.AUTO)]


def _precision(quantization: str) -> Precision:
    names = {"fp8": Precision.FP8, "w8a8": Precision.INT8, "mxfp4": Precision.MXFP4}
    return next((precision for name, precision in names.items() if name in quantization), Precision.BF16)


def _device(run: dict[str, Any]) -> Device:
    """Return the GPU as the log has it, or the H100 of the catalogue."""
    if "gpu_total_gib" in run:
        return Device(run["gpu"], gib_to_bytes(run["gpu_total_gib"]), "the log")
    device = find_device(H100)
    if device is None:
        raise LookupError(H100)
    return device


def _split(run: dict[str, Any]) -> Parallelism:
    return Parallelism(run["tp"], run["pp"])


def _tokens_can_be_compared(run: dict[str, Any]) -> bool:
    observed, model = run["observed"], run["model_config"]
    return bool(
        observed.get("available_kv_gib")
        and observed.get("kv_cache_tokens")
        and model.get("attention") in ("full", "mla")
        and not model.get("inferred")
        and "dcp" not in run["id"]
    )


def _layers(run: dict[str, Any]) -> Iterator[LayerRun]:
    model = run["model_config"]
    element_bytes = 1 if str(run["kv_cache_dtype"]).startswith("fp8") else _dtype_bytes(run)
    if model["attention"] == "mla":
        # The latent vector is on every rank whole (v1/kv_cache_interface.py, MLAAttentionSpec).
        latent = model["kv_lora_rank"] + model["qk_rope_head_dim"]
        kind, heads, head_width, tensors = CacheKind("latent"), 1, latent, 1
    else:
        heads = max(1, model["num_key_value_heads"] // (run["tp"] or 1))
        kind, head_width, tensors = CacheKind("full"), model["head_dim"], 2
    token_bytes = tensors * heads * head_width * element_bytes
    for layers, of_draft in (
        (model["num_hidden_layers"], False),
        ((run["speculative"] or {}).get("draft_layers", 0), True),
    ):
        if layers:
            layer = KvLayer(
                kind,
                token_bytes=token_bytes,
                reach_tokens=0,
                head_width=head_width,
                element_bytes=element_bytes,
                of_draft=of_draft,
            )
            # A pipeline stage holds its part of the layers.
            yield LayerRun(layer, ceil_div(layers, run["pp"] or 1))


def _token_row(run: dict[str, Any]) -> TokenRow:
    observed = run["observed"]
    version = str(run["vllm_version"] or "").partition(" ")[0]
    settings = KvSettings(
        run["block_size"] or (64 if run["model_config"]["attention"] == "mla" else 16),
        run["max_num_batched_tokens"] or 8192,
        version if re.fullmatch(r"0\.\d+(\.\d+)?", version) else NEWEST_VERSION,
        async_scheduling=True,
        v2_runner=False,
        prefix_caching=True,
    )
    groups = stage_groups((tuple(_layers(run)),), settings)[0]
    length = observed.get("max_concurrency_len") or run["max_model_len"] or 8192

    def tokens(gib: float) -> int:
        return printed_tokens(groups, settings.version, pool_blocks([groups], [int(gib * GIB)]), length)

    memory = observed["available_kv_gib"]
    return TokenRow(
        run["id"], tokens(memory - ROUNDING_GIB), tokens(memory + ROUNDING_GIB), observed["kv_cache_tokens"]
    )


def figures() -> Iterator[Figure]:
    """Yield the errors of all cases in a few figures."""
    rows, others, tokens = memory_rows(), other_rows(), token_rows()
    published = "our aim; llm-d-planner publishes 6.62 for vLLM 0.19 on H100"
    yield Figure(
        "KV memory from flags alone, mean absolute error",
        100 * mean_error(rows),
        "%",
        at_most(3, published),
        f"{len(rows)} public logs, vLLM 0.19 on H100; they gave the few measured coefficients",
    )
    worst = worst_row(rows)
    yield Figure("its worst case", 100 * abs(worst.error), "%", None, worst.case)
    later = later_rows()
    confirmed = calibrated_rows(later)
    yield Figure(
        "KV memory from flags alone, later logs on A100 and H100, mean absolute error",
        mean_error_gib(confirmed),
        "GiB",
        at_most(0.3, "our aim"),
        f"{len(confirmed)} public logs, vLLM 0.20 to 0.26, most with a draft; terms from its source, not fitted",
    )
    for name, of in (("vLLM 0.19 on H100", rows), ("other GPUs and versions", others), ("later logs", later)):
        over = [row.case for row in of if row.promised_gib > row.measured_gib]
        yield Figure(
            f"more promised than was there, {name}", len(over), f"of {len(of)} logs", at_most(0), ", ".join(over)
        )
    inexact = [row.case for row in tokens if not row.exact]
    yield Figure(
        "KV tokens from logged memory, not exact",
        len(inexact),
        f"of {len(tokens)} logs",
        at_most(0),
        ", ".join(inexact),
    )


def _compared(rows: Sequence[MemoryRow]) -> Iterator[str]:
    yield f"{'case':42}{'runner':>8}{'log':>8}{'estimate':>10}{'error':>8}{'margin':>8}{'promised':>10}"
    for row in rows:
        available, margin = row.budget.available_kv_bytes / GIB, row.budget.margin_bytes / GIB
        yield (
            f"{row.case:42}{row.runner:>8}{row.measured_gib:8.2f}{available:10.2f}"
            f"{row.error_gib:+8.2f}{margin:8.2f}{row.promised_gib:10.2f}"
        )


def report() -> Iterator[str]:
    """Return the lines that this program prints: every case."""
    rows, tokens = memory_rows(), token_rows()
    yield "Available KV cache memory, GiB per GPU, vLLM 0.19.0 on H100 80GB"
    yield f"{'case':52}{'log':>8}{'estimate':>10}{'error':>9}{'promised':>10}{'log tokens':>12}{'tokens':>12}"
    for row in rows:
        available = row.budget.available_kv_bytes / GIB
        yield (
            f"{row.case:52}{row.measured_gib:8.2f}{available:10.2f}{row.error:+9.2%}{row.promised_gib:10.2f}"
            f"{row.measured_tokens or 0:12,}{row.budget.kv_cache_tokens:12,}"
        )
    worst = worst_row(rows)
    yield f"{len(rows)} cases: mean absolute error {mean_error(rows):.3%}; worst {worst.case} {worst.error:+.2%}"
    over = [row.case for row in rows if row.promised_gib > row.measured_gib]
    yield f"promised more than measured, after the margin: {', '.join(over) or 'none'}"
    yield ""
    yield "Other GPUs and versions, GiB per GPU; only the graphs of V2 come from one of these, the 8B"
    yield from _compared(other_rows())
    later = later_rows()
    confirmed = calibrated_rows(later)
    yield ""
    yield "Later logs, vLLM 0.20 to 0.26, GiB per GPU; by the settings that the log names"
    yield from _compared(later)
    yield f"A100 and H100: {len(confirmed)} cases, mean absolute error {mean_error_gib(confirmed):.2f} GiB"
    yield ""
    inexact = [f"{row.case} ({row.fewest}-{row.most}, log {row.measured})" for row in tokens if not row.exact]
    yield f"Tokens from the logged memory: {len(tokens) - len(inexact)} of {len(tokens)} exact to the log's rounding"
    yield f"not exact: {', '.join(inexact) or 'none'}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")
