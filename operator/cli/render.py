"""`specdecode render`: print the objects and command lines that the operator would create, without a cluster."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
import yaml

from specdecode_operator.api import capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import CaptureSummary, RequestCounts, SpecDecodeCaptureStatus
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.api.spec_problems import admitted_capture, admitted_training
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.api.training_status import TrainedHead
from specdecode_operator.capture import arms
from specdecode_operator.capture.arms import arm_states
from specdecode_operator.capture.decision import decide as decide_capture
from specdecode_operator.capture.observation import Capture, CaptureObservation, ObservedDeployment, read_capture
from specdecode_operator.capture.status import Decision
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cli import input_files, options
from specdecode_operator.cli.options import ExitCode, allowed_names, hub_models, sources
from specdecode_operator.cli.outputs import print_json, yaml_text
from specdecode_operator.cli.plan.answers import (
    DOES_NOT_FIT,
    FITS,
    INVALID,
    TIGHT,
    UNKNOWN,
    UnknownModel,
    answer,
    say_what_is_missing,
)
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import (
    APPLIED_HASH_ANNOTATION,
    DEPLOYMENT,
    DEPLOYMENT_LABEL,
    ENGINE_CONTAINER,
    JOB,
    TEMPLATE_HASH_ANNOTATION,
)
from specdecode_operator.deployment.decision import decide
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState, NotLaunched
from specdecode_operator.deployment.live_recorder import recorder_config_map, starts_recorder
from specdecode_operator.deployment.models.model_jobs import wanted_downloads
from specdecode_operator.deployment.models.model_locations import COMMIT
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.planning import assumed_nodes
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.resource_claim import usable_gpus
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.deployment.rollout.rollout_progress import serving_hash
from specdecode_operator.enums import LiveTokenIds, Method
from specdecode_operator.problems import InvalidSpecError, printable
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.training.decision import decide as decide_training
from specdecode_operator.training.judge import judging_capture
from specdecode_operator.training.observation import TrainingObservation, read_training
from specdecode_operator.training.offers import head_folder
from specdecode_operator.untrusted import mapping
from specdecode_operator.vllm.environment import LIVE_FOLDER_VARIABLE, LIVE_TOKEN_IDS_VARIABLE

OPERATOR_IMAGE: Final = "localhost/specdecode/operator:dev"
"""The chart's default. Load generators of captures and replays run from the operator's image."""
_NAMESPACE: Final = "default"
_NOT_KNOWN: Final = "known-in-the-cluster"
"""Placeholder for a uid, a token, an engine pod, and the claim of a golden capture that the files lack."""
_NO_COMMIT: Final = "not-downloaded-yet"
"""Placeholder for the commit of a branch or tag, which only the download resolves."""
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Placeholder: rendered objects do not depend on the time."""


class NotRenderedError(Exception):
    """The operator would create no objects; the message gives the reason, without a full stop."""

    def __init__(self, readiness: Readiness) -> None:
        super().__init__(readiness.message)
        self.reason = readiness.reason
        self.may_pass = not readiness.stalled


@dataclass(frozen=True)
class AssumedCluster:
    """Assumed state of the cluster, which the operator would read from the API server."""

    nodes: tuple[NodeFacts, ...]
    calibration: Calibration = UNCALIBRATED
    pod_template: frozenset[str] = NONE_ALLOWED
    operator_image: str = OPERATOR_IMAGE

    def state(self) -> ClusterState:
        """Return the cluster state that the operator would pass to its decision."""
        return ClusterState(
            nodes=self.nodes,
            calibration=self.calibration,
            # Allow all paths here: a flag of the operator restricts them.
            host_paths=("/",),
            pod_template=self.pod_template,
            has_leader_worker_sets=True,
            has_resource_claims=True,
            operator_image=self.operator_image,
        )


@dataclass(frozen=True)
class RenderedDeployment:
    """A SpecDecodeDeployment as the operator would launch it."""

    parent: ParsedDeployment
    desired: DesiredState
    body: Body
    cluster: AssumedCluster
    downloads: tuple[Body, ...] = ()
    """Jobs that download models into its cache; they run before the other objects are created."""

    @property
    def objects(self) -> list[Body]:
        """All objects created for it, in order of creation."""
        return [*self.downloads, *self.desired.children]


def render_deployment(body: Body, cluster: AssumedCluster) -> RenderedDeployment:
    """Render a SpecDecodeDeployment whose models are in the catalogue or described in its spec.

    Raises NotRenderedError if the operator would not launch it.
    """
    parent = parse_deployment(as_stored(body))
    desired = _desired_state(parent, cluster)
    if isinstance(desired.outcome, NotLaunched):
        raise NotRenderedError(desired.outcome.readiness)
    has_cache = desired.outcome.facts.spec.models.cache
    before = decide(parent, cluster.state()) if has_cache else desired
    downloads = [child for child in before.children if child["kind"] == JOB.kind]
    return RenderedDeployment(parent, desired, body, cluster, tuple(downloads))


def _desired_state(parent: ParsedDeployment, cluster: AssumedCluster) -> DesiredState:
    """Return the desired state of an object after its models are downloaded."""
    wanted = set() if isinstance(parent.spec, InvalidSpecError) else set(wanted_downloads(parent.spec).values())
    commits = {}
    for source in wanted:
        is_commit = source.revision and COMMIT.fullmatch(source.revision)
        commits[source.key] = source.revision if source.revision and is_commit else _NO_COMMIT
    return decide(parent, replace(cluster.state(), downloads=commits))


def render_capture(
    body: Body, captured: RenderedDeployment, golden: Body | None = None, operator_image: str | None = None
) -> list[Body]:
    """Render the claim and Job of a valid SpecDecodeCapture; the parameters are those of ``started_capture``."""
    writes = started_capture(body, captured, golden, operator_image).writes
    return [each for each in (writes.claim, writes.job) if each is not None]


def started_capture(
    body: Body, captured: RenderedDeployment, golden: Body | None = None, operator_image: str | None = None
) -> Decision:
    """Return the decision that starts a valid SpecDecodeCapture. Other objects that it refers to are assumed to exist.

    ``golden`` is the capture in spec.against. If it is known, both captures are checked for compatibility. Raises
    NotRenderedError if the operator would reject the capture.
    """
    capture, parent = read_capture(as_stored(body)), captured.parent
    arms = arm_states(
        SpecDecodeCaptureSpec.parse(body["spec"]),
        captured.body,
        captured.desired.outcome,
        lambda _, changed: _desired_state(parse_deployment(as_stored(changed)), captured.cluster),
    )
    claim = mapping(mapping(capture.spec, "storage"), "persistentVolumeClaim").get("claimName")
    dataset = mapping(mapping(capture.spec, "workload"), "prompts").get("dataset")
    observed = CaptureObservation(
        ObservedDeployment(
            parent.key, parent.uid, parent.generation, captured.desired, arms, pods=_ready_pods(capture, captured)
        ),
        operator_image=operator_image or OPERATOR_IMAGE,
        golden=_as_golden(capture, golden),
        claim={"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}} if claim else None,
        dataset={"data": {dataset["path"]: ""}} if dataset else None,
        token=_NOT_KNOWN,
        token_ids_allowed=LiveTokenIds.PROMPTS,
    )
    decision = decide_capture(capture, observed, _ANY_TIME)
    if decision.writes.job is None:
        raise NotRenderedError(decision.readiness)
    return decision


def _ready_pods(capture: Capture, captured: RenderedDeployment) -> list[Body]:
    """Return the engine pods that a live capture would record; a placeholder if it names none."""
    workload, names = captured.desired.workload, mapping(capture.spec, "live").get("pods") or [_NOT_KNOWN]
    if workload is None or not capture.is_live:
        return []
    metadata = {
        "labels": {DEPLOYMENT_LABEL: captured.parent.key.name},
        "annotations": {TEMPLATE_HASH_ANNOTATION: serving_hash(workload)},
    }
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return [{"metadata": {"name": name, **metadata}, "status": ready} for name in names]


def with_recorders(objects: Iterable[Body]) -> list[Body]:
    """Return objects with the recorder of each namespace before the first workload that needs it."""
    found, namespaces = list[Body](), set[str]()
    for body in objects:
        namespace = body["metadata"]["namespace"]
        if namespace not in namespaces and starts_recorder(body):
            namespaces.add(namespace)
            found.append(recorder_config_map(namespace))
        found.append(body)
    return found


def _without_owner(objects: Iterable[Body]) -> tuple[Body, ...]:
    """Remove owner references and the operator's hash annotation, so that kubectl can apply the objects."""
    found = []
    for body in objects:
        metadata = {name: value for name, value in body["metadata"].items() if name != "ownerReferences"}
        annotations = metadata.pop("annotations", None) or {}
        annotations = {name: value for name, value in annotations.items() if name != APPLIED_HASH_ANNOTATION}
        found.append({**body, "metadata": {**metadata, "annotations": annotations} if annotations else metadata})
    return tuple(found)


def as_stored(body: Body) -> Body:
    """Return an object with the metadata that the API server adds: namespace, uid, generation, resource version."""
    metadata = {"namespace": _NAMESPACE, "uid": _NOT_KNOWN, "generation": 1, "resourceVersion": "1", **body["metadata"]}
    return {**body, "metadata": metadata}


def _as_golden(capture: Capture, golden: Body | None) -> Body | None:
    against = capture.spec.get("against")
    if against is None:
        return None
    if golden is None:
        spec = {**capture.spec, "storage": {"persistentVolumeClaim": {"claimName": _NOT_KNOWN}}}
        golden = {"metadata": {"namespace": capture.key.namespace, "name": against["capture"]}, "spec": spec}
    return _succeeded(golden)


def _succeeded(body: Body) -> Body:
    """Return a capture as it is after its success, without an answer if the number of its requests is unknown."""
    known = read_capture(as_stored(body))
    succeeded = Condition(
        type="Succeeded",
        status=ConditionStatus.TRUE,
        reason="Captured",
        message="",
        observed_generation=known.generation,
        last_transition_time=f"{_ANY_TIME:%Y-%m-%dT%H:%M:%SZ}",
    )
    spec = SpecDecodeCaptureSpec.parse(known.spec)
    requests = sum(each.requests or 0 for each in spec.workload.phases)
    summary = CaptureSummary(requests=RequestCounts(sent=requests, completed=requests))
    status = SpecDecodeCaptureStatus(claim=claim_of(known, spec.storage), conditions=[succeeded], summary=summary)
    return {**as_stored(body), "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def render_training(
    body: Body, owner: RenderedDeployment, captures: Mapping[str, Body], operator_image: str | None = None
) -> list[Body]:
    """Render the claim and Job of a valid SpecDecodeTraining, and the capture that measures its head.

    ``captures`` are known captures by name. Other objects that it refers to are assumed to exist, and its captures to
    have succeeded. Raises NotRenderedError if the operator would reject the training.
    """
    training, parent = read_training(as_stored(body)), owner.parent
    spec = SpecDecodeTrainingSpec.parse(training.spec)
    sources = {name: _succeeded(captures.get(name) or _answers(training.key, spec, name)) for name in spec.captures}
    rows, existing = spec.dataset, spec.storage.existing_claim
    observed = TrainingObservation(
        ObservedDeployment(parent.key, parent.uid, parent.generation, owner.desired),
        captures=sources,
        capture_claims={each["status"]["claim"]: _ASSUMED_CLAIM for each in sources.values()},
        rows={"data": {rows.path: ""}} if rows else None,
        starting_head=_ASSUMED_CLAIM,
        claim={**_ASSUMED_CLAIM, "metadata": {"name": existing}} if existing else None,
        operator_image=operator_image or OPERATOR_IMAGE,
    )
    decision = decide_training(training, observed, _ANY_TIME)
    if decision.writes.job is None:
        raise NotRenderedError(decision.readiness)
    found = [each for each in (decision.writes.claim, decision.writes.job) if each is not None]
    written = parent.spec
    if not spec.judgement.enabled or isinstance(written, InvalidSpecError):
        return found
    config = {"speculators_model_type": spec.method.value}
    head = TrainedHead(path=head_folder(training.key), sha256=_NOT_KNOWN, bytes=0, config=config)
    served = written.speculation.method if written.speculation else Method.NONE
    return [*found, judging_capture(training, spec, head, written, served)]


_ASSUMED_CLAIM: Final[Body] = {"metadata": {"name": _NOT_KNOWN}, "spec": {"accessModes": ["ReadWriteMany"]}}


def _answers(training: Key, spec: SpecDecodeTrainingSpec, name: str) -> Body:
    """Return a capture that is not in the files, as a training needs it."""
    dataset = {"persistentVolumeClaim": {"claimName": _NOT_KNOWN}, "path": _NOT_KNOWN, "format": "JSONL"}
    captured = {
        "deployment": spec.deployment,
        "record": {"tokenIds": True},
        "workload": {"prompts": {"dataset": dataset}},
    }
    return {"metadata": {"namespace": training.namespace, "name": name}, "spec": captured}


_VERDICTS: Final = {arms.DOES_NOT_FIT: DOES_NOT_FIT, arms.WAITS: UNKNOWN}
"""Verdict on a capture that the operator would not start, by reason. For other reasons, the verdict is Invalid."""


@dataclass(frozen=True)
class Rendered:
    """The rendering of one object."""

    document: input_files.Document
    verdict: str  # The verdict of `plan`: Fits, Tight, Unknown, DoesNotFit or Invalid; Fits for a rendered capture
    objects: tuple[Body, ...] = ()  # In order of creation
    refusal: str = ""  # Reason if there are no objects, without a full stop
    deployment: RenderedDeployment | None = None  # Used to render captures of it
    unknown: tuple[UnknownModel, ...] = ()  # Models that only the cluster can read


@dataclass(frozen=True)
class Options(input_files.InputOptions):
    """Options of `specdecode render`."""

    allowed: frozenset[str] | None = NONE_ALLOWED
    engine_version: str | None = None  # Overrides spec.engine.version
    operator_image: str | None = None


def render(files: Sequence[str], options: Options) -> tuple[list[Rendered], list[DocumentError]]:
    """Render each object in files, folders or ``-``, in the order read; also return the errors of unreadable files."""
    reading = input_files.read_ours(files, input_files.OUR_KINDS)
    try:
        inputs = options.read(reading.documents)
    except DocumentError as error:
        return [], [error]
    captures = {each.qualified_name: each for each in reading.documents if each.kind == capture.KIND}
    deployments = {}
    for document in reading.documents:
        if document.kind == deployment.KIND:
            spec, asked = document.body.get("spec"), document
            if options.engine_version is not None and isinstance(spec, dict):
                engine = {**mapping(spec, "engine"), "version": options.engine_version}
                asked = replace(document, body={**document.body, "spec": {**spec, "engine": engine}})
            deployments[document.qualified_name] = rendered_deployment(asked, inputs, options.operator_image)
    run = {capture.KIND: _capture, training.KIND: _training}
    found = [
        run[document.kind](document, deployments, captures, inputs.configs, options.operator_image)
        if document.kind in run
        else deployments[document.qualified_name]
        for document in reading.documents
    ]
    return found, list(reading.errors)


def rendered_deployment(
    document: input_files.Document, inputs: input_files.Inputs, operator_image: str | None = None
) -> Rendered:
    """Render a SpecDecodeDeployment. Without --nodes, it uses the nodes that `plan` assumes."""
    planned = answer(document, inputs)
    if planned.facts is None or planned.verdict not in (FITS, TIGHT):
        return Rendered(document, planned.verdict, refusal=planned.explanation, unknown=planned.unknown)
    read = {source.model: checkpoint.config for source, checkpoint in planned.known.items()}
    body = {**document.body, "spec": input_files.with_configs(document.body["spec"], {**inputs.configs, **read})}
    nodes = assumed_nodes(planned.facts)
    if inputs.nodes is not None:
        nodes = usable_gpus(planned.facts.spec, inputs.nodes, inputs.devices)
    allowed = NONE_ALLOWED if inputs.allowed is None else inputs.allowed
    try:
        made = render_deployment(
            body, AssumedCluster(nodes, inputs.calibration, allowed, operator_image or OPERATOR_IMAGE)
        )
    except NotRenderedError as error:
        return Rendered(document, INVALID, refusal=str(error))
    return Rendered(document, planned.verdict, _without_owner(made.objects), deployment=made)


def neighbour(document: input_files.Document, name: str) -> str:
    """Return the qualified name of an object in the same namespace."""
    metadata = {**document.body["metadata"], "name": name}
    return replace(document, body={"metadata": metadata}).qualified_name


def golden_body(
    document: input_files.Document, spec: SpecDecodeCaptureSpec, captures: Mapping[str, input_files.Document]
) -> Body | None:
    """Return the capture in spec.against; None if the files lack it or it is invalid."""
    return _valid_capture(captures.get(neighbour(document, spec.against.capture))) if spec.against else None


def _valid_capture(document: input_files.Document | None) -> Body | None:
    """Return a capture in the files; None if it is missing or invalid, which is reported for the capture itself."""
    if document is None:
        return None
    try:
        admitted_capture(document.body)
    except InvalidSpecError:
        return None
    return document.body


def _capture(
    document: input_files.Document,
    deployments: Mapping[str, Rendered],
    captures: Mapping[str, input_files.Document],
    configs: Mapping[str, dict[str, Any]],
    operator_image: str | None,
) -> Rendered:
    try:
        spec = admitted_capture(document.body)
    except InvalidSpecError as error:
        return Rendered(document, INVALID, refusal=str(error))
    captured = _owner(document, spec.deployment, deployments)
    if isinstance(captured, Rendered):
        return captured
    try:
        body = {**document.body, "spec": input_files.with_configs(document.body["spec"], configs)}
        golden = golden_body(document, spec, captures)
        objects = render_capture(body, captured, golden, operator_image)
    except NotRenderedError as error:
        return Rendered(document, _VERDICTS.get(error.reason, INVALID), refusal=str(error))
    return Rendered(document, FITS, _without_owner(objects))


def _training(
    document: input_files.Document,
    deployments: Mapping[str, Rendered],
    captures: Mapping[str, input_files.Document],
    _: Mapping[str, dict[str, Any]],
    operator_image: str | None,
) -> Rendered:
    try:
        spec = admitted_training(document.body)
    except InvalidSpecError as error:
        return Rendered(document, INVALID, refusal=str(error))
    owner = _owner(document, spec.deployment, deployments)
    if isinstance(owner, Rendered):
        return owner
    try:
        found = {name: _valid_capture(captures.get(neighbour(document, name))) for name in spec.captures}
        known = {name: body for name, body in found.items() if body is not None}
        objects = render_training(document.body, owner, known, operator_image)
    except NotRenderedError as error:
        return Rendered(document, INVALID, refusal=str(error))
    return Rendered(document, FITS, _without_owner(objects))


def _owner(
    document: input_files.Document, name: str, deployments: Mapping[str, Rendered]
) -> RenderedDeployment | Rendered:
    """Return the deployment of a capture or training, or the result without it."""
    owner = deployments.get(neighbour(document, name))
    if owner is None:
        return Rendered(document, INVALID, refusal=f"spec.deployment: {name}: not found in these files: add its file")
    if owner.deployment is None:
        return Rendered(document, owner.verdict, refusal=f"its deployment: {owner.refusal}")
    return owner.deployment


_LINE_WIDTH: Final = 120
_ENGINE: Final = "vllm"


def documents_text(objects: Iterable[Body]) -> str:
    """Return objects as YAML documents, each after ``---``."""
    return "".join(f"---\n{yaml_text(body, Dumper=_Readable, sort_keys=True, width=_LINE_WIDTH)}" for body in objects)


def command_text(objects: Sequence[Body]) -> str:
    """Return the image, environment and arguments of each engine, with one argument per line."""
    commands = []
    for body in objects:
        if body["kind"] not in WORKLOAD_KINDS:
            continue
        if body["kind"] == DEPLOYMENT.kind:
            pods = {"": body["spec"]["template"]["spec"]}
        else:
            group = body["spec"]["leaderWorkerTemplate"]
            pods = {", leader": group["leaderTemplate"]["spec"], ", workers": group["workerTemplate"]["spec"]}
        for role, pod in pods.items():
            (engine,) = (each for each in pod["containers"] if each["name"] == ENGINE_CONTAINER)
            words = [*engine.get("command", []), *engine.get("args", [])]
            # The shell that loads the recorder comes first, and with a model cache, a script that then execs vLLM.
            words = words[4:] if words[:2] == ["/bin/sh", "-c"] else words
            words = words[words.index(_ENGINE) :] if _ENGINE in words else words
            lines = [
                f"{each['name']}={_in_shell(each['value'])}"
                for each in engine.get("env", [])
                if "value" in each and each["name"] not in (LIVE_FOLDER_VARIABLE, LIVE_TOKEN_IDS_VARIABLE)
            ]
            variables = len(lines)
            for word in words:
                if len(lines) > variables and not word.startswith("--"):
                    lines[-1] += f" {_in_shell(word)}"
                else:
                    lines.append(_in_shell(word))
            title = f"# {body['kind']} {body['metadata']['name']}{role}: {printable(engine['image'])}"
            commands.append(f"{title}\n" + " \\\n  ".join(lines))
    return "\n\n".join(commands)


def _in_shell(word: str) -> str:
    """Quote a container's argument for a shell. In containers, $$ is an escaped $."""
    plain = word.replace("$$", "$")
    if plain.replace("\n", "").isprintable():
        return shlex.quote(plain)
    # Dollar quotes of bash, zsh and POSIX.1-2024 escape control characters.
    escaped = (
        f"\\{each}"
        if each in "'\\"
        else each
        if each.isprintable()
        else "".join(f"\\{byte:03o}" for byte in each.encode())
        for each in plain
    )
    return f"$'{''.join(escaped)}'"


class _Readable(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings as blocks and uses no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  yaml's signature
        return True


def _text(dumper: yaml.SafeDumper, value: Any) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Readable.add_representer(str, _text)
_Readable.add_multi_representer(str, _text)


class Form(StrEnum):
    """Output format."""

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
    engine_version: Annotated[
        str | None,
        typer.Option(help="Render for this vLLM version, such as 0.32, instead of the version in the objects."),
    ] = None,
    operator_image: Annotated[
        str | None,
        typer.Option(help="Image of the operator, also used by captures. Defaults to the image of the chart."),
    ] = None,
    allow_pod_template: options.AllowPodTemplateOption = None,
    output: Annotated[
        Form, typer.Option("--output", "-o", help="Format: yaml, json, or command (only the vLLM command lines).")
    ] = Form.YAML,
) -> None:
    """Print the objects that the operator would create, or the vLLM command lines.

    It renders each SpecDecodeDeployment, and each SpecDecodeCapture and
    SpecDecodeTraining whose deployment is in the files. Values that only the
    cluster has are omitted: owners, and the commits in a model cache.

    Exits with 0 when all objects are rendered, otherwise as plan does: 2 for
    invalid input, 4 when one does not fit, 5 when a model is unknown here.
    """
    asked = Options(
        nodes,
        model_config or [],
        calibration,
        facts or [],
        hub_models(wanted=hub),
        allowed_names(allow_pod_template),
        engine_version=engine_version,
        operator_image=operator_image,
    )
    found, errors = render(sources(files, file), asked)
    objects = _without_owner(with_recorders(body for each in found for body in each.objects))
    if output is Form.JSON:
        print_json({"apiVersion": "v1", "kind": "List", "items": objects})
    elif output is Form.COMMAND:
        typer.echo(command_text(objects))
    else:
        typer.echo(documents_text(objects), nl=False)
    for each in found:
        if each.refusal:
            say_line(f"error: {each.document.name}: {each.refusal}", err=True)
    say_what_is_missing(errors, [model for each in found for model in each.unknown], hub=hub)
    refused = {each.verdict for each in found if each.refusal}
    if errors or not found or refused - {DOES_NOT_FIT, UNKNOWN}:
        raise typer.Exit(ExitCode.INVALID)
    if DOES_NOT_FIT in refused:
        raise typer.Exit(ExitCode.DOES_NOT_FIT)
    raise typer.Exit(ExitCode.UNKNOWN if refused else ExitCode.OK)
