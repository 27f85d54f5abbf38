"""Captures by phase at /metrics."""

from specdecode_operator.api.capture import KIND
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.handlers.metrics import OperatorMetrics
from tests.support.captures import capture


def test_captures_are_counted_by_phase() -> None:
    cache = Cache()
    for name, phase in (("a", "Loading"), ("b", "Loading"), ("c", None)):
        cache.put_parent(KIND, capture(name=name, uid=name, status={"phase": phase} if phase else {}))
    (family,) = (each for each in OperatorMetrics(cache).collect() if each.name == "specdecode_captures")
    counts = {sample.labels["phase"]: sample.value for sample in family.samples}
    assert counts["Loading"] == 2
    assert counts["Failed"] == 0
    assert sum(counts.values()) == 2, "one without a status has no phase yet"
