"""`specdecode figures`: current figures of engines, from /metrics or Prometheus.

Both sources use the same definitions.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import typer

from specdecode_operator.api.base import Body
from specdecode_operator.cli.kubectl import Kubectl, KubectlError
from specdecode_operator.cli.options import Context, TableOrData, fail
from specdecode_operator.cli.outputs import Output, print_data
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError, open_to_read
from specdecode_operator.cluster.bounded_fetch import DEADLINE_S, MOST_BYTES, NoAnswerError, fetch, place_of
from specdecode_operator.cluster.prometheus import ask_prometheus
from specdecode_operator.cluster.resources import DEPLOYMENT_LABEL, OWNED_SELECTOR
from specdecode_operator.problems import shown
from specdecode_operator.stats.figures import FIGURES, TPOT_LIMIT, TTFT_LIMIT, Figure
from specdecode_operator.stats.measures import (
    Page,
    Scope,
    UnreadablePageError,
    Values,
    Within,
    growth_between,
    read_page,
)


class FigureOutput(Output):
    """One figure of docs/reference/metrics.md."""

    name: str
    """As in the name of its recorded series."""
    unit: str
    """Empty where it has none."""
    value: float | None
    """Null where there was nothing to divide by, or the engines do not tell it."""
    by_position: dict[str, float] | None
    """Of a figure by position in the draft, counted from 0; null of all others."""


class FiguresOutput(Output):
    """Figures of one deployment."""

    source: str
    """Who was asked."""
    over_seconds: float
    """What they are taken over."""
    engines: int | None
    """How many engines answered at both looks; null of a Prometheus."""
    left_out: list[str]
    """Engines that did not answer, and why."""
    figures: list[FigureOutput]
    """In the order of the page."""


Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A SpecDecodeDeployment, whose pods are asked through kubectl.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Its namespace; that of the kubeconfig's context.")
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="URL", help="Ask this engine in place of pods. May be repeated."),
]
Prometheus = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Ask this Prometheus in place of pods; it has to know specdecode_deployment."),
]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with the bearer token that Prometheus wants.")
]
Over = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=86_400,
        metavar="SECONDS",
        help="Seconds that figures are taken over: 30 between two looks at engines, 300 of a Prometheus.",
    ),
]
TtftLimit = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="SECONDS", help="Tell the share of requests within; a bucket of vLLM's, such as 0.5."
    ),
]
TpotLimit = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="SECONDS", help="The same of the time per output token, such as 0.05."),
]


_PORTS: Final = {"http": "", "https": "https:"}
"""Names of an engine's port, with what the API server's proxy wants before the pod's name."""


@dataclass(frozen=True)
class Engine:
    """One engine, and how its /metrics is read."""

    name: str
    read: Callable[[], str]


@dataclass(frozen=True)
class Taken:
    """Figures, and of how many engines; None where a Prometheus does not say."""

    values: dict[str, Values]
    over_s: float
    engines: int | None = None
    left_out: list[str] = field(default_factory=list)


def named_engines(urls: Sequence[str]) -> list[Engine]:
    """Return engines by their URLs."""

    def reader(url: str) -> Callable[[], str]:
        return lambda: fetch(f"{url.rstrip('/')}/metrics").decode(errors="replace")

    return [Engine(place_of(url), reader(url)) for url in urls]


def engines_of(kubectl: Kubectl, name: str) -> list[Engine]:
    """Return the ready engines of a SpecDecodeDeployment, read through the API server."""
    pods = kubectl.items("pods", f"--selector={OWNED_SELECTOR},{DEPLOYMENT_LABEL}={name}")
    return [engine for pod in pods if (engine := _engine(kubectl, pod)) is not None]


def _engine(kubectl: Kubectl, pod: Body) -> Engine | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    if not any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions):
        return None
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    port = next((port for port in ports if port.get("name") in _PORTS), None)
    if port is None:
        return None
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    address = f"{_PORTS[port['name']]}{name}:{port['containerPort']}"
    path = f"/api/v1/namespaces/{namespace}/pods/{address}/proxy/metrics"
    asked = ("get", "--raw", path, f"--request-timeout={DEADLINE_S}s")
    return Engine(name, lambda: kubectl.short_text(*asked, most_bytes=MOST_BYTES))


def look_twice(engines: Sequence[Engine], figures: Sequence[Figure], over_s: float) -> Taken:
    """Return figures of what engines did in so many seconds; one that does not answer twice is left out."""
    names = frozenset().union(*(figure.measure.series() for figure in figures))
    left_out: dict[str, str] = {}
    before = _look(engines, names, left_out)
    time.sleep(over_s if before else 0)
    after = _look([engine for engine in engines if engine.name in before], names, left_out)
    growth = growth_between([(before[name], page) for name, page in after.items()])
    values = {figure.name: _finite(figure.measure.values(growth)) for figure in figures}
    return Taken(values, over_s, len(after), [f"{name}: {why}" for name, why in left_out.items()])


def _finite(values: Values) -> Values:
    return {label: value for label, value in values.items() if math.isfinite(value)}


def _look(engines: Sequence[Engine], names: frozenset[str], left_out: dict[str, str]) -> dict[str, Page]:
    pages = {}
    for engine in engines:
        try:
            pages[engine.name] = read_page(engine.read(), names, time.monotonic())
        except (NoAnswerError, KubectlError, UnreadablePageError) as error:
            left_out[engine.name] = str(error)
    return pages


_OVER_ENGINES_S: Final = 30
_OVER_PROMETHEUS_S: Final = 300
_LONGEST_TOKEN: Final = 16 * 1024
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def figures_command(  # noqa: PLR0913  each is an option
    *,
    name: Name = None,
    namespace: Namespace = None,
    context: Context = None,
    engine: Engines = None,
    prometheus: Prometheus = None,
    token_file: TokenFile = None,
    over: Over = None,
    ttft_limit: TtftLimit = None,
    tpot_limit: TpotLimit = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="How to print it.")] = TableOrData.TABLE,
) -> None:
    """Print figures of running engines: tokens, latencies, acceptance, K in force, prefix cache, KV cache.

    Engines are looked at twice, and what they did meanwhile is told. A
    Prometheus is asked for the same figures of the time until now.

    For example: specdecode figures llama-70b -n models --over 60
    """
    _check(name, namespace, engine, prometheus, token_file)
    figures = _figures(ttft_limit, tpot_limit)
    try:
        if prometheus:
            over_s = over or _OVER_PROMETHEUS_S
            taken = _from_prometheus(prometheus, token_file, (namespace, name), figures, over_s)
        else:
            taken = _from_engines(Kubectl(context, namespace), name, engine or [], figures, over or _OVER_ENGINES_S)
    except NoAnswerError as error:
        fail(error)
    asked = [prometheus] if prometheus else engine or []
    found = _answer(", ".join(map(place_of, asked)) or name or "", figures, taken)
    for each in _not_buckets(found, {"time_to_first_token": ttft_limit, "time_per_output_token": tpot_limit}):
        say_line(each, err=True)
    _print(found, output)


def _print(found: "FiguresOutput", output: TableOrData) -> None:
    if output is not TableOrData.TABLE:
        print_data(found, output)
        return
    for each in found.left_out:
        say_line(f"left out: {each}", err=True)
    say(_table(found))


def _check(
    name: str | None, namespace: str | None, engine: list[str] | None, prometheus: str | None, token_file: str | None
) -> None:
    if bool(engine) == bool(name) or (engine and prometheus):
        fail("NAME, --engine: give a SpecDecodeDeployment or URLs of engines; a Prometheus wants the first")
    if prometheus and not namespace:
        fail("--namespace: give it beside --prometheus, which knows no kubeconfig")
    if token_file and not prometheus:
        fail("--token-file: it is for --prometheus alone: give both or neither")
    for option, value in (("NAME", name), ("--namespace", namespace)):
        if value is not None and not _NAME.fullmatch(value):
            fail(f"{option}: {shown(value)} is not a name of Kubernetes: write lower-case letters, digits, - and .")


def _figures(ttft_limit: float | None, tpot_limit: float | None) -> "list[Figure]":
    given = {TTFT_LIMIT: ttft_limit, TPOT_LIMIT: tpot_limit}
    figures = []
    for figure in FIGURES:
        if isinstance(figure.measure, Within):
            limit = given[figure.measure.limit]
            if limit is not None:
                figures.append(replace(figure, measure=replace(figure.measure, limit=str(limit))))
        else:
            figures.append(figure)
    return figures


def _from_prometheus(
    url: str, token_file: str | None, deployment: tuple[str | None, str | None], figures: "list[Figure]", over_s: int
) -> "Taken":
    namespace, name = deployment
    scope = Scope(window=f"{over_s}s", namespace=namespace, deployment=name)
    taken = Taken(ask_prometheus(url, _token(token_file), scope, figures), over_s)
    if not any(taken.values.values()):
        raise NoAnswerError(
            f"{place_of(url)}: has no series with namespace={namespace} and specdecode_deployment={name}:"
            " docs/how-to/monitor.md says how it gets them"
        )
    return taken


def _token(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        with open_to_read(file) as stream:
            token = stream.read(_LONGEST_TOKEN + 1).decode("ascii").strip()
    except DocumentError as error:
        fail(f"--token-file: {error}")
    except (OSError, UnicodeDecodeError):
        token = ""
    if not token.isprintable() or not token or " " in token or len(token) > _LONGEST_TOKEN:
        fail(f"--token-file: {shown(file)} holds no token: write it in one line, without spaces")
    return token


def _from_engines(
    kubectl: "Kubectl", name: str | None, urls: list[str], figures: "list[Figure]", over_s: int
) -> "Taken":
    try:
        engines = engines_of(kubectl, name) if name else named_engines(urls)
    except KubectlError as error:
        raise NoAnswerError(str(error)) from error
    if not engines:
        raise NoAnswerError(f"NAME: {name} has no engine that is ready: look at kubectl get sdd and kubectl get pods")
    taken = look_twice(engines, figures, over_s)
    if not taken.engines:
        raise NoAnswerError("; ".join(taken.left_out))
    return taken


def _answer(source: str, figures: "list[Figure]", taken: "Taken") -> "FiguresOutput":
    rows = []
    for figure in figures:
        values = taken.values[figure.name]
        by_position = figure.name == "acceptance_rate_by_position"
        ordered = dict(sorted(values.items(), key=lambda each: (len(each[0]), each[0])))
        row = FigureOutput(
            name=figure.name,
            unit=figure.unit,
            value=None if by_position else values.get(""),
            by_position=ordered if by_position else None,
        )
        rows.append(row)
    return FiguresOutput(
        source=source,
        over_seconds=taken.over_s,
        engines=taken.engines,
        left_out=taken.left_out,
        figures=rows,
    )


def _not_buckets(found: "FiguresOutput", limits: Mapping[str, float | None]) -> Iterator[str]:
    values = {each.name: each.value for each in found.figures}
    for name, limit in limits.items():
        if limit is not None and values[f"{name}_within_limit"] is None and values[f"{name}_p50"] is not None:
            yield f"note: {limit:g} is no bucket of the histogram of {name}: take one that /metrics has as le"


def _table(found: "FiguresOutput") -> str:
    asked = "" if found.engines is None else f" of {found.engines} engine{'s' if found.engines != 1 else ''}"
    lines = [f"figures{asked} over {found.over_seconds:g} s; docs/reference/metrics.md defines them"]
    width = max(len(each.name) for each in found.figures)
    for each in found.figures:
        told = " ".join(f"{value:.4g}" for value in (each.by_position or {}).values())
        if each.value is not None:
            told = f"{each.value:.4g}"
        lines.append(f"{each.name:<{width}}  {told or '-'} {each.unit if told else ''}".rstrip())
    return "\n".join(lines)
