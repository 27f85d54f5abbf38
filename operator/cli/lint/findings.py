"""What is wrong with objects in files, as the API server and the operator would say it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from specdecode_operator.admission.judgement import (
    Level,
    Remark,
    Terms,
    capture_remarks,
    deployment_remarks,
    refusals,
)
from specdecode_operator.admission.policies import Policies
from specdecode_operator.api import capture, deployment
from specdecode_operator.api.crd.admission import as_stored
from specdecode_operator.api.key import Key
from specdecode_operator.cli.input_files import Document, Reading, with_configs
from specdecode_operator.cli.lint.positions import line_of
from specdecode_operator.cli.plan.unknown import look_up
from specdecode_operator.cli.render.answers import Options, golden_body, neighbour, rendered_deployment
from specdecode_operator.cli.render.objects import NotRenderedError, render_capture
from specdecode_operator.deployment.spec.admission import admitted_capture, admitted_object
from specdecode_operator.deployment.spec.checkpoints import MODEL_UNKNOWN
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED

UNREADABLE: Final = "Unreadable"
"""A rule that is no reason of a condition: of a file that holds no object of ours."""

_LATER: Final = (
    "in the cluster the operator reads it; with --hub or --model-config ID=PATH the rest is checked here, too"
)

Configs = Mapping[str, dict[str, Any]]
"""The content of config.json by model id, for models whose spec holds none."""


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


def find(
    reading: Reading, configs: Configs, options: Options, terms: Terms, policies: Policies | None = None
) -> list[Finding]:
    """Return what is found in objects that were read, in their order, and what could not be read.

    ``terms`` are those of the operator, ``policies`` those of the cluster. Of the options, those count that say where
    models may be had and, for captures, what podTemplate may ask for.
    """
    by_kind: dict[str, dict[str, Document]] = {capture.KIND: {}, deployment.KIND: {}}
    for each in reading.documents:
        by_kind[each.kind][each.qualified_name] = each
    found = []
    for document in reading.documents:
        if document.kind == capture.KIND:
            remarks = _in_capture(document, by_kind, configs, options, terms)
        else:
            remarks = _in_deployment(document, configs, options, terms, policies)
        found += [_located(remark, document) for remark in remarks]
    unread = (Finding(Level.ERROR, UNREADABLE, str(each), each.file or "", line=each.line) for each in reading.errors)
    return [*found, *unread]


def _located(remark: Remark, document: Document) -> Finding:
    """Return the finding that a remark on an object is."""
    field = remark.problem.field
    line = line_of(document, field)
    return Finding(remark.level, remark.rule, remark.sentence, document.file, document, field, line)


def _in_deployment(
    document: Document, configs: Configs, options: Options, terms: Terms, policies: Policies | None
) -> Iterator[Remark]:
    try:
        spec = admitted_object({**document.body, "spec": with_configs(document.body.get("spec"), configs)})
    except InvalidSpecError as error:
        yield from refusals(error)
        return
    if policies is not None:
        yield from policies.remarks({**document.body, "spec": as_stored(spec)}, deployment.PLURAL)
    try:
        known, unknown = look_up(spec, options.models, options.given)
    except InvalidSpecError as error:
        yield from refusals(error)
        return
    for each in unknown:
        yield Remark(Level.WARNING, MODEL_UNKNOWN, replace(each.problem, message=f"{each.why}; {_LATER}"))
    key = Key(document.namespace or "default", document.name)
    yield from deployment_remarks(key, spec, terms, known, unknown={each.field: each.source for each in unknown})


def _in_capture(
    document: Document,
    by_kind: Mapping[str, Mapping[str, Document]],
    configs: Configs,
    options: Options,
    terms: Terms,
) -> Iterator[Remark]:
    """Whether it can be taken of its deployment is told where that one is in the files and runs."""
    try:
        spec = admitted_capture(document.body)
    except InvalidSpecError as error:
        yield from refusals(error)
        return
    remarks = [*capture_remarks(spec, terms)]
    yield from remarks
    if any(each.level is Level.ERROR for each in remarks):
        return
    owner = by_kind[deployment.KIND].get(neighbour(document, spec.deployment))
    captured = rendered_deployment(owner, None, configs, UNCALIBRATED, options).deployment if owner else None
    if captured is None:
        return
    try:
        body = {**document.body, "spec": with_configs(document.body["spec"], configs)}
        render_capture(body, captured, golden_body(document, spec, by_kind[capture.KIND]))
    except NotRenderedError as error:
        level = Level.WARNING if error.may_pass else Level.ERROR
        yield Remark(level, error.reason, Problem("", "", str(error)))
