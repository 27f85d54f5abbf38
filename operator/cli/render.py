"""`specdecode render`: print the objects and command lines that the operator would create.

It needs no cluster.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
import yaml

from specdecode_operator.api import capture
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.api.spec_problems import admitted_capture
from specdecode_operator.capture import arms
from specdecode_operator.capture.arms import arm_states
from specdecode_operator.capture.decision import decide as decide_capture
from specdecode_operator.capture.observation import Capture, CaptureObservation, ObservedDeployment, read_capture
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cli import options
from specdecode_operator.cli.input_files import (
    Document,
    read_calibration,
    read_given,
    read_nodes,
    read_ours,
    refuse_unused,
    with_configs,
)
from specdecode_operator.cli.options import ExitCode, allowed_names, hub_models, sources
from specdecode_operator.cli.outputs import print_json, yaml_text
from specdecode_operator.cli.plan.answers import (
    DOES_NOT_FIT,
    FITS,
    INVALID,
    TIGHT,
    UNKNOWN,
    Models,
    UnknownModel,
    answer,
    say_what_is_missing,
)
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import APPLIED_HASH_ANNOTATION, DEPLOYMENT, ENGINE_CONTAINER, JOB
from specdecode_operator.deployment.decision import decide
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState, NotLaunched
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.models.model_jobs import wanted_downloads
from specdecode_operator.deployment.models.model_locations import COMMIT
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.planning import assumed_nodes
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.problems import InvalidSpecError, printable
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration

OPERATOR_IMAGE: Final = "localhost/specdecode/operator:dev"
"""The chart's default. Load generators of captures, and replays, run from the operator's own image."""

_NAMESPACE: Final = "default"
_NOT_KNOWN: Final = "known-in-the-cluster"
"""For a uid, and for the claim of a golden capture that is in no file."""

_NO_COMMIT: Final = "not-downloaded-yet"
"""For a branch or tag: only the download finds out which commit it is."""

_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Nothing that is rendered depends on it."""


class NotRenderedError(Exception):
    """Nothing is made of an object; why, without a full stop."""

    def __init__(self, readiness: Readiness) -> None:
        super().__init__(readiness.message)
        self.reason = readiness.reason
        self.may_pass = not readiness.stalled


@dataclass(frozen=True)
class AssumedCluster:
    """What is taken for granted, where the operator would look."""

    nodes: tuple[NodeFacts, ...]
    calibration: Calibration = UNCALIBRATED
    pod_template: frozenset[str] = NONE_ALLOWED
    operator_image: str = OPERATOR_IMAGE


@dataclass(frozen=True)
class RenderedDeployment:
    """What one SpecDecodeDeployment comes to."""

    parent: ParsedDeployment
    desired: DesiredState
    body: Body
    cluster: AssumedCluster
    downloads: tuple[Body, ...] = ()
    """Jobs that fill its cache of models; what is desired comes when they have ended."""

    @property
    def objects(self) -> list[Body]:
        """All that is made for it, in the order of creation."""
        return [*self.downloads, *self.desired.children]


def render_deployment(body: Body, cluster: AssumedCluster) -> RenderedDeployment:
    """Return what the operator makes of a SpecDecodeDeployment whose models the catalogue or the spec describes."""
    parent = parse_deployment(as_stored(body))
    desired = _desired_state(parent, cluster)
    if isinstance(desired.outcome, NotLaunched):
        raise NotRenderedError(desired.outcome.readiness)
    before = decide(parent, _state(cluster)) if desired.outcome.facts.spec.models.cache else desired
    downloads = [child for child in before.children if child["kind"] == JOB.kind]
    return RenderedDeployment(parent, desired, body, cluster, tuple(downloads))


def _desired_state(parent: ParsedDeployment, cluster: AssumedCluster) -> DesiredState:
    wanted = set() if isinstance(parent.spec, InvalidSpecError) else set(wanted_downloads(parent.spec).values())
    commits = {source.key: _commit(source.revision) for source in wanted}
    return decide(parent, replace(_state(cluster), downloads=commits))


def _state(cluster: AssumedCluster) -> ClusterState:
    return ClusterState(
        nodes=cluster.nodes,
        calibration=cluster.calibration,
        # Which directories of nodes are allowed says the operator's command line.
        host_paths=("/",),
        pod_template=cluster.pod_template,
        has_leader_worker_sets=True,
        operator_image=cluster.operator_image,
    )


def render_capture(
    body: Body, captured: RenderedDeployment, golden: Body | None = None, operator_image: str | None = None
) -> list[Body]:
    """Return claim and Job of a valid SpecDecodeCapture; what it names beside its deployment is taken to be there.

    ``golden`` is the capture that it is held against, where that is known: whether it fits is looked at then.
    """
    capture, parent = read_capture(as_stored(body)), captured.parent
    arms = arm_states(
        SpecDecodeCaptureSpec.parse(body["spec"]),
        captured.body,
        captured.desired.outcome,
        lambda _, changed: _desired_state(parse_deployment(as_stored(changed)), captured.cluster),
    )
    deployment = ObservedDeployment(parent.key, parent.uid, parent.generation, captured.desired, arms)
    image = operator_image or OPERATOR_IMAGE
    named = _named_objects(capture.spec)
    observed = CaptureObservation(deployment, operator_image=image, golden=_as_golden(capture, golden), **named)
    decision = decide_capture(capture, observed, _ANY_TIME)
    if decision.writes.job is None:
        raise NotRenderedError(decision.readiness)
    return [each for each in (decision.writes.claim, decision.writes.job) if each is not None]


def without_owner(objects: Iterable[Body]) -> list[Body]:
    """Return objects without what binds them to their owner in a cluster: nobody could apply them with it."""
    return [{**body, "metadata": _unbound(body["metadata"])} for body in objects]


def as_stored(body: Body) -> Body:
    """Return an object with what the API server would add to it: namespace, uid, generation, resource version."""
    metadata = {"namespace": _NAMESPACE, "uid": _NOT_KNOWN, "generation": 1, "resourceVersion": "1", **body["metadata"]}
    return {**body, "metadata": metadata}


def _commit(revision: str | None) -> str:
    return revision if revision and COMMIT.fullmatch(revision) else _NO_COMMIT


def _named_objects(spec: Body) -> dict[str, Any]:
    claim = spec.get("storage", {}).get("existingClaim")
    dataset = spec.get("workload", {}).get("prompts", {}).get("dataset")
    return {
        "claim": {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}} if claim else None,
        "dataset": {"data": {dataset["path"]: ""}} if dataset else None,
    }


def _as_golden(capture: Capture, golden: Body | None) -> Body | None:
    against = capture.spec.get("against")
    if against is None:
        return None
    if golden is None:
        spec = {**capture.spec, "storage": {"existingClaim": _NOT_KNOWN}}
        golden = {"metadata": {"namespace": capture.key.namespace, "name": against["capture"]}, "spec": spec}
    known = read_capture(as_stored(golden))
    succeeded = Condition(
        type="Succeeded",
        status=ConditionStatus.TRUE,
        reason="Captured",
        message="",
        observed_generation=known.generation,
        last_transition_time=f"{_ANY_TIME:%Y-%m-%dT%H:%M:%SZ}",
    )
    claim = claim_of(known, SpecDecodeCaptureSpec.parse(known.spec).storage)
    status = SpecDecodeCaptureStatus(claim=claim, conditions=[succeeded])
    return {**as_stored(golden), "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def _unbound(metadata: Body) -> Body:
    kept = {name: value for name, value in metadata.items() if name != "ownerReferences"}
    annotations = {
        name: value for name, value in (kept.pop("annotations", None) or {}).items() if name != APPLIED_HASH_ANNOTATION
    }
    return {**kept, "annotations": annotations} if annotations else kept


_VERDICTS: Final = {arms.DOES_NOT_FIT: DOES_NOT_FIT, arms.WAITS: UNKNOWN}
"""Of captures that the operator would not start, by its reason; all others are invalid."""


@dataclass(frozen=True)
class Rendered:
    """What one object comes to."""

    document: Document
    verdict: str  # Fits, Tight, Unknown, DoesNotFit or Invalid, as `plan` has it; Fits for a capture
    objects: tuple[Body, ...] = ()  # In the order of their creation
    refusal: str = ""  # Why there is none, without a full stop
    deployment: RenderedDeployment | None = None  # What a capture of it needs to know
    unknown: tuple[UnknownModel, ...] = ()  # Models that only the cluster can read


@dataclass(frozen=True)
class Options:
    """What is asked for beside the files."""

    nodes: str | None = None
    model_configs: Sequence[str] = ()  # ID=PATH
    calibration: str | None = None
    engine_version: str | None = None  # In the place of what objects say
    operator_image: str | None = None
    allowed: frozenset[str] = NONE_ALLOWED  # What podTemplate may ask for
    models: Models | None = None  # Asked for what neither an object nor the catalogue describes
    facts: Sequence[str] = ()  # Files of facts
    given: Mapping[str, Checkpoint] = field(default_factory=dict)  # What was read of models in folders


def render(files: Sequence[str], options: Options) -> tuple[list[Rendered], list[DocumentError]]:
    """Return what each object in files, folders or ``-`` comes to, in the order of reading, and what is unreadable."""
    reading = read_ours(files)
    try:
        nodes = None if options.nodes is None else read_nodes(options.nodes)
        configs, given = read_given(options.model_configs, options.facts)
        options = replace(options, given=given)
        refuse_unused(configs, reading.documents)
        calibration = read_calibration(options.calibration)
    except DocumentError as error:
        return [], [error]
    deployments = {
        document.qualified_name: rendered_deployment(
            _at_version(document, options), nodes, configs, calibration, options
        )
        for document in reading.documents
        if document.kind != capture.KIND
    }
    captures = {each.qualified_name: each for each in reading.documents if each.kind == capture.KIND}
    found = [
        _capture(document, deployments, captures, configs, options)
        if document.kind == capture.KIND
        else deployments[document.qualified_name]
        for document in reading.documents
    ]
    return found, list(reading.errors)


def _at_version(document: Document, options: Options) -> Document:
    spec = document.body.get("spec")
    if options.engine_version is None or not isinstance(spec, dict):
        return document
    engine = spec.get("engine")
    changed = {**(engine if isinstance(engine, dict) else {}), "version": options.engine_version}
    return replace(document, body={**document.body, "spec": {**spec, "engine": changed}})


def rendered_deployment(
    document: Document,
    nodes: tuple[NodeFacts, ...] | None,
    configs: Mapping[str, dict[str, Any]],
    calibration: Calibration,
    options: Options,
) -> Rendered:
    """Return what a SpecDecodeDeployment comes to on these nodes; None: on those that `plan` takes for granted."""
    planned = answer(
        document, nodes, configs, calibration, models=options.models, given=options.given, allowed=options.allowed
    )
    if planned.facts is None or planned.verdict not in (FITS, TIGHT):
        return Rendered(document, planned.verdict, refusal=planned.explanation, unknown=planned.unknown)
    read = {source.model: checkpoint.config for source, checkpoint in planned.known.items()}
    body = {**document.body, "spec": with_configs(document.body["spec"], {**configs, **read})}
    present = assumed_nodes(planned.facts) if nodes is None else nodes
    image = options.operator_image or OPERATOR_IMAGE
    cluster = AssumedCluster(present, calibration, options.allowed, image)
    try:
        made = render_deployment(body, cluster)
    except NotRenderedError as error:
        return Rendered(document, INVALID, refusal=str(error))
    return Rendered(document, planned.verdict, tuple(without_owner(made.objects)), deployment=made)


def neighbour(document: Document, name: str) -> str:
    """Return the qualified name of another object in the namespace of one."""
    metadata = {**document.body["metadata"], "name": name}
    return replace(document, body={"metadata": metadata}).qualified_name


def golden_body(document: Document, spec: SpecDecodeCaptureSpec, captures: Mapping[str, Document]) -> Body | None:
    """Return what a capture is held against; None where no file has it, or not as it could be stored."""
    golden = captures.get(neighbour(document, spec.against.capture)) if spec.against else None
    if golden is None:
        return None
    try:
        admitted_capture(golden.body)
    except InvalidSpecError:
        return None
    return golden.body


def _capture(
    document: Document,
    deployments: Mapping[str, Rendered],
    captures: Mapping[str, Document],
    configs: Mapping[str, dict[str, Any]],
    options: Options,
) -> Rendered:
    try:
        spec = admitted_capture(document.body)
    except InvalidSpecError as error:
        return Rendered(document, INVALID, refusal=str(error))
    captured = deployments.get(neighbour(document, spec.deployment))
    if captured is None:
        refusal = f"spec.deployment: {spec.deployment}: is not in these files: name its file, too"
        return Rendered(document, INVALID, refusal=refusal)
    if captured.deployment is None:
        return Rendered(document, captured.verdict, refusal=f"its deployment: {captured.refusal}")
    try:
        body = {**document.body, "spec": with_configs(document.body["spec"], configs)}
        golden = golden_body(document, spec, captures)
        objects = render_capture(body, captured.deployment, golden, options.operator_image)
    except NotRenderedError as error:
        return Rendered(document, _VERDICTS.get(error.reason, INVALID), refusal=str(error))
    return Rendered(document, FITS, tuple(without_owner(objects)))


_LINE_WIDTH: Final = 120
_ENGINE: Final = "vllm"


def documents_text(objects: Iterable[Body]) -> str:
    """Return objects as documents of one YAML file, each after ``---``."""
    return "".join(f"---\n{yaml_text(body, Dumper=_Readable, sort_keys=True, width=_LINE_WIDTH)}" for body in objects)


def command_text(objects: Sequence[Body]) -> str:
    """Return what each engine of the objects is started with: image, environment, and a line an argument."""
    return "\n\n".join(
        _command(f"{body['kind']} {body['metadata']['name']}{role}", pod)
        for body in objects
        if body["kind"] in WORKLOAD_KINDS
        for role, pod in _pods(body)
    )


def _pods(workload: Body) -> Iterator[tuple[str, Body]]:
    if workload["kind"] == DEPLOYMENT.kind:
        yield "", workload["spec"]["template"]["spec"]
    else:
        group = workload["spec"]["leaderWorkerTemplate"]
        yield ", leader", group["leaderTemplate"]["spec"]
        yield ", workers", group["workerTemplate"]["spec"]


def _command(title: str, pod: Body) -> str:
    (engine,) = (each for each in pod["containers"] if each["name"] == ENGINE_CONTAINER)
    words = [*engine.get("command", []), *engine.get("args", [])]
    # With a cache of models a script comes first, which becomes the engine.
    words = words[words.index(_ENGINE) :] if _ENGINE in words else words
    variables = [f"{each['name']}={_in_shell(each['value'])}" for each in engine.get("env", []) if "value" in each]
    lines = [*variables, *_by_argument(words)]
    return f"# {title}: {printable(engine['image'])}\n" + " \\\n  ".join(lines)


def _by_argument(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--"):
            lines[-1] += f" {_in_shell(word)}"
        else:
            lines.append(_in_shell(word))
    return lines


def _in_shell(word: str) -> str:
    """Return a container's argument as a shell takes it: the kubelet makes one dollar of two."""
    plain = word.replace("$$", "$")
    if plain.replace("\n", "").isprintable():
        return shlex.quote(plain)
    # What would do something to a terminal, as bash, zsh and POSIX's shell of 2024 write it.
    return f"$'{''.join(map(_in_dollar_quotes, plain))}'"


def _in_dollar_quotes(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    return character if character.isprintable() else "".join(f"\\{byte:03o}" for byte in character.encode())


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as such, and equal values out each time."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  yaml's signature
        return True


def _text(dumper: yaml.SafeDumper, value: Any) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Readable.add_representer(str, _text)
_Readable.add_multi_representer(str, _text)


_VERSION_HELP: Final = "Render for this vLLM version, such as 0.32, whatever the objects say."
_IMAGE_HELP: Final = "Image of the operator, which captures run too. Absent: the chart's default."


class Form(StrEnum):
    """What to print."""

    YAML = "yaml"
    JSON = "json"
    COMMAND = "command"


def render_command(  # noqa: PLR0913  each is an option
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    facts: options.FactsOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
    engine_version: Annotated[str | None, typer.Option(help=_VERSION_HELP)] = None,
    operator_image: Annotated[str | None, typer.Option(help=_IMAGE_HELP)] = None,
    allow_pod_template: options.AllowPodTemplateOption = None,
    output: Annotated[
        Form, typer.Option("--output", "-o", help="yaml, json, or command: the vLLM command line alone.")
    ] = Form.YAML,
) -> None:
    """Print the objects that the operator would make, or the vLLM command line.

    Of a SpecDecodeDeployment and, where its deployment is in the files too, of
    a SpecDecodeCapture. Left out is what only a cluster knows: owners, and the
    commits that a cache of models holds.

    Exits with 0 when all objects are rendered, else as plan does: 2 for invalid
    input, 4 when one does not fit, 5 when a model is unknown here.
    """
    allowed, models = allowed_names(allow_pod_template), hub_models(wanted=hub)
    asked = Options(
        nodes, model_config or [], calibration, engine_version, operator_image, allowed, models, facts=facts or []
    )
    found, errors = render(sources(files, file), asked)
    _print(found, output)
    for each in found:
        if each.refusal:
            say_line(f"error: {each.document.name}: {each.refusal}", err=True)
    say_what_is_missing(errors, [model for each in found for model in each.unknown], hub=hub)
    raise typer.Exit(_exit_code(found, invalid=bool(errors) or not found))


def _print(found: "Sequence[Rendered]", output: Form) -> None:
    objects = [body for each in found for body in each.objects]
    if output is Form.JSON:
        print_json({"apiVersion": "v1", "kind": "List", "items": objects})
    elif output is Form.COMMAND:
        typer.echo(command_text(objects))
    else:
        typer.echo(documents_text(objects), nl=False)


def _exit_code(found: "Sequence[Rendered]", *, invalid: bool) -> ExitCode:
    from specdecode_operator.cli.plan.answers import DOES_NOT_FIT, UNKNOWN  # noqa: PLC0415

    refused = {each.verdict for each in found if each.refusal}
    if invalid or refused - {DOES_NOT_FIT, UNKNOWN}:
        return ExitCode.INVALID
    if DOES_NOT_FIT in refused:
        return ExitCode.DOES_NOT_FIT
    return ExitCode.UNKNOWN if refused else ExitCode.OK
