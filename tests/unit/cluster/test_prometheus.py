"""Validate responses of a Prometheus server."""

import json
from typing import Any

import pytest

from specdecode_operator.cluster.prometheus import UnusableAnswerError, check_answer, read_series
from specdecode_operator.stats.measures import Scope, Values

SCOPE = Scope(namespace="models", deployment="llama")
OURS = {"namespace": "models", "specdecode_deployment": "llama"}


def answer(*series: Any, kind: str = "vector") -> bytes:
    """An answer with these series."""
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": list(series)}}).encode()


def series(value: Any, **labels: str) -> dict[str, Any]:
    """A series of the deployment."""
    return {"metric": {**OURS, **labels}, "value": [1e9, value]}


def read_answer(text: bytes, scope: Scope) -> Values:
    """What is said of an answer, of which the client takes the series."""
    check_answer(text)
    return read_series(json.loads(text)["data"]["result"], scope)


def test_values_are_keyed_by_their_distinguishing_label() -> None:
    assert read_answer(answer(series("0.5")), SCOPE) == {"": 0.5}
    both = answer(series("0.7", position="0"), series("0.5", position="1"))
    assert read_answer(both, SCOPE) == {"0": 0.7, "1": 0.5}


def test_empty_nan_and_infinite_values_are_left_out() -> None:
    for empty in (answer(), answer(series("NaN")), answer(series("+Inf"), series("-Inf", position="1"))):
        assert read_answer(empty, SCOPE) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"<html>", "not a Prometheus"),
        (b"[]", "not a Prometheus"),
        (b'{"status":"error","error":"query timed out\\u001b[2J"}', "reports query timed out"),
        (b'{"status":"success"}', "vector"),
        (answer(series("1"), kind="matrix"), "vector"),
        (answer(*[series("1")] * 1001), "vector"),
        (answer(series("one")), "without a value"),
        (answer(series(None)), "without a value"),
        (answer({"metric": OURS}), "without a value"),
        (answer("text"), "without a value"),
        (answer(series("1", specdecode_deployment="other")), "series of models/other"),
        (answer({"metric": {}, "value": [0, "1"]}), "series of null/null"),
        (b'{"status":"success","data":' + b"[" * 5000, "not a Prometheus"),
    ],
)
def test_unexpected_prometheus_response_is_rejected(text: bytes, said: str) -> None:
    with pytest.raises(UnusableAnswerError, match=said) as raised:
        read_answer(text, SCOPE)
    assert str(raised.value).isprintable()
