"""How long the admission webhook takes for an answer: of every example, and of what fits nowhere."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import yaml

from specdecode_operator.admission.judgement import Terms
from specdecode_operator.admission.review import answer
from specdecode_operator.api.deployment import KIND

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
ROUNDS: Final = 200


def answer_s(body: dict[str, Any]) -> tuple[float, float]:
    """Return the median and the longest CPU time of answers to the creation of an object."""
    request = {"uid": "u", "operation": "CREATE", "namespace": "default", "object": body}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        answer(review, Terms())
        times.append(time.process_time() - start)
    return statistics.median(times), max(times)


def main() -> None:
    """Print the figures of each, the slowest last."""
    bodies = {path.stem: body for path in EXAMPLES.glob("*.yaml") for body in yaml.safe_load_all(path.read_text())}
    large = bodies["llama-405b-two-nodes"]
    bodies["llama-405b-two-nodes, of one GPU"] = {**large, "spec": {**large["spec"], "parallelism": {"tensor": 1}}}
    times = {name: answer_s(body) for name, body in bodies.items() if body["kind"] == KIND}
    for name, (median, longest) in sorted(times.items(), key=lambda entry: entry[1]):
        figures = f"median of {ROUNDS}: {median * 1000:.1f} ms, longest: {longest * 1000:.1f} ms"
        sys.stdout.write(f"answering a review of {name}, CPU time, {figures}\n")


if __name__ == "__main__":
    main()
