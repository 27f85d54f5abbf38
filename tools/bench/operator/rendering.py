"""Measures the time to render all objects of a SpecDecodeDeployment from its plan."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from bench.figures import Figure
from specdecode_operator.api.deployment import KIND, Key, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.children import plan_data, render_children
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.planning import full_matrix, make_plan
from specdecode_operator.deployment.validation import valid_facts

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
NODES: Final = (
    *(NodeFacts(f"h100-{number}", "NVIDIA-H100-80GB-HBM3", 8) for number in (0, 1)),
    *(NodeFacts(f"h200-{number}", "NVIDIA-H200", 8) for number in (0, 1)),
)
ROUNDS: Final = 200


def rendering_s(spec: dict[str, Any]) -> float:
    """Return the median time to render all objects of a spec."""
    facts = valid_facts(SpecDecodeDeploymentSpec.model_validate(spec))
    plan = make_plan(facts, NODES, None, groups=True)
    if isinstance(plan, Blocked):
        raise LookupError(plan.message)  # noqa: TRY004  not a wrong type: no node fits
    texts = plan_data(plan, full_matrix(facts, NODES, plan))
    facts = facts.at(plan.chosen.target_precision, plan.chosen.draft_precision)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        render_children(Key("default", "llama"), "uid", facts, plan, texts)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def figures() -> Iterator[Figure]:
    """Yield the median of all examples, and the slowest."""
    bodies = {path.stem: body for path in EXAMPLES.glob("*.yaml") for body in yaml.safe_load_all(path.read_text())}
    times = {name: 1000 * rendering_s(body["spec"]) for name, body in bodies.items() if body["kind"] == KIND}
    slowest = max(times, key=times.__getitem__)
    of = f"plan given, median of {ROUNDS} each"
    yield Figure("rendering of all objects, median example", statistics.median(times.values()), "ms", None, of)
    yield Figure("rendering of all objects, slowest example", times[slowest], "ms", None, f"{slowest}; {of}")
