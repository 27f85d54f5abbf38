"""`specdecode import`: convert an existing vLLM server to the equivalent SpecDecodeDeployment."""

import asyncio
import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

import typer

from specdecode_operator.api.base import Body
from specdecode_operator.cli.input_files import Document, objects_in, read_models
from specdecode_operator.cli.json_text import json_text
from specdecode_operator.cli.options import Context, ExitCode, Kubeconfig, Namespace, ended
from specdecode_operator.cli.outputs import yaml_text
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text
from specdecode_operator.cluster.resources import DEPLOYMENT, LEADER_WORKER_SET, POD, SERVICE, Resource
from specdecode_operator.importing import sources
from specdecode_operator.importing.convert import Migration, migrate_workload, runs_server
from specdecode_operator.importing.kserve import runtime_of
from specdecode_operator.importing.spec_builder import MigrationError, Outcome, Workload
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping


def report_lines(migration: Migration, place: str) -> list[str]:
    """Return the report on one import, as lines."""
    lines = [f"{place} -> SpecDecodeDeployment {migration.body['metadata']['name']}", ""]
    links = {Outcome.FIELD: " ->", Outcome.EXTRA: " ->", Outcome.POD: " ->"}
    for outcome in (*links, Outcome.OPERATOR, Outcome.DROPPED, Outcome.DEFAULT):
        settings = [setting for setting in migration.settings if setting.outcome is outcome]
        if settings:
            link = links.get(outcome, ":")
            lines += [f"{outcome.value}:", *(f"  {each.name}{link} {each.result}" for each in settings), ""]
    if migration.decisions:
        lines += ["decide before you apply it:", *(f"  {problem}" for problem in migration.decisions), ""]
    lines.append("to migrate without downtime, with the object saved as OBJECT.yaml:")
    for number, step in enumerate(migration.steps, start=1):
        lines += [f"  {number}. {step.purpose}", f"       {step.command}"]
    return lines


_KSERVE: Final = "serving.kserve.io"
_RUNTIMES: Final = (
    Resource(f"{_KSERVE}/v1alpha1", "ServingRuntime", "servingruntimes"),
    Resource(f"{_KSERVE}/v1alpha1", "ClusterServingRuntime", "clusterservingruntimes"),
)
_RESOURCES: Final = {
    ("deployment", "deployments", "deploy"): (DEPLOYMENT,),
    ("statefulset", "statefulsets", "sts"): (Resource("apps/v1", "StatefulSet", "statefulsets"),),
    ("pod", "pods", "po"): (POD,),
    ("leaderworkerset", "leaderworkersets", "lws"): (LEADER_WORKER_SET,),
    ("inferenceservice", "inferenceservices", "isvc"): (
        Resource(f"{_KSERVE}/v1beta1", "InferenceService", "inferenceservices"),
    ),
    ("llminferenceservice", "llminferenceservices", "llmisvc"): tuple(
        Resource(f"{_KSERVE}/{version}", "LLMInferenceService", "llminferenceservices")
        for version in ("v1alpha2", "v1alpha1")
    ),
}
"""Names of each kind on the command line, with the API versions that may serve it."""


class SourceError(Exception):
    """No server could be read. The message is one line and includes a fix."""


class Source(NamedTuple):
    """A vLLM server, its source, and the Services in its namespace."""

    place: str
    workload: Workload
    services: tuple[Body, ...] = ()


def read_source(
    words: Sequence[str],
    file: str | None,
    namespace: str | None,
    context: str | None = None,
    kubeconfig: str | None = None,
) -> Source:
    """Return the server that the arguments select."""
    if file is None and (len(words) > 1 or sources.is_command_text(" ".join(words))):
        return Source("the command line", sources.read_words(words))
    if len(words) > 1:
        raise SourceError(f"{clip(printable(' '.join(words)), 64)}: select one server in the file: KIND/NAME")
    kind, name = _name(words[0]) if words else (None, None)
    if file is not None:
        return _from_file(file, kind, name, namespace)
    if name is None:
        raise SourceError(f"source is missing: pass deployment/NAME, or -f FILE with a {sources.READABLE}")
    return asyncio.run(_from_cluster(kind or "Deployment", name, namespace, context, kubeconfig))


def _name(text: str) -> tuple[str | None, str]:
    written, slash, name = text.rpartition("/")
    kind = next((found[0].kind for forms, found in _RESOURCES.items() if written.partition(".")[0] in forms), None)
    if not name or (slash and kind is None):
        kinds = ", ".join(forms[0] for forms in _RESOURCES)
        raise SourceError(f"source: {clip(printable(text), 64)}: use KIND/NAME or -f FILE; supported kinds are {kinds}")
    return kind, name


def _from_file(file: str, kind: str | None, name: str | None, namespace: str | None) -> Source:
    try:
        text = read_text(file)
        if sources.is_command_text(text):
            if name is not None:
                raise SourceError(f"{place_of(file)}: contains a command line, not {printable(name)}: omit the name")
            workload = sources.read_command_text(text)
            return Source(f"{place_of(file)} ({workload.kind})", workload)
        found = objects_in(text, file)
    except DocumentError as error:
        raise SourceError(str(error)) from error
    for each in found:
        if namespace and "kind" in each.body:
            each.body["metadata"] = {**mapping(each.body, "metadata"), "namespace": namespace}
    document, workload = _chosen(file, found, kind, name)
    services = [each.body for each in found if each.kind == "Service"]
    for scaler in (each.body for each in found if each.kind in ("HorizontalPodAutoscaler", "ScaledObject")):
        # The autoscaler keeps scaling the old server.
        scaled = mapping(mapping(scaler, "spec"), "scaleTargetRef")
        if (scaled.get("name"), scaled.get("kind", workload.kind)) == (workload.name, workload.kind):
            message = "scales the old server: change its scaleTargetRef to the new SpecDecodeDeployment, or remove it"
            shown = clip(printable(str(mapping(scaler, "metadata").get("name"))), 64)
            workload.remarks.decide("spec.replicas", f"{scaler['kind']} {shown}", message)
    near = [each for each in services if mapping(each, "metadata").get("namespace") in (None, workload.namespace)]
    return Source(f"{document.place} ({workload.kind} {workload.name})", workload, tuple(near))


def _chosen(file: str, found: Sequence[Document], kind: str | None, name: str | None) -> tuple[Document, Workload]:
    bodies = [each.body for each in found]
    servers = [(each, server) for each in found for server in sources.read_workloads(each.body, bodies)]
    wanted = [(each, server) for each, server in servers if name in (None, server.name) and kind in (None, server.kind)]
    if len(wanted) > 1:
        wanted = [(each, server) for each, server in wanted if runs_server(server)] or wanted
    if len(wanted) > 1:
        listed = _listed(server for _, server in wanted)
        example = shlex.join(["specdecode", "import", _listed([wanted[0][1]]), "-f", file])
        raise SourceError(f"{place_of(file)}: contains {listed}: select one, for example: {example}")
    if wanted:
        return wanted[0]
    if servers:
        asked = f"{kind.lower()}/{name}" if kind else str(name)
        listed = _listed(server for _, server in servers)
        raise SourceError(f"{place_of(file)}: {printable(asked)} not found: select one of {listed}")
    for each in found:
        if instead := sources.import_instead(each.body):
            raise SourceError(f"{each.place}: {clip(printable(instead), 400)}")
    kinds = ", ".join(dict.fromkeys(printable(str(each.body.get("kind") or "nothing")) for each in found)) or "nothing"
    raise SourceError(f"{place_of(file)}: kind: {clip(kinds, 96)}: cannot be imported: use a {sources.READABLE}")


def _listed(servers: Iterable[Workload]) -> str:
    return ", ".join(f"{each.kind.lower()}/{each.name}" if each.kind.isalpha() else each.name for each in servers)


async def _from_cluster(
    kind: str, name: str, namespace: str | None, context: str | None, kubeconfig: str | None
) -> Source:
    # Importing the Kubernetes client takes most of a second, and files do not need it.
    from specdecode_operator.cluster.client import ClusterError, ForbiddenError  # noqa: PLC0415
    from specdecode_operator.cluster.kubeconfig import open_cluster  # noqa: PLC0415

    resources = next(found for found in _RESOURCES.values() if found[0].kind == kind)
    which = f"{kind.lower()}/{name}"
    try:
        async with open_cluster(context, kubeconfig) as cluster:
            within = namespace or cluster.namespace
            found, beside = None, list[Body]()
            for resource in resources:
                found = found or await cluster.get(resource, within, name)
            if found is None:
                raise SourceError(
                    f"{which}: not found in namespace {within}: check the name, or set the namespace with -n"
                )
            runtime = runtime_of(found) if kind == "InferenceService" else None
            for resource in _RUNTIMES if runtime and not beside else ():
                scope = within if resource.kind == "ServingRuntime" else None
                beside += [
                    {"kind": resource.kind, **each}
                    for each in [await cluster.get(resource, scope, str(runtime))]
                    if each
                ]
            try:
                services = await cluster.list(SERVICE, within)
            except ForbiddenError:
                services = []
    except ClusterError as error:
        raise SourceError(str(error)) from error
    # The prefill engines of an LLMInferenceService come second.
    workload = sources.read_workloads({"apiVersion": resources[0].api_version, "kind": kind, **found}, beside)[0]
    return Source(f"{which} in namespace {within}", workload, tuple(services))


_FILE_HELP: Final = (
    "File to read, or - for standard input: YAML or JSON of these kinds, a docker compose file, "
    "values of the production-stack chart, or text with vllm serve or docker run."
)


class Form(StrEnum):
    """Output format."""

    YAML = "yaml"
    JSON = "json"


def import_command(  # noqa: PLR0913  each is an option
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND/NAME | -- COMMAND...",
            help=(
                "KIND/NAME of an object in the cluster (deployment, statefulset, pod, leaderworkerset, "
                "inferenceservice, llminferenceservice). With --file, it selects one of several. Or, after "
                "--, a command line."
            ),
        ),
    ] = None,
    *,
    file: Annotated[str | None, typer.Option("--file", "-f", metavar="FILE", help=_FILE_HELP)] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the new object. Defaults to the server's name, with -sdd appended if the server runs "
            "in Kubernetes."
        ),
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="vLLM version in the image, such as 0.32, if the image tag does not contain it.")
    ] = None,
    model_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=PATH",
            help=(
                "config.json of a model of the server, such as my/head=config.json. May be repeated. A "
                "speculators checkpoint without a target is split into the target in its config and the head."
            ),
        ),
    ] = None,
    output: Annotated[Form, typer.Option("--output", "-o", help="Format: yaml or json.")] = Form.YAML,
) -> None:
    """Convert an existing vLLM server into an equivalent SpecDecodeDeployment.

    The object is printed to standard output, a report to standard error: the field
    of each argument, settings that are not kept with the reason, changed defaults,
    and the kubectl commands to move traffic without downtime. The command does not
    change the cluster.

    For example: specdecode import deployment/chat -n models > chat.yaml,
    or: specdecode import -- vllm serve Qwen/Qwen3-32B -tp 2 > chat.yaml

    Exits with 0 when the object is complete, 2 when you must decide something
    first or the source contains no server.
    """
    with ended(SourceError, MigrationError, DocumentError):
        found = read_source(source or [], file, namespace, context, kubeconfig)
        migration = migrate_workload(
            found.workload,
            found.services,
            name=name,
            engine_version=engine_version,
            configs=read_models(model_config or [])[0],
        )
    if output is Form.JSON:
        typer.echo(json_text(migration.body, indent=2))
    else:
        # Someone who reads only the file has not seen the report.
        decisions = (f"# Decide first: {' '.join(str(each).split())}\n" for each in migration.decisions)
        typer.echo("".join(decisions) + yaml_text(migration.body, width=120), nl=False)
    say("\n".join(map(printable, report_lines(migration, found.place))), err=True)
    raise typer.Exit(ExitCode.INVALID if migration.decisions else ExitCode.OK)
