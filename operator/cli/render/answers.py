"""Answers the question of `render` for the objects in some files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specdecode_operator.api import capture
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.capture.control import arms
from specdecode_operator.cli.input_files import (
    Document,
    read_calibration,
    read_nodes,
    read_ours,
    refuse_unused,
    with_configs,
)
from specdecode_operator.cli.plan.answers import DOES_NOT_FIT, FITS, INVALID, TIGHT, UNKNOWN, answer
from specdecode_operator.cli.plan.given_facts import read_given
from specdecode_operator.cli.plan.unknown import Models, UnknownModel
from specdecode_operator.cli.render.objects import (
    OPERATOR_IMAGE,
    AssumedCluster,
    NotRenderedError,
    RenderedDeployment,
    render_capture,
    render_deployment,
    without_owner,
)
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.deployment.plan.planning import assumed_nodes
from specdecode_operator.deployment.spec.admission import admitted_capture
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.kube.pod_policy import NONE_ALLOWED
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.resolver.read_model_facts import Checkpoint
from specdecode_operator.sizing.pair.calibration import Calibration

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
    """Return an object with the vLLM version that is asked for, if one is."""
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
