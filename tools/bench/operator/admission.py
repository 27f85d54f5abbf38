"""Measures the CPU time of admission reviews for all examples, and for an object that fits on no node."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from bench.figures import Figure
from specdecode_operator.api.deployment import KIND
from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.webhook import answer

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
ROUNDS: Final = 200


def answer_s(body: dict[str, Any]) -> tuple[float, float]:
    """Return the median and the longest CPU time of the review of a new object."""
    request = {"uid": "u", "operation": "CREATE", "namespace": "default", "object": body}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        answer(review, Terms())
        times.append(time.process_time() - start)
    return statistics.median(times), max(times)


def figures() -> Iterator[Figure]:
    """Yield the median of all examples, and the slowest."""
    bodies = {path.stem: body for path in EXAMPLES.glob("*.yaml") for body in yaml.safe_load_all(path.read_text())}
    large = bodies["llama-405b-two-nodes"]
    bodies["llama-405b-two-nodes, of one GPU"] = {**large, "spec": {**large["spec"], "parallelism": {"tensor": 1}}}
    times = {name: answer_s(body) for name, body in bodies.items() if body["kind"] == KIND}
    slowest = max(times, key=times.__getitem__)
    of = f"CPU time, median of {ROUNDS} each"
    middle = 1000 * statistics.median(median for median, _ in times.values())
    yield Figure("answer to an admission review, median example", middle, "ms", None, of)
    median, longest = times[slowest]
    remark = f"{slowest}; {of}, longest {1000 * longest:.1f} ms"
    yield Figure("answer to an admission review, slowest example", 1000 * median, "ms", None, remark)
