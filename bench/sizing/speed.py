"""How fast sizing is: estimates a second on one core, import, and a whole quantization matrix."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from bench.figures import Figure, at_least, at_most
from specdecode_operator.sizing.base.devices import Device, find_device
from specdecode_operator.sizing.choice.node_placement import GpuPool
from specdecode_operator.sizing.choice.quantization_matrix import quantization_matrix
from specdecode_operator.sizing.families.catalogue import find_geometry
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, estimate
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.vocabulary import Precision

PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
ROUNDS: Final = 5
ESTIMATES: Final = 2000
IMPORT: Final = (
    "import time; start = time.perf_counter(); import specdecode_operator.sizing.memory.budget; "
    "print(time.perf_counter() - start)"
)


def _model(size: str) -> ModelGeometry:
    name = f"meta-llama/Llama-3.1-{size}-Instruct"
    geometry = find_geometry(name)
    if geometry is None:
        raise LookupError(name)
    return geometry


def _device(product: str) -> Device:
    device = find_device(product)
    if device is None:
        raise LookupError(product)
    return device


def _pair() -> Pair:
    limits = EngineLimits(
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        block_size=16,
        kv_cache_element_bytes=None,
        memory_utilization_percent=92,
        enforce_eager=False,
        min_concurrency=1,
    )
    return Pair(_model("70B"), Precision.FP8, _model("8B"), Precision.BF16, "draft_model", 5, limits)


def _questions(pair: Pair, first: int) -> Iterator[tuple[Pair, Device]]:
    """Yield pairs and devices of which no two are equal, so that no cache can answer for estimate."""
    devices = [_device(product) for product in PRODUCTS]
    for number in range(first, first + ESTIMATES):
        limits = replace(
            pair.limits,
            max_model_len=2048 + 16 * (number // 2),
            max_num_seqs=16 + number % 509,
            memory_utilization_percent=80 + number % 15,
        )
        yield replace(pair, limits=limits), devices[number % 2]


def estimates_per_second() -> float:
    """Return the best rate of some rounds, of target and draft at tensor 2."""
    pair, rates = _pair(), []
    for turn in range(ROUNDS):
        questions = list(_questions(pair, turn * ESTIMATES))
        start = time.perf_counter()
        for question, device in questions:
            estimate(question, device, 2)
        rates.append(ESTIMATES / (time.perf_counter() - start))
    return max(rates)


def import_s() -> float:
    """Return the shortest time that importing the budget takes in a fresh process."""
    command = [sys.executable, "-c", IMPORT]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(ROUNDS))  # noqa: S603 (our own text)


def matrix_s() -> tuple[float, int]:
    """Return the first time that a full matrix on both products takes, and its rows."""
    start = time.perf_counter()
    rows = quantization_matrix(_pair(), [GpuPool(product, 8) for product in PRODUCTS])
    return time.perf_counter() - start, len(rows)


def figures() -> Iterator[Figure]:
    """Yield the first full matrix, the rate of estimates, and the time of the import."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    seconds, rows = matrix_s()
    yield Figure("full matrix, first call", 1000 * seconds, "ms", at_most(20), f"{rows} rows")
    source = "our aim; llm-d-planner's 15-26 us, without a draft, are 38,000 to 67,000"
    remark = f"target and draft, geometry there, best of {ROUNDS}"
    yield Figure("estimates on one core", estimates_per_second(), "1/s", at_least(50_000, source), remark)
    yield Figure("import of sizing", 1000 * import_s(), "ms", at_most(100), f"fresh process, best of {ROUNDS}")
