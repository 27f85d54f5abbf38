"""`specdecode status`: SpecDecodeDeployments at a glance, through kubectl."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from specdecode_operator.api.base import Body
from specdecode_operator.cli.kubectl import Kubectl, KubectlError, condition_of, with_kubectl
from specdecode_operator.cli.options import (
    AllNamespaces,
    Selector,
    TableOrData,
    Watch,
    ended,
    fail,
    refuse_name_of_list,
)
from specdecode_operator.cli.outputs import Output, print_data
from specdecode_operator.cli.terminal import age_text, aligned, cell, labelled, line_width, say, show_live, whole_cell
from specdecode_operator.cluster.resources import SPECDECODE_DEPLOYMENT
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.stats.figures import FIGURES
from specdecode_operator.untrusted import mapping, objects

_RESOURCE: Final = SPECDECODE_DEPLOYMENT.qualified_plural
_MOST_EVENTS: Final = 8
_MEMORY: Final = {
    "targetWeightsBytes": "target",
    "draftWeightsBytes": "draft",
    "stateBytes": "state",
    "activationBytes": "activations",
    "cudaGraphsBytes": "CUDA graphs",
    "nonTorchBytes": "outside PyTorch",
    "availableKvBytes": "KV cache",
}
"""Labels for the terms of status.plan.perGpu."""
_PHASES: Final = {
    "engine": "engine",
    "preparation": "preparation",
    "load": "load",
    "compile": "compile",
    "warmUp": "warm-up",
    "graphs": "graphs",
}
"""Labels for the parts of status.observed.startup."""
_FIGURES: Final = (
    "output_tokens_per_second",
    "answered_requests_per_second",
    "time_to_first_token_p99",
    "time_per_output_token_p99",
    "kv_cache_usage",
    "running_requests",
    "waiting_requests",
)
_NOT_RECONCILED: Final = -1
"""status.observedGeneration of a new object, by the default of the CRD."""
_UNITS: Final = {each.name: each.unit for each in FIGURES}


class DeploymentOutput(Output):
    """A SpecDecodeDeployment and its Events."""

    deployment: dict[str, Any]
    """The object from the API server, without managedFields."""
    events: list[dict[str, Any]] | None
    """Its newest Events, newest first; null if NAME is not given or Events cannot be read."""


class StatusOutput(Output):
    """SpecDecodeDeployments of a cluster."""

    deployments: list[DeploymentOutput]
    """One object if NAME is given, otherwise all objects that the options select."""


@with_kubectl
def status_command(  # noqa: PLR0913  each is an option
    kubectl: Kubectl,
    *,
    name: Annotated[
        str | None, typer.Argument(help="SpecDecodeDeployment. Defaults to a table of all in the namespace.")
    ] = None,
    all_namespaces: AllNamespaces = False,
    selector: Selector = None,
    watch: Watch = False,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="Output format.")] = TableOrData.TABLE,
) -> None:
    """Show SpecDecodeDeployments: models, conditions, plan, acceptance, policy and the newest Events.

    For example: specdecode status chat -n models, or: specdecode status -A

    Exits with 0, or 2 when there is no such object or the cluster cannot be reached.
    """
    refuse_name_of_list(name, all_namespaces=all_namespaces, selector=selector)

    def find() -> StatusOutput:
        if name is None:
            found = kubectl.select(_RESOURCE, all_namespaces=all_namespaces, selector=selector)
            return StatusOutput(deployments=[DeploymentOutput(deployment=_lean(each), events=None) for each in found])
        body = kubectl.find(f"{_RESOURCE}/{name}")
        if body is None:
            here = kubectl.names_here(_RESOURCE, "SpecDecodeDeployments", name)
            fail(f"SpecDecodeDeployment {name}: not found ({here}): check the name, or set the namespace with -n")
        return StatusOutput(deployments=[DeploymentOutput(deployment=_lean(body), events=_events(kubectl, body))])

    def show(found: StatusOutput) -> None:
        now = datetime.now(UTC)
        if output is not TableOrData.TABLE:
            print_data(found, output)
        elif name is None:
            say("\n".join(_table(found.deployments, now, with_namespace=all_namespaces)), verdicts=True)
        else:
            say("\n".join(_screen(found.deployments[0], now)), verdicts=True)

    with ended(KubectlError):
        show_live(find, show, watch=watch)


def _lean(body: Body) -> Body:
    return {**body, "metadata": {key: each for key, each in body["metadata"].items() if key != "managedFields"}}


def _events(kubectl: Kubectl, body: Body) -> list[Body] | None:
    """Return the newest Events of an object; None if the caller may not read them."""
    try:
        found = kubectl.within(body).items("events", f"--field-selector=involvedObject.uid={body['metadata']['uid']}")
    except KubectlError:
        return None
    return sorted(map(_lean, found), key=_seen, reverse=True)[:_MOST_EVENTS]


def _seen(event: Body) -> str:
    last = mapping(event, "series").get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(last or mapping(event, "metadata").get("creationTimestamp") or "")


def _table(found: Sequence[DeploymentOutput], now: datetime, *, with_namespace: bool) -> list[str]:
    if not found:
        return ["no SpecDecodeDeployments here"]
    rows = [["NAMESPACE", "NAME", "READY", "STATUS", "MODEL", "METHOD", "K", "PLAN", "GPUS", "ACCEPTANCE", "AGE"]]
    for each in found:
        body = each.deployment
        status, metadata, speculation = mapping(body, "status"), body["metadata"], _speculation(body)
        cells = (
            metadata.get("namespace"),
            metadata.get("name"),
            status.get("ready"),
            condition_of(body, "Ready").get("reason"),
            mapping(mapping(body, "spec"), "target").get("model"),
            speculation.get("method"),
            speculation.get("numSpeculativeTokens"),
            mapping(status, "plan").get("verdict"),
            _gpus(body),
            mapping(status, "acceptance").get("text"),
            age_text(metadata.get("creationTimestamp"), now),
        )
        rows.append([*map(cell, cells)])
    rows = rows if with_namespace else [row[1:] for row in rows]
    return aligned(rows, left=len(rows[0]), indent="")


def _screen(found: DeploymentOutput, now: datetime) -> list[str]:
    body = found.deployment
    status, metadata = mapping(body, "status"), body["metadata"]
    conditions = [
        [
            *(each.get(key) for key in ("type", "status", "reason")),
            age_text(each.get("lastTransitionTime"), now),
            each.get("message"),
        ]
        for each in objects(status, "conditions")
    ]
    events = [
        [age_text(_seen(each), now), each.get("type"), each.get("reason"), each.get("count", 1), each.get("message")]
        for each in found.events or ()
    ]
    no_events = "none" if found.events is not None else "cannot be read: run kubectl get events to see why"
    figures = mapping(status, "figures")
    over = f" (over {cell(figures.get('overSeconds'))} s, from {cell(figures.get('source'))})" if figures else ""
    current, seen = metadata.get("generation"), status.get("observedGeneration")
    behind = "" if current == seen else f" (of generation {cell(seen)}, but the spec has generation {cell(current)})"
    if seen in (None, _NOT_RECONCILED):
        behind = ""  # The section is empty and says why
    parts = (
        (
            f"SpecDecodeDeployment {cell(metadata.get('namespace'))}/{cell(metadata.get('name'))}",
            labelled(_header(body, now)),
        ),
        (
            f"Conditions{behind}",
            _columns(["TYPE", "STATUS", "REASON", "AGE", "MESSAGE"], conditions, "no operator has reconciled it yet"),
        ),
        ("Plan", labelled(_plan(status)) or ["  none"]),
        (f"Acceptance and throughput{over}", labelled(_measured(status)) or ["  not reported"]),
        ("Policy", labelled(_policy(body)) or ["  none"]),
        ("Events", _columns(["LAST SEEN", "TYPE", "REASON", "COUNT", "MESSAGE"], events, no_events)),
    )
    return [line for title, lines in parts for line in (title, *lines, "")][:-1]


def _header(body: Body, now: datetime) -> Iterator[tuple[str, object]]:
    spec, status, speculation = mapping(body, "spec"), mapping(body, "status"), _speculation(body)
    yield "Model", mapping(spec, "target").get("model")
    tokens = speculation.get("numSpeculativeTokens")
    by_policy = "" if speculation is mapping(spec, "speculation") else " (chosen by the policy)"
    yield "Method", f"{speculation.get('method') or '-'}{'' if tokens is None else f', K {tokens}'}{by_policy}"
    yield "Draft", mapping(speculation, "draft").get("model")
    trained = mapping(status, "trainedDraft")
    if trained:
        replaced = f"head of training {trained['training']} instead of it; " if trained.get("training") else ""
        yield "Trained draft", f"{replaced}{trained.get('reason')}: {trained.get('message')}"
    yield "GPUs", _gpus(body)
    yield "Ready", f"{status.get('ready') or '-'} replicas"
    yield "Age", age_text(body["metadata"].get("creationTimestamp"), now)


def _plan(status: Body) -> Iterator[tuple[str, object]]:
    plan = mapping(status, "plan")
    if not plan:
        return
    memory, is_cpu = mapping(plan, "perGpu"), plan.get("product") == "CPU"
    nodes, per_replica = plan.get("nodesPerReplica", 1), "per data-parallel replica" if plan.get("data", 1) != 1 else ""
    degrees = [("TP", plan.get("tensor")), ("PP", plan.get("pipeline", 1)), ("DP", plan.get("data", 1))]
    sizes = ", ".join(f"{name} {degree}" for name, degree in degrees if name == "TP" or degree != 1)
    yield "Verdict", plan.get("verdict")
    yield "Placement", f"{_count(plan)} per replica ({sizes})" + (f" on {nodes} nodes" if nodes != 1 else "")
    yield "Precision", plan.get("targetQuantization")
    terms = ", ".join(f"{name} {_gib(memory.get(key))}" for key, name in _MEMORY.items() if memory.get(key))
    used = f"{_gib(memory.get('requestedBytes'))} of {_gib(memory.get('totalBytes'))} GiB"
    yield "Memory per replica" if is_cpu else "Memory per GPU", f"{used}: {terms}"
    reported = mapping(status, "observed").get("kvCacheTokens")
    told = f", engines report {_number(reported)}" if reported is not None else ""
    yield "KV cache", f"{_number(plan.get('kvCacheTokens'))} tokens planned{told} {per_replica}".rstrip()
    if startup := "; ".join(_startup(plan, mapping(mapping(status, "observed"), "startup"))):
        yield "Start-up", startup
    requests = f"{plan.get('maxConcurrency')} of {_number(plan.get('maxModelLen'))} tokens each {per_replica}"
    yield "Requests", requests.rstrip()


def _startup(plan: Body, measured: Body) -> Iterator[str]:
    """Yield the estimated and the measured start-up time of the engines."""
    estimate = mapping(plan, "startup")
    if estimate:
        ends = (mapping(estimate, "engine").get(f"{end}Seconds") for end in ("fastest", "slowest"))
        yield f"{' to '.join(map(_number, ends))} s planned (limit {_number(estimate.get('deadlineSeconds'))} s)"
    times = {name: measured.get(f"{key}Seconds") for key, name in _PHASES.items()}
    phases = ", ".join(f"{name} {_number(seconds)} s" for name, seconds in times.items() if seconds is not None)
    if phases:
        yield f"measured {phases}"


def _measured(status: Body) -> Iterator[tuple[str, object]]:
    acceptance = mapping(status, "acceptance")
    if acceptance:
        length = acceptance.get("meanLength")
        told = f", mean acceptance length {length}" if length is not None else ""
        yield "acceptance", f"{acceptance.get('text')}{told} ({acceptance.get('measuredWith')})"
    values = {each.get("name"): each.get("value") for each in objects(mapping(status, "figures"), "values")}
    for name in _FIGURES:
        if name in values:
            yield name, f"{values[name]} {_UNITS.get(name, '')}".rstrip()


def _policy(body: Body) -> Iterator[tuple[str, object]]:
    policy = mapping(mapping(body, "status"), "policy")
    if policy:
        yield "Mode", policy.get("mode")
        yield "Decision", f"{policy.get('action')}: {policy.get('outcome')} ({policy.get('reason')})"
        yield "Message", policy.get("message")
        if policy.get("arm"):
            yield "Arm", policy["arm"]
    canaries = mapping(mapping(body, "status"), "canaries")
    if canaries:
        counts = (f"{canaries.get(verdict)} {verdict}" for verdict in ("right", "wrong", "unconfirmed", "failed"))
        refused = canaries.get("unsupported")
        yield "Canaries", ", ".join([*counts, *([f"not asked: {refused}"] if refused else [])])


def _speculation(body: Body) -> Body:
    """Return the speculation settings in force: the policy's, or else the spec's."""
    chosen = mapping(mapping(mapping(body, "status"), "policy"), "speculation")
    return chosen or body["spec"].get("speculation") or {}


def _gpus(body: Body) -> str:
    plan, replicas = mapping(mapping(body, "status"), "plan"), mapping(body, "spec").get("replicas", 1)
    return f"{_count(plan, replicas)}" if plan else "-"


def _count(plan: Body, replicas: int = 1) -> str:
    each = plan.get("gpusPerReplica")
    is_cpu = plan.get("product") == "CPU"
    return "CPU" if is_cpu else f"{each * replicas if isinstance(each, int) else '-'} x {plan.get('product')}"


def _gib(value: object) -> str:
    return format_gib(value) if isinstance(value, int) else "-"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _columns(heading: Sequence[str], rows: Sequence[Sequence[object]], otherwise: str) -> list[str]:
    """Return the lines of a table. Its last column has whole messages, folded on a terminal."""
    if not rows:
        return [f"  {otherwise}"]
    cells = [heading, *([*map(cell, row[:-1]), whole_cell(row[-1])] for row in rows)]
    return aligned(cells, left=len(heading), width=line_width(), foldable=(len(heading) - 1,))
