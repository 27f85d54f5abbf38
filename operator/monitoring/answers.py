"""What a Prometheus answers to the question for a figure of one deployment."""

import math
from typing import Any, Final

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.monitoring.measures import DEPLOYMENT_LABEL, Scope, Values
from specdecode_operator.problems import printable, shown

MOST_BYTES: Final = 2**20
_MOST_SERIES: Final = 1000
"""More than positions of a draft."""


class UnusableAnswerError(ValueError):
    """A Prometheus did not answer what it was asked."""


def check_answer(text: bytes) -> None:
    """Refuse what is no answer of a Prometheus to an instant query.

    Raises
    ------
    UnusableAnswerError
        It is something else, or an error.
    """
    try:
        answer = parse_json(text, MOST_BYTES)
    except UnreadableTextError as error:
        raise UnusableAnswerError(f"what answers is no Prometheus: its answer {error}") from error
    if not isinstance(answer, dict) or answer.get("status") != "success":
        said = answer.get("error") if isinstance(answer, dict) else None
        raise UnusableAnswerError(f"it says {printable(shown(said))}" if said else "what answers is no Prometheus")
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) and data.get("resultType") == "vector" else None
    if not isinstance(result, list) or len(result) > _MOST_SERIES:
        raise UnusableAnswerError("it does not answer with a vector: what answers is no Prometheus")


def read_series(result: list[Any], scope: Scope) -> Values:
    """Return the values of the series of an answer, which are of one deployment; NaN and infinity say nothing.

    Raises
    ------
    UnusableAnswerError
        A series has no value, or is about something else.
    """
    values: Values = {}
    for series in result:
        label, value = _sample(series, scope)
        if math.isfinite(value):
            values[label] = value
    return values


def _sample(series: Any, scope: Scope) -> tuple[str, float]:
    """Return the value of a series, and the label that tells it from others of the figure."""
    try:
        labels, (_, text) = dict(series["metric"]), series["value"]
        value = float(text)
    except (TypeError, KeyError, ValueError) as error:
        raise UnusableAnswerError(
            "it answers with a series that has no value: what answers is no Prometheus"
        ) from error
    found = (labels.pop("namespace", None), labels.pop(DEPLOYMENT_LABEL, None))
    if found != (scope.namespace, scope.deployment):
        named = printable("/".join(shown(each) for each in found))
        raise UnusableAnswerError(
            f"it answers with series of {named}: look at what rewrites labels or queries between it and you"
        )
    return (str(next(iter(labels.values()))) if labels else ""), value
