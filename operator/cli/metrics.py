"""`specdecode metrics`: current metrics of running engines, from /metrics or Prometheus, with the same definitions."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Final, NamedTuple

import httpx
import typer

from specdecode_operator.cli.kubectl import Kubectl, KubectlError, with_kubectl
from specdecode_operator.cli.options import TableOrData, ended, fail
from specdecode_operator.cli.outputs import Output, print_data
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError, open_to_read
from specdecode_operator.cluster.bounded_fetch import DEADLINE_S, NoAnswerError, in_time, place_of, unreachable
from specdecode_operator.cluster.prometheus import ask_prometheus
from specdecode_operator.cluster.resources import DEPLOYMENT_LABEL, OWNED_SELECTOR
from specdecode_operator.problems import shown
from specdecode_operator.stats import measures
from specdecode_operator.stats.figures import FIGURES, TPOT_LIMIT, TTFT_LIMIT, Figure

_MOST_BYTES: Final = 4 * 2**20  # of a page of metrics


class FigureOutput(Output):
    """A metric of docs/reference/metrics.md."""

    name: str
    """Name of the metric, as in its recorded series."""
    unit: str
    """Unit; empty if the metric has none."""
    value: float | None
    """Null if the divisor was zero or the engines do not report it."""
    by_position: dict[str, float] | None
    """Values by draft position, from 0; null for metrics without positions."""


class MetricsOutput(Output):
    """Metrics of one deployment."""

    source: str
    """Deployment, engine URLs or Prometheus that was read."""
    over_seconds: float
    """Length of the measurement interval."""
    engines: int | None
    """Number of engines that answered both reads; null for Prometheus."""
    left_out: list[str]
    """Engines that did not answer, with the reason."""
    figures: list[FigureOutput]
    """Metrics in the order of docs/reference/metrics.md."""


Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="SpecDecodeDeployment whose pods are read through kubectl.")
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="URL", help="Read this engine instead of pods. May be repeated."),
]
Prometheus = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Query this Prometheus instead of pods. Its series need the label specdecode_deployment."
    ),
]
Over = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=86_400,
        metavar="SECONDS",
        help="Measurement interval. Defaults to 30 seconds for engines and 300 for Prometheus.",
    ),
]


_PORTS: Final = {"http": "", "https": "https:"}
"""Port names of engines, and the prefix of the pod name in the API server's proxy path."""


class Engine(NamedTuple):
    """An engine, and a function that reads its /metrics."""

    name: str
    read: Callable[[], str]


def _engines(kubectl: Kubectl, name: str | None, urls: Sequence[str]) -> list[Engine]:
    """Return the engines at these URLs, or the ready ones of a SpecDecodeDeployment, read through the API server."""
    if name is None:
        return [
            Engine(place_of(url), lambda url=url: _fetch(f"{url.rstrip('/')}/metrics").decode(errors="replace"))  # type: ignore[misc]
            for url in urls
        ]
    engines = []
    for pod in kubectl.items("pods", f"--selector={OWNED_SELECTOR},{DEPLOYMENT_LABEL}={name}"):
        conditions = (pod.get("status") or {}).get("conditions") or []
        ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
        ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
        port = next((port for port in ports if port.get("name") in _PORTS), None)
        if ready and port is not None:
            pod_name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            address = f"{_PORTS[port['name']]}{pod_name}:{port['containerPort']}"
            path = f"/api/v1/namespaces/{namespace}/pods/{address}/proxy/metrics"
            asked = ("get", "--raw", path, f"--request-timeout={DEADLINE_S}s")
            engines.append(Engine(pod_name, partial(kubectl.short_text, *asked, most_bytes=_MOST_BYTES)))
    return engines


def _fetch(url: str) -> bytes:
    """Return the content of a URL, without redirections or decompression, or raise NoAnswerError."""
    return in_time(url, partial(_read, url))


def _read(url: str, seconds: int) -> bytes:
    content = bytearray()
    try:
        with httpx.stream("GET", url, headers={"Accept-Encoding": "identity"}, timeout=seconds) as response:
            if response.status_code != httpx.codes.OK:
                raise NoAnswerError(f"{place_of(url)}: answers with HTTP {response.status_code}: is this its URL?")
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise NoAnswerError(f"{place_of(url)}: answers with more than {_MOST_BYTES} bytes")
    except httpx.TimeoutException as error:
        raise TimeoutError from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from error
    return bytes(content)


def _look(engines: Iterable[Engine], names: frozenset[str], left_out: dict[str, str]) -> dict[str, measures.Page]:
    pages = {}
    for engine in engines:
        try:
            pages[engine.name] = measures.read_page(engine.read(), names, time.monotonic())
        except (NoAnswerError, KubectlError, measures.UnreadablePageError) as error:
            left_out[engine.name] = str(error)
    return pages


_OVER_ENGINES_S: Final = 30
_OVER_PROMETHEUS_S: Final = 300
_LONGEST_TOKEN: Final = 16 * 1024
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@with_kubectl
def metrics_command(  # noqa: PLR0913  each is an option
    kubectl: Kubectl,
    *,
    name: Name = None,
    engine: Engines = None,
    prometheus: Prometheus = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the bearer token for Prometheus.")
    ] = None,
    over: Over = None,
    ttft_limit: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Report the share of requests with TTFT within this limit. Use a bucket of vLLM's histogram, "
            "such as 0.5.",
        ),
    ] = None,
    tpot_limit: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="The same for the time per output token (TPOT), such as 0.05."),
    ] = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="Output format.")] = TableOrData.TABLE,
) -> None:
    """Print metrics of running engines: tokens, latencies, acceptance, current K, prefix and KV cache.

    The figures cover the time between two reads of the engines. With --prometheus,
    they cover the time up to now.

    For example: specdecode metrics llama-70b -n models --over 60

    Exits with 0, or 2 when no engine answers or the cluster cannot be reached.
    """
    _check(name, kubectl.namespace, engine, prometheus, token_file)
    figures = list(_figures({TTFT_LIMIT: ttft_limit, TPOT_LIMIT: tpot_limit}))
    with ended(NoAnswerError):
        if prometheus:
            found = _from_prometheus(
                prometheus, token_file, (kubectl.namespace, name), figures, over or _OVER_PROMETHEUS_S
            )
        else:
            found = _from_engines(kubectl, name, engine or [], figures, over or _OVER_ENGINES_S)
    known = {each.name: each.value for each in found.figures}
    for what, limit in (("time_to_first_token", ttft_limit), ("time_per_output_token", tpot_limit)):
        if limit is not None and known[f"{what}_within_limit"] is None and known[f"{what}_p50"] is not None:
            why = f"{limit:g} is not a bucket of the {what} histogram: use an le value from /metrics"
            say_line(f"note: {why}", err=True)
    if output is not TableOrData.TABLE:
        print_data(found, output)
        return
    for left_out in found.left_out:
        say_line(f"left out: {left_out}", err=True)
    say(_table(found))


def _check(
    name: str | None, namespace: str | None, engine: list[str] | None, prometheus: str | None, token_file: str | None
) -> None:
    if bool(engine) == bool(name) or (engine and prometheus):
        fail("NAME, --engine: set either NAME or --engine; --prometheus needs NAME")
    if prometheus and not namespace:
        fail("--namespace: required with --prometheus, which does not use the kubeconfig")
    if token_file and not prometheus:
        fail("--token-file: requires --prometheus")
    for option, value in (("NAME", name), ("--namespace", namespace)):
        if value is not None and not _NAME.fullmatch(value):
            fail(f"{option}: {shown(value)} is not a Kubernetes name: use lower-case letters, digits, - and .")


def _figures(limits: Mapping[str, float | None]) -> Iterator[Figure]:
    """Yield the figures, with limits filled in. Figures without a given limit are omitted."""
    for figure in FIGURES:
        if not isinstance(figure.measure, measures.Within):
            yield figure
        elif (limit := limits[figure.measure.limit]) is not None:
            yield replace(figure, measure=replace(figure.measure, limit=str(limit)))


def _table(found: MetricsOutput) -> str:
    asked = "" if found.engines is None else f" of {found.engines} engine{'s' if found.engines != 1 else ''}"
    lines = [f'metrics{asked} over {found.over_seconds:g} s (definitions in the documentation: "Metrics")']
    width = max(len(each.name) for each in found.figures)
    for each in found.figures:
        numbers = (each.by_position or {}).values() if each.value is None else [each.value]
        told = " ".join(f"{value:.4g}" for value in numbers)
        lines.append(f"{each.name:<{width}}  {told or '-'} {each.unit if told else ''}".rstrip())
    return "\n".join(lines)


def _from_prometheus(
    url: str, token_file: str | None, deployment: tuple[str | None, str | None], figures: Sequence[Figure], over_s: int
) -> MetricsOutput:
    token, (namespace, name) = None, deployment
    if token_file is not None:
        try:
            with open_to_read(token_file) as stream:
                token = stream.read(_LONGEST_TOKEN + 1).decode("ascii").strip()
        except DocumentError as error:
            fail(f"--token-file: {error}")
        except (OSError, UnicodeDecodeError):
            token = ""
        if not token.isprintable() or not token or " " in token or len(token) > _LONGEST_TOKEN:
            fail(f"--token-file: {shown(token_file)}: contains no token: write it on one line, without spaces")
    values = ask_prometheus(
        url, token, measures.Scope(window=f"{over_s}s", namespace=namespace, deployment=name), figures
    )
    if not any(values.values()):
        raise NoAnswerError(
            f"{place_of(url)}: no series with namespace={namespace} and specdecode_deployment={name}:"
            ' configure Prometheus to scrape the engines (documentation: "Monitor")'
        )
    return _output(place_of(url), (None, []), over_s, values, {each.name: each.unit for each in figures})


def _from_engines(
    kubectl: Kubectl, name: str | None, urls: Sequence[str], figures: Sequence[Figure], over_s: int
) -> MetricsOutput:
    """Return the figures between two reads of the engines. Engines that miss a read are left out."""
    try:
        engines = _engines(kubectl, name, urls)
    except KubectlError as error:
        raise NoAnswerError(str(error)) from error
    if not engines:
        raise NoAnswerError(f"NAME: {name} has no ready engine: see kubectl get sdd and kubectl get pods")
    series = frozenset().union(*(figure.measure.series() for figure in figures))
    left_out: dict[str, str] = {}
    before = _look(engines, series, left_out)
    time.sleep(over_s if before else 0)
    after = _look((engine for engine in engines if engine.name in before), series, left_out)
    missing = [f"{each}: {why}" for each, why in left_out.items()]
    if not after:
        raise NoAnswerError("; ".join(missing))
    growth = measures.growth_between([(before[each], page) for each, page in after.items()])
    values = {}
    for figure in figures:
        # An untrusted endpoint may report values that are not finite.
        told = figure.measure.values(growth).items()
        values[figure.name] = {label: value for label, value in told if math.isfinite(value)}
    source, units = name or ", ".join(map(place_of, urls)), {each.name: each.unit for each in figures}
    return _output(source, (len(after), missing), over_s, values, units)


def _output(
    source: str,
    engines: tuple[int | None, list[str]],
    over_s: float,
    values: Mapping[str, measures.Values],
    units: Mapping[str, str],
) -> MetricsOutput:
    rows = []
    for name, unit in units.items():
        told, by_position = values[name], name == "acceptance_rate_by_position"
        ordered = dict(sorted(told.items(), key=lambda each: (len(each[0]), each[0])))
        value, positions = (None, ordered) if by_position else (told.get(""), None)
        rows.append(FigureOutput(name=name, unit=unit, value=value, by_position=positions))
    answered, left_out = engines
    return MetricsOutput(source=source, over_seconds=over_s, engines=answered, left_out=left_out, figures=rows)
