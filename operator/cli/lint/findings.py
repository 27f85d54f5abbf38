"""What is wrong with objects in files, as the API server and the operator would say it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from specdecode_operator.api import capture
from specdecode_operator.capture.control.admission import workload_blocked
from specdecode_operator.cli.input_files import Document, Reading, with_configs
from specdecode_operator.cli.lint.positions import line_of
from specdecode_operator.cli.plan.unknown import look_up
from specdecode_operator.cli.render.answers import Options, golden_body, neighbour, rendered_deployment
from specdecode_operator.cli.render.objects import NotRenderedError, render_capture
from specdecode_operator.deployment.spec.admission import admitted_capture, admitted_object
from specdecode_operator.deployment.spec.checkpoints import MODEL_UNKNOWN
from specdecode_operator.deployment.spec.validation import check_without_models, refuse_pod_template, valid_facts
from specdecode_operator.deployment.spec.warnings import plan_notes, plan_warnings, version_doubts
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED

UNREADABLE: Final = "Unreadable"
PLAN_WARNING: Final = "PlanWarning"
PLAN_NOTE: Final = "PlanNote"
"""Rules that are no reason of a condition: of a file that holds no object of ours, and of what `Planned` mentions."""

_LATER: Final = (
    "in the cluster the operator reads it; with --hub or --model-config ID=PATH the rest is checked here, too"
)


class Level(StrEnum):
    """How bad it is, in SARIF's words."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"  # Nothing to mend


Configs = Mapping[str, dict[str, Any]]
"""The content of config.json by model id, for models whose spec holds none."""

_Found = tuple[Level, str, Problem]
"""Level, rule, and what is wrong with an object."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    level: Level
    rule: str  # The reason that the condition `Accepted` would have
    message: str  # Field, value and what to do, without a full stop
    file: str  # As it was named; ``-`` for standard input
    document: Document | None = None  # None where a file could not be read
    field: str = ""  # Path in the object; empty where no single field is meant
    line: int | None = None  # Of the field in the file, from 1; None where it is not known


def find(reading: Reading, configs: Configs, options: Options) -> list[Finding]:
    """Return what is found in objects that were read, in their order, and what could not be read.

    Of the options, those count that say what podTemplate may ask for and where models may be had.
    """
    deployments = {each.qualified_name: each for each in reading.documents if each.kind != capture.KIND}
    captures = {each.qualified_name: each for each in reading.documents if each.kind == capture.KIND}
    found = []
    for document in reading.documents:
        if document.kind == capture.KIND:
            problems = _in_capture(document, deployments, captures, configs, options)
        else:
            problems = _in_deployment(document, configs, options)
        found += [_located(*problem, document) for problem in problems]
    return [*found, *(Finding(Level.ERROR, UNREADABLE, str(error), error.file or "") for error in reading.errors)]


def _located(level: Level, rule: str, problem: Problem, document: Document) -> Finding:
    """Return the finding that a problem of an object is."""
    message = str(problem) if problem.field else problem.message
    line = line_of(document, problem.field)
    return Finding(level, rule, message, document.file, document, problem.field, line)


def _in_deployment(document: Document, configs: Configs, options: Options) -> Iterator[_Found]:
    try:
        spec = admitted_object({**document.body, "spec": with_configs(document.body.get("spec"), configs)})
        refuse_pod_template(spec, options.allowed)
        known, unknown = look_up(spec, options.models)
        for each in unknown:
            yield Level.WARNING, MODEL_UNKNOWN, replace(each.problem, message=f"{each.why}; {_LATER}")
        if unknown:
            profile = check_without_models(spec, {each.field: each.source for each in unknown})
            yield from ((Level.WARNING, PLAN_WARNING, doubt) for doubt in version_doubts(spec, profile))
            return
        facts = valid_facts(spec, known)
    except InvalidSpecError as error:
        yield from _refused(error)
        return
    tensor = spec.parallelism.tensor or spec.parallelism.draft_tensor or 1
    # Those that have a field have a line, too.
    doubts = {str(doubt): doubt for doubt in version_doubts(facts.spec, facts.profile)}
    for warning in plan_warnings(facts, known, tensor):
        yield Level.WARNING, PLAN_WARNING, doubts.get(warning, Problem("", "", warning))
    for note in plan_notes(facts):
        yield Level.NOTE, PLAN_NOTE, Problem("", "", note)


def _in_capture(
    document: Document,
    deployments: Mapping[str, Document],
    captures: Mapping[str, Document],
    configs: Configs,
    options: Options,
) -> Iterator[_Found]:
    """Whether it can be taken of its deployment is told where that one is in the files and runs."""
    try:
        spec = admitted_capture(document.body)
    except InvalidSpecError as error:
        yield from _refused(error)
        return
    if blocked := workload_blocked(spec):
        yield Level.ERROR, blocked.reason, Problem("", "", blocked.message)
        return
    owner = deployments.get(neighbour(document, spec.deployment))
    captured = rendered_deployment(owner, None, configs, UNCALIBRATED, options).deployment if owner else None
    if captured is None:
        return
    try:
        body = {**document.body, "spec": with_configs(document.body["spec"], configs)}
        render_capture(body, captured, golden_body(document, spec, captures))
    except NotRenderedError as error:
        yield Level.WARNING if error.may_pass else Level.ERROR, error.reason, Problem("", "", str(error))


def _refused(error: InvalidSpecError) -> Iterator[_Found]:
    for problem in error.problems:
        yield Level.ERROR, error.reason, problem
