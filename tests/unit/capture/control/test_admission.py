"""A workload that no load can be made of is refused as the API server refuses it: by the rules of the CRD."""

from typing import Any

import pytest

from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.capture.preconditions import workload_blocked

CLOSED = {"name": "a", "pattern": "Closed", "concurrency": 2, "requests": 5}
RATE = {"name": "a", "pattern": "Constant", "requestsPerSecond": "2", "requests": 5}
CONFIG_MAP = {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}


def _phase(**fields: Any) -> dict[str, Any]:
    return {"phases": [{name: value for name, value in {**CLOSED, **fields}.items() if value is not None}]}


def _blocked(workload: dict[str, Any]) -> str:
    blocked = workload_blocked(SpecDecodeCaptureSpec.model_validate({"deployment": "llama", "workload": workload}))
    if blocked is None:
        return ""
    assert (blocked.reason, blocked.permanent) == ("Invalid", True)
    return blocked.message


@pytest.mark.parametrize(
    "workload",
    [
        {},
        _phase(),
        {"phases": [CLOSED, {**RATE, "name": "b"}]},
        _phase(pattern="Multiturn", turns=3, thinkSeconds=1),
        {"prompts": {"dataset": CONFIG_MAP}},
        {"prompts": {"synthetic": {"promptTokens": 8, "sharedPrefixTokens": 8}}},
    ],
)
def test_a_workload_that_can_be_sent(workload: dict[str, Any]) -> None:
    assert _blocked(workload) == ""


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (_phase(concurrency=None), "phases[0].concurrency: is missing: pattern Closed needs it"),
        (_phase(turns=3), "phases[0].turns: 3: pattern Closed does not use it"),
        (
            _phase(durationSeconds=9),
            "phases[0].durationSeconds: 9: a phase ends after a time",
        ),
        (_phase(requests=None), "phases[0].durationSeconds: is missing: a phase ends"),
        (_phase(name="warmup"), "phases[0].name: warmup: is what the requests before the first phase are called"),
        ({"phases": [CLOSED, RATE]}, "two phases have one name"),
        (_phase(pattern="Staircase", concurrency=None), "phases[0].stepSeconds: is missing: pattern Staircase needs"),
        (
            {"prompts": {"synthetic": {"promptTokens": 8, "sharedPrefixTokens": 9}}},
            "prompts.synthetic.sharedPrefixTokens: 9: longer than the prompts with promptTokens 8",
        ),
        ({"prompts": {}}, "prompts.synthetic: is missing: prompts come from one place"),
        (
            {"prompts": {"dataset": {**CONFIG_MAP, "path": "../a"}}},
            "prompts.dataset.path: ../a: is no path inside the volume",
        ),
        ({"temperatures": [{"temperature": "0.5", "sharePercent": 30}]}, "the shares add up to 30"),
    ],
)
def test_a_workload_that_cannot_be_sent(workload: dict[str, Any], message: str) -> None:
    assert _blocked(workload).startswith("spec.workload.")
    assert message in _blocked(workload)
