"""`specdecode lint`: find errors for which the API server or the operator would reject an object.

Output formats are text, JSON, Markdown and SARIF 2.1.0.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
import yaml

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.crd_validation import as_stored
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.spec_problems import admitted_capture, admitted_object
from specdecode_operator.cli import options
from specdecode_operator.cli.input_files import (
    Document,
    Reading,
    read_all,
    read_calibration,
    read_given,
    read_nodes,
    read_ours,
    read_storage_classes,
    refuse_unused,
    with_configs,
)
from specdecode_operator.cli.options import ExitCode, allowed_names, allowed_paths, fail, hub_models, sources
from specdecode_operator.cli.outputs import code, limited, print_json
from specdecode_operator.cli.plan.answers import look_up
from specdecode_operator.cli.render import (
    NotRenderedError,
    Options,
    golden_body,
    neighbour,
    render_capture,
    rendered_deployment,
)
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import STANDARD_INPUT, DocumentError, read_text
from specdecode_operator.deployment.models.checkpoints import MODEL_UNKNOWN
from specdecode_operator.handlers.admission_findings import (
    Level,
    Policies,
    Remark,
    Terms,
    capture_remarks,
    deployment_remarks,
    refusals,
)
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.calibration import UNCALIBRATED
from specdecode_operator.version import __version__

_STEP: Final = re.compile(r"[^.\[\]]+|\[(\d+)\]")
# The safe loader in C where there is one: this composes the whole file once more.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def line_of(document: Document, field: str) -> int | None:
    """Return the line, from 1, of a field of an object, or of what should hold it; None where nothing is known."""
    documents = _composed(document.file)
    if document.number is None or document.number > len(documents):
        return None
    node = documents[document.number - 1]
    steps: list[str | int] = [] if document.item is None else ["items", document.item - 1]
    steps += [each[0] if each[1] is None else int(each[1]) for each in _STEP.finditer(field)]
    line = None if node is None else node.start_mark.line + 1
    for step in steps:
        found = _inside(node, step)
        if found is None:
            break
        line, node = found
    return line


@lru_cache(maxsize=1)
def _composed(file: str) -> tuple[yaml.Node | None, ...]:
    if file == STANDARD_INPUT:
        return ()
    try:
        return tuple(yaml.compose_all(read_text(file), Loader=_Loader))
    except (yaml.YAMLError, DocumentError):  # JSON with tabs is no YAML; and files come and go
        return ()


def _inside(node: yaml.Node | None, step: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        entry = node.value[step]
        return entry.start_mark.line + 1, entry
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line + 1, value
    return None


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


def lint_markdown(findings: Sequence[Finding], counts: str) -> str:
    """Return a heading, how many findings there are, and each in a line: what is refused first."""
    levels = list(Level)
    lines = [_line(each) for each in sorted(findings, key=lambda each: levels.index(each.level))]
    return "\n".join(["### specdecode lint", "", counts, *([""] if lines else []), *limited(lines)])


def _line(finding: Finding) -> str:
    place = f"{finding.file}:{finding.line}" if finding.line is not None else finding.file
    where = f"{code(place)} " if place else ""
    return f"- **{finding.level}** {where}{code(finding.message)} ({finding.rule})"


_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_STANDARD_INPUT: Final = "stdin"


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a log with one run."""
    rules = list(dict.fromkeys(each.rule for each in findings))
    driver = {"name": "specdecode", "version": __version__, "rules": [{"id": rule} for rule in rules]}
    results = [_result(each, rules.index(each.rule)) for each in findings]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.file)}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.line}
    location: dict[str, Any] = {"physicalLocation": place}
    if finding.document is not None:
        name = f"{finding.document.kind} {finding.document.qualified_name}"
        location["logicalLocations"] = [{"fullyQualifiedName": f"{name} {finding.field}".strip(), "kind": "object"}]
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": finding.level.value,
        "message": {"text": finding.message},
        "locations": [location],
    }


def _uri(file: str) -> str:
    """Return a file as a URI: below the working directory relative to it, as GitHub wants it."""
    if file == STANDARD_INPUT:
        return _STANDARD_INPUT
    path, here = Path(file).absolute(), Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()


_POLICY_HELP: Final = (
    "ValidatingAdmissionPolicies with bindings, ConfigMaps and Namespaces: what helm template prints, or kubectl get."
)
_CLASSES_HELP: Final = (
    "StorageClasses of the cluster, as kubectl get storageclasses -o yaml writes them; warns of a capture whose claim"
    " would find none."
)


class Form(StrEnum):
    """How to print."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    MARKDOWN = "markdown"


def lint_command(  # noqa: PLR0913  each is an option
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    model_config: options.ModelConfigOption = None,
    facts: options.FactsOption = None,
    hub: options.HubOption = False,
    nodes: options.NodesOption = None,
    calibration: options.CalibrationOption = None,
    allow_host_path: options.AllowHostPathOption = None,
    allow_pod_template: options.AllowPodTemplateOption = None,
    refuse_does_not_fit: options.RefuseOption = False,
    storage_classes: Annotated[str | None, typer.Option(metavar="FILE", help=_CLASSES_HELP)] = None,
    admission_policy: Annotated[str | None, typer.Option(metavar="FILE", help=_POLICY_HELP)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail (3) also for warnings.")] = False,
    output: Annotated[
        Form, typer.Option("--output", "-o", help="text, json, sarif, or markdown for summaries of CI.")
    ] = Form.TEXT,
) -> None:
    """Say what API server, admission and operator would refuse in objects of both kinds, and warn of the rest.

    What fits nowhere is a warning, as in admission: on no GPU that an object
    names, else on none that is known, or on none of --nodes. An arm of a
    capture has to fit where its deployment runs.

    Exits with 0 when nothing is refused, 2 when something is, 3 with --strict
    when there are warnings.
    """
    reading = read_ours(sources(files, file))
    try:
        configs, given = read_given(model_config or [], facts or [])
        refuse_unused(configs, reading.documents)
        fleet = None if nodes is None else read_nodes(nodes)
        corrected = read_calibration(calibration)
        classes = None if storage_classes is None else read_storage_classes(storage_classes)
        policies = None if admission_policy is None else _policies(admission_policy)
    except DocumentError as error:
        fail(error)
    asked = Options(allowed=allowed_names(allow_pod_template), models=hub_models(wanted=hub), given=given)
    terms = Terms(
        allowed_paths(allow_host_path),
        asked.allowed,
        does_not_fit=not refuse_does_not_fit,
        nodes=fleet,
        calibration=corrected,
        storage_classes=classes,
    )
    findings = find(reading, configs, asked, terms, policies)
    _print(findings, len(reading.documents), output)
    levels = {finding.level for finding in findings}
    if Level.ERROR in levels:
        raise typer.Exit(ExitCode.INVALID)
    raise typer.Exit(ExitCode.TIGHT if strict and Level.WARNING in levels else ExitCode.OK)


def _policies(file: str) -> "Policies":
    found = Policies.of([each.body for each in read_all(file) if isinstance(each, Document)])
    if not found.bindings and not found.policies:
        raise DocumentError(
            f"{file}: holds no ValidatingAdmissionPolicy: of the chart's values, limits makes them: set it and render"
            " the chart anew, or leave --admission-policy out"
        )
    if not found.bindings or not found.policies:
        lacks = "bindings of its policies" if found.policies else "policies of its bindings"
        raise DocumentError(f"{file}: lacks the {lacks}: write both, as helm template does")
    return found


def _print(findings: "Sequence[Finding]", objects: int, output: Form) -> None:
    if output is Form.SARIF:
        print_json(sarif(findings))
    elif output is Form.JSON:
        print_json({"objects": objects, "findings": list(map(_data, findings))})
    elif output is Form.MARKDOWN:
        say(lint_markdown(findings, _counted(findings, objects)))
    else:
        for finding in findings:
            place = f"{finding.file}:{finding.line}" if finding.line is not None else finding.file
            # What several files lack is of none of them.
            said = f"{finding.level}: {finding.message} [{finding.rule}]"
            say_line(f"{place}: {said}" if place else said)
        say_line(_counted(findings, objects))


def _counted(findings: "Sequence[Finding]", objects: int) -> str:
    counts = Counter(finding.level.value for finding in findings)
    notes = f", notes: {counts['note']}" if counts["note"] else ""
    return f"objects: {objects}, errors: {counts['error']}, warnings: {counts['warning']}{notes}"


def _data(finding: "Finding") -> dict[str, Any]:
    document = finding.document
    return {
        "level": finding.level.value,
        "rule": finding.rule,
        "message": finding.message,
        "file": finding.file,
        "line": finding.line,
        "kind": document.kind if document else None,
        "name": document.qualified_name if document else None,
        "field": finding.field or None,
    }
