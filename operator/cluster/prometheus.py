"""Query a Prometheus server for figures, with time and size limits, and parse its untrusted answers.

NaN and infinity count as no value. The module is imported lazily: prometheus_api_client takes 0.9 s to import.
"""

import io
import math
import os
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import requests
import urllib3.exceptions
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.utils import get_environ_proxies

from specdecode_operator.cluster.bounded_fetch import NoAnswerError, WrongAnswerError, in_time, place_of, unreachable
from specdecode_operator.problems import printable, shown
from specdecode_operator.stats.figures import Figure
from specdecode_operator.stats.measures import DEPLOYMENT_LABEL, Scope, Values
from specdecode_operator.untrusted import UnreadableTextError, parse_json

MOST_BYTES: Final = 2**20
_MOST_SERIES: Final = 1000
"""More than positions of a draft."""


class UnusableAnswerError(ValueError):
    """The response of a Prometheus cannot be used."""


def check_answer(text: bytes) -> None:
    """Raise UnusableAnswerError unless a text is the response to an instant query."""
    try:
        answer = parse_json(text, MOST_BYTES)
    except UnreadableTextError as error:
        raise UnusableAnswerError(f"is not a Prometheus server: its response {error}") from error
    if not isinstance(answer, dict) or answer.get("status") != "success":
        said = answer.get("error") if isinstance(answer, dict) else None
        raise UnusableAnswerError(f"reports {printable(shown(said))}" if said else "is not a Prometheus server")
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) and data.get("resultType") == "vector" else None
    if not isinstance(result, list) or len(result) > _MOST_SERIES:
        raise UnusableAnswerError("is not a Prometheus server: its response has no vector")


def read_series(result: list[Any], scope: Scope) -> Values:
    """Return the finite values of series of one deployment by label, or raise UnusableAnswerError."""
    values: Values = {}
    for series in result:
        label, value = _sample(series, scope)
        if math.isfinite(value):
            values[label] = value
    return values


def _sample(series: Any, scope: Scope) -> tuple[str, float]:
    try:
        labels, (_, text) = dict(series["metric"]), series["value"]
        value = float(text)
    except (TypeError, KeyError, ValueError) as error:
        raise UnusableAnswerError("is not a Prometheus server: its response has a series without a value") from error
    found = (labels.pop("namespace", None), labels.pop(DEPLOYMENT_LABEL, None))
    if found != (scope.namespace, scope.deployment):
        named = printable("/".join(shown(each) for each in found))
        raise UnusableAnswerError(f"returns series of {named}: check the proxies that rewrite labels or queries")
    return (str(next(iter(labels.values()))) if labels else ""), value


_REFUSALS: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_TIMEOUTS: Final = (requests.Timeout, urllib3.exceptions.TimeoutError)


class _ServerFailureError(UnusableAnswerError):
    """The server fails, for example under load, and so do other queries."""


def ask_prometheus(
    url: str, token: str | None, scope: Scope, figures: Sequence[Figure], *, asks_for: str = "--token-file"
) -> dict[str, Values]:
    """Return the figures of a Prometheus, or raise NoAnswerError."""
    values: dict[str, Values] = {}
    asked = f"{url.rstrip('/')}/api/v1/query"
    try:
        with _client(url, token, asks_for) as client:
            for figure in figures:
                result = in_time(asked, partial(_ask, client, figure.promql(scope)))
                values[figure.name] = read_series(result, scope)
    except _ServerFailureError as error:
        raise NoAnswerError(f"{place_of(asked)}: {error}") from error
    except UnusableAnswerError as error:
        raise WrongAnswerError(f"{place_of(asked)}: {error}") from error
    except (OSError, ValueError) as error:
        raise unreachable(asked, _first(error)) from error
    return values


def _client(url: str, token: str | None, asks_for: str) -> PrometheusConnect:
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError("does not begin with http:// or https://")
    session = requests.Session()
    # Settings of the environment but ~/.netrc, whose password would replace the token.
    session.trust_env = False
    session.proxies = get_environ_proxies(url)
    session.verify = os.environ.get("SSL_CERT_FILE") or True
    session.stream = True
    session.hooks["response"] = [partial(_check, asks_for)]
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    # Without retries, so that a timeout is reported as one.
    return PrometheusConnect(url.rstrip("/"), headers=headers, retry=urllib3.Retry(0, read=False), session=session)


def _ask(client: PrometheusConnect, query: str, seconds: int) -> Any:
    try:
        return client.custom_query(query, timeout=seconds)
    except _TIMEOUTS as error:
        raise TimeoutError from error
    except urllib3.exceptions.ProtocolError as error:
        raise UnusableAnswerError("is not a Prometheus server: its response is incomplete") from error


def _check(asks_for: str, response: requests.Response, **_: Any) -> None:
    """Check a response before redirections are followed, or unbounded content is read."""
    status = response.status_code
    try:
        content = _read(status, response, asks_for)
    except UnusableAnswerError as error:
        # The rest is not read; until the connection is closed, the server may be stuck in sending it.
        response.close()
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _ServerFailureError(str(error)) from error
        raise
    response.raw, response.encoding = io.BytesIO(content), "utf-8-sig"


def _read(status: int, response: requests.Response, asks_for: str) -> bytes:
    if status in _REFUSALS:
        raise UnusableAnswerError(
            f"rejects the request with HTTP {status}: set {asks_for}, or use a token with the permission"
        )
    content: bytes = response.raw.read(MOST_BYTES + 1, decode_content=False)
    if len(content) > MOST_BYTES:
        raise UnusableAnswerError(f"answers with more than {MOST_BYTES} bytes")
    # The body explains what is wrong with a query.
    if status != HTTPStatus.OK and not content.startswith(b'{"status":"error"'):
        raise UnusableAnswerError(f"answers with HTTP {status}: is this its URL?")
    check_answer(content)
    return content


def _first(error: BaseException) -> BaseException:
    """Return the root cause: the other messages have the query, and Python names."""
    inner = error.__cause__ or error.__context__ or (error.args[-1] if error.args else None)
    return _first(inner) if isinstance(inner, BaseException) and str(inner) else error
