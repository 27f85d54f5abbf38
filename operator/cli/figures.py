"""`specdecode figures`: what engines do now, from their own /metrics or from a Prometheus, by the same definitions."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli.figures import options
from specdecode_operator.cli.options import Context, TableOrData, fail
from specdecode_operator.cli.outputs.printing import print_data
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError, open_to_read
from specdecode_operator.problems import shown

if TYPE_CHECKING:
    from specdecode_operator.cli.capture.kubectl import Kubectl
    from specdecode_operator.cli.figures.sources import Taken
    from specdecode_operator.cli.outputs.figures import FiguresOutput
    from specdecode_operator.monitoring.figures import Figure

_OVER_ENGINES_S: Final = 30
_OVER_PROMETHEUS_S: Final = 300
_LONGEST_TOKEN: Final = 16 * 1024
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def figures_command(  # noqa: PLR0913  each is an option
    *,
    name: options.Name = None,
    namespace: options.Namespace = None,
    context: Context = None,
    engine: options.Engines = None,
    prometheus: options.Prometheus = None,
    token_file: options.TokenFile = None,
    over: options.Over = None,
    ttft_limit: options.TtftLimit = None,
    tpot_limit: options.TpotLimit = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="How to print it.")] = TableOrData.TABLE,
) -> None:
    """Print figures of running engines: tokens, latencies, acceptance, K in force, prefix cache, KV cache.

    Engines are looked at twice, and what they did meanwhile is told. A
    Prometheus is asked for the same figures of the time until now.

    For example: specdecode figures llama-70b -n models --over 60
    """
    from specdecode_operator.cli.capture.kubectl import Kubectl  # noqa: PLC0415  not for --help
    from specdecode_operator.cluster.web import NoAnswerError, place_of  # noqa: PLC0415

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
    """Refuse options that do not go together, and names that are none."""
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
    """Return the figures, with limits put in; those whose limit is not given are left out."""
    from specdecode_operator.monitoring.figures import FIGURES, TPOT_LIMIT, TTFT_LIMIT  # noqa: PLC0415
    from specdecode_operator.monitoring.measures import Within  # noqa: PLC0415

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
    from specdecode_operator.cli.figures.sources import Taken  # noqa: PLC0415
    from specdecode_operator.cluster.prometheus import ask_prometheus  # noqa: PLC0415
    from specdecode_operator.cluster.web import NoAnswerError, place_of  # noqa: PLC0415
    from specdecode_operator.monitoring.measures import Scope  # noqa: PLC0415

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
    from specdecode_operator.cli.capture.kubectl import KubectlError  # noqa: PLC0415
    from specdecode_operator.cli.figures.sources import engines_of, look_twice, named_engines  # noqa: PLC0415
    from specdecode_operator.cluster.web import NoAnswerError  # noqa: PLC0415

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
    from specdecode_operator.cli.outputs.figures import FigureOutput, FiguresOutput  # noqa: PLC0415

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
    """Return what is said of limits of times that are known, and not by that limit."""
    values = {each.name: each.value for each in found.figures}
    for time, limit in limits.items():
        if limit is not None and values[f"{time}_within_limit"] is None and values[f"{time}_p50"] is not None:
            yield f"note: {limit:g} is no bucket of the histogram of {time}: take one that /metrics has as le"


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
