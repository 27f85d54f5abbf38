"""How fast sizing is: estimates a second on one core, import, and a whole quantization matrix."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Final

from bench.figures import Figure, at_least, at_most
from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Pair, estimate
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.quantization_matrix import quantization_matrix
from tests.support.llama import ARTICLE_LIMITS

PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
ROUNDS: Final = 7
ESTIMATES: Final = 2000
SWEPT_REQUESTS: Final = 509
"""Numbers of requests that a sweep comes back to: what such an engine holds beside the KV cache is remembered."""
NEW_REQUESTS: Final = 4001
"""So many that none is remembered when it comes back."""
IMPORT: Final = (
    "import time; start = time.process_time(); import specdecode_operator.sizing.memory.budget; "
    "print(time.process_time() - start)"
)


def _model(size: str) -> ModelGeometry:
    name = f"meta-llama/Llama-3.1-{size}-Instruct"
    geometry = find_geometry(name)
    if geometry is None:
        raise LookupError(name)
    return geometry


def a_device(product: str) -> Device:
    """Return a GPU of the catalogue."""
    device = find_device(product)
    if device is None:
        raise LookupError(product)
    return device


def a_pair() -> Pair:
    """Return a 70B target with an 8B draft."""
    return Pair(_model("70B"), Precision.FP8, _model("8B"), Precision.BF16, "draft_model", 5, ARTICLE_LIMITS)


def _questions(pair: Pair, first: int, most_requests: int) -> Iterator[tuple[Pair, Device]]:
    """Yield pairs and devices of which no two are equal, with so many numbers of requests in turn."""
    devices = [a_device(product) for product in PRODUCTS]
    for number in range(first, first + ESTIMATES):
        limits = replace(
            pair.limits,
            max_model_len=2048 + 16 * (number // 2),
            max_num_seqs=16 + number % most_requests,
            memory_utilization_percent=80 + number % 15,
        )
        yield replace(pair, limits=limits), devices[number % 2]


def estimates_per_second(requests: int = SWEPT_REQUESTS) -> float:
    """Return the best rate of some rounds, of target and draft at tensor 2, by CPU time."""
    pair, rates = a_pair(), []
    for turn in range(ROUNDS):
        questions = list(_questions(pair, turn * ESTIMATES, requests))
        start = time.process_time()
        for question, device in questions:
            estimate(question, device, 2)
        rates.append(ESTIMATES / (time.process_time() - start))
    return max(rates)


def import_s() -> float:
    """Return the least CPU time that importing the budget takes in a fresh process."""
    command = [sys.executable, "-c", IMPORT]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(ROUNDS))  # noqa: S603 (our own text)


def matrix_s() -> tuple[float, int]:
    """Return the CPU time of a full matrix on both products, and its rows."""
    start = time.process_time()
    rows = quantization_matrix(a_pair(), [GpuPool(product, 8) for product in PRODUCTS])
    return time.process_time() - start, len(rows)


def first_matrix_s() -> tuple[float, int]:
    """Return the shortest that it takes in a process that has sized nothing before."""
    found = []
    for _ in range(ROUNDS):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            found.append(fresh.submit(matrix_s).result())
    return min(found)


def figures() -> Iterator[Figure]:
    """Yield the first full matrix, the rate of estimates, and the time of the import."""
    seconds, rows = first_matrix_s()
    of = f"{rows} rows, fresh process, best of {ROUNDS}"
    yield Figure("full matrix, first call", 1000 * seconds, "ms of CPU", at_most(20), of)
    source = "our aim; llm-d-planner's 15-26 us, without a draft, are 38,000 to 67,000"
    remark = f"target and draft, geometry there, no two equal, {SWEPT_REQUESTS} numbers of requests, best of {ROUNDS}"
    yield Figure("estimates on one core", estimates_per_second(), "1/s of CPU", at_least(50_000, source), remark)
    remark = f"as above, with {NEW_REQUESTS:,} numbers of requests: of no engine is anything remembered"
    new = estimates_per_second(NEW_REQUESTS)
    yield Figure("estimates on one core, of new engines", new, "1/s of CPU", None, remark)
    yield Figure("import of sizing", 1000 * import_s(), "ms of CPU", at_most(100), f"fresh process, best of {ROUNDS}")
