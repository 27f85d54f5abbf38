"""`specdecode lint`: find errors for which the API server or the operator would reject an object.

Output formats are text, JSON, Markdown and SARIF 2.1.0.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer
import yaml

from specdecode_operator.api import capture, deployment, training
from specdecode_operator.api.crd_validation import as_stored
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.spec_problems import admitted_capture, admitted_object, admitted_training
from specdecode_operator.capture.observation import ObservedDeployment
from specdecode_operator.cli import input_files, options
from specdecode_operator.cli.options import ExitCode, allowed_names, allowed_paths, ended, hub_models, sources
from specdecode_operator.cli.outputs import code, limited, print_json
from specdecode_operator.cli.plan.answers import look_up
from specdecode_operator.cli.render import (
    NotRenderedError,
    RenderedDeployment,
    golden_body,
    neighbour,
    rendered_deployment,
    started_capture,
)
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import STANDARD_INPUT, DocumentError, read_text
from specdecode_operator.deployment.models.checkpoints import MODEL_UNKNOWN
from specdecode_operator.handlers import admission_findings
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.calibration import UNCALIBRATED
from specdecode_operator.training.preconditions import training_blocked
from specdecode_operator.version import __version__

if TYPE_CHECKING:
    from specdecode_operator.importing.foreign import ForeignServer

_STEP: Final = re.compile(r"[^.\[\]]+|\[(\d+)\]")
# The C loader if available: the whole file is parsed a second time.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def line_of(document: input_files.Document, field: str) -> int | None:
    """Return the line (from 1) of a field or its closest existing parent; None if the file is unknown."""
    documents = _composed(document.file)
    if document.number is None or document.number > len(documents):
        return None
    node = documents[document.number - 1]
    steps: list[str | int] = [] if document.item is None else ["items", document.item - 1]
    steps += [each[0] if each[1] is None else int(each[1]) for each in _STEP.finditer(field)]
    line = None if node is None else node.start_mark.line + 1
    for step in steps:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((key, value) for key, value in pairs if key.value == step), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


@lru_cache(maxsize=1)
def _composed(file: str) -> tuple[yaml.Node | None, ...]:
    if file == STANDARD_INPUT:
        return ()
    try:
        return tuple(yaml.compose_all(read_text(file), Loader=_Loader))
    except (yaml.YAMLError, DocumentError):  # JSON with tabs is not valid YAML, or the file has been removed
        return ()


_NOT_READ: Final = "NotRead"
"""Rule of a setting, or of a server, of another project that is not understood."""
_LATER: Final = "the operator reads it in the cluster; to check the rest here, add {options}"


@dataclass(frozen=True)
class Finding:
    """An error, warning or note about an object or a file."""

    level: admission_findings.Level
    rule: str  # Reason of the condition `Accepted`; Unreadable if no object could be read
    message: str  # Field, value, problem and fix, without a full stop
    file: str  # As named on the command line; ``-`` for standard input
    document: input_files.Document | None = None  # None if a file could not be read
    field: str = ""  # Path in the object; empty if the finding is about several fields
    line: int | None = None  # Line of the field, from 1

    @property
    def place(self) -> str:
        """File and, if known, line."""
        return f"{self.file}:{self.line}" if self.line is not None else self.file


def find(
    reading: input_files.Reading,
    inputs: input_files.Inputs,
    terms: admission_findings.Terms,
    policies: admission_findings.Policies | None = None,
) -> list[Finding]:
    """Return the findings about objects in the order they were read, then an error for each unreadable document."""
    by_kind: dict[str, dict[str, input_files.Document]] = {kind: {} for kind in input_files.OUR_KINDS}
    judges = {deployment.KIND: _in_deployment, capture.KIND: _in_capture, training.KIND: _in_training}
    for each in reading.documents:
        if each.foreign is None:
            by_kind[each.kind][each.qualified_name] = each
    found = []
    for document in reading.documents:
        try:
            if document.foreign is not None:
                remarks = _in_foreign(document, document.foreign, inputs, terms)
            else:
                remarks = judges[document.kind](document, by_kind, inputs, terms, policies)
        except InvalidSpecError as error:
            remarks = list(admission_findings.refusals(error))
        for remark in remarks:
            field = remark.problem.field
            place = (document.file, document, field, line_of(document, field))
            found.append(Finding(remark.level, remark.rule, remark.sentence, *place))
    unread = (
        Finding(admission_findings.Level.ERROR, "Unreadable", str(each), each.file or "", line=each.line)
        for each in reading.errors
    )
    return [*found, *unread]


def _in_deployment(
    document: input_files.Document,
    _: Mapping[str, Mapping[str, input_files.Document]],
    inputs: input_files.Inputs,
    terms: admission_findings.Terms,
    policies: admission_findings.Policies | None,
) -> list[admission_findings.Remark]:
    spec = admitted_object(
        {**document.body, "spec": input_files.with_configs(document.body.get("spec"), inputs.configs)}
    )
    remarks: list[admission_findings.Remark] = []
    if policies is not None:
        remarks += policies.remarks({**document.body, "spec": as_stored(spec)}, deployment.PLURAL)
    try:
        known, unknown = look_up(spec, inputs.models, inputs.given)
    except InvalidSpecError as error:
        return [*remarks, *admission_findings.refusals(error)]
    for each in unknown:
        options_here = f"{'' if each.source.on_volume else '--hub or '}--model-config ID=PATH"
        problem = replace(each.problem, message=f"{each.problem.message}; {_LATER.format(options=options_here)}")
        remarks.append(admission_findings.Remark(admission_findings.Level.WARNING, MODEL_UNKNOWN, problem))
    key = Key(document.namespace or "default", document.name)
    if spec.autoscaling is not None and "replicas" in spec.model_fields_set:
        message = "spec.autoscaling controls the number of replicas, but each apply resets it; remove replicas"
        problem = Problem("spec.replicas", str(spec.replicas), message)
        remarks.append(admission_findings.Remark(admission_findings.Level.WARNING, "ReplicasAlsoSet", problem))
    sources = {each.field: each.source for each in unknown}
    return [*remarks, *admission_findings.deployment_remarks(key, spec, terms, known, unknown=sources)]


def _in_foreign(
    document: input_files.Document,
    server: "ForeignServer",
    inputs: input_files.Inputs,
    terms: admission_findings.Terms,
) -> list[admission_findings.Remark]:
    """Return the findings about an object of another project, in its fields, as warnings and notes."""
    warning, rule = admission_findings.Level.WARNING, admission_findings.PLAN_WARNING
    if server.error is not None:
        return [admission_findings.Remark(warning, _NOT_READ, server.error)]
    try:
        # Whether models are on a volume that the operator may mount is not a question for this object.
        remarks = _in_deployment(document, {}, inputs, replace(terms, host_paths=()), None)
    except InvalidSpecError as error:
        remarks = list(admission_findings.refusals(error))
    found = [admission_findings.Remark(warning, _NOT_READ, each) for each in server.unread]
    found += [admission_findings.Remark(warning, rule, each) for each in server.warnings]
    for each in remarks:
        level = warning if each.level is admission_findings.Level.ERROR else each.level
        found.append(replace(each, level=level, problem=server.in_its_fields(each.problem)))
    level = admission_findings.Level.NOTE
    found += [admission_findings.Remark(level, admission_findings.PLAN_NOTE, each) for each in server.notes]
    named = f"{document.kind} {server.name}: "
    return [
        each
        if each.problem.field
        else replace(each, problem=replace(each.problem, message=named + each.problem.message))
        for each in found
    ]


def _in_capture(
    document: input_files.Document,
    by_kind: Mapping[str, Mapping[str, input_files.Document]],
    inputs: input_files.Inputs,
    terms: admission_findings.Terms,
    _: admission_findings.Policies | None,
) -> list[admission_findings.Remark]:
    """Check a capture; also check it against its deployment if the files contain it and it can be launched."""
    spec = admitted_capture(document.body)
    remarks = [*admission_findings.capture_remarks(spec, terms)]
    captured = _deployment_of(document, spec.deployment, by_kind[deployment.KIND], inputs, remarks)
    if captured is None:
        return remarks
    try:
        body = {**document.body, "spec": input_files.with_configs(document.body["spec"], inputs.configs)}
        started = started_capture(body, captured, golden_body(document, spec, by_kind[capture.KIND]))
        level, rule = admission_findings.Level.WARNING, admission_findings.PLAN_WARNING
        remarks += (admission_findings.Remark(level, rule, Problem("", "", text)) for text in started.warnings)
    except NotRenderedError as error:
        level = admission_findings.Level.WARNING if error.may_pass else admission_findings.Level.ERROR
        remarks.append(admission_findings.Remark(level, error.reason, Problem("", "", str(error))))
    return remarks


def _in_training(
    document: input_files.Document,
    by_kind: Mapping[str, Mapping[str, input_files.Document]],
    inputs: input_files.Inputs,
    terms: admission_findings.Terms,
    _: admission_findings.Policies | None,
) -> list[admission_findings.Remark]:
    """Check a training; also check it against its deployment if the files contain it and it can be launched."""
    spec = admitted_training(document.body)
    remarks = [*admission_findings.training_remarks(spec, terms)]
    owner = _deployment_of(document, spec.deployment, by_kind[deployment.KIND], inputs, remarks)
    if owner is None:
        return remarks
    parent = owner.parent
    seen = ObservedDeployment(parent.key, parent.uid, parent.generation, owner.desired)
    blocked = training_blocked(spec, seen)
    if blocked is not None:
        level = admission_findings.Level.ERROR if blocked.permanent else admission_findings.Level.WARNING
        remarks.append(admission_findings.Remark(level, blocked.reason, Problem("", "", blocked.message)))
    return remarks


def _deployment_of(
    document: input_files.Document,
    name: str,
    deployments: Mapping[str, input_files.Document],
    inputs: input_files.Inputs,
    remarks: list[admission_findings.Remark],
) -> RenderedDeployment | None:
    """Return the deployment that a capture or training names, unless it has errors; add a remark on a misspelt name."""
    owner = deployments.get(neighbour(document, name))
    if owner is None and (meant := _misspelt(document, name, deployments)):
        problem = Problem("spec.deployment", name, f"not found in these files; did you mean {meant}?")
        remarks.append(admission_findings.Remark(admission_findings.Level.WARNING, "DeploymentNotFound", problem))
    if owner is None or any(each.level is admission_findings.Level.ERROR for each in remarks):
        return None
    return rendered_deployment(owner, replace(inputs, nodes=None, calibration=UNCALIBRATED)).deployment


def _misspelt(document: input_files.Document, name: str, deployments: Mapping[str, input_files.Document]) -> str | None:
    """Return a deployment with a similar name in the object's namespace."""
    names = {each.name for key, each in deployments.items() if key == neighbour(document, each.name)}
    return next(iter(get_close_matches(name, names, n=1)), None)


def lint_markdown(findings: Sequence[Finding], counts: str) -> str:
    """Return a heading, the counts, and a line for each finding, errors first."""
    levels, lines = list(admission_findings.Level), []
    for each in sorted(findings, key=lambda each: levels.index(each.level)):
        where = f"{code(each.place)} " if each.place else ""
        lines.append(f"- **{each.level}** {where}{code(each.message)} ({each.rule})")
    return "\n".join(["### specdecode lint", "", counts, *([""] if lines else []), *limited(lines)])


_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a SARIF log with one run. GitHub requires paths relative to the working directory."""
    rules, results, here = list(dict.fromkeys(each.rule for each in findings)), [], Path.cwd()
    for each in findings:
        path = Path(each.file).absolute()
        uri = quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
        place: dict[str, Any] = {"artifactLocation": {"uri": "stdin" if each.file == STANDARD_INPUT else uri}}
        if each.line is not None:
            place["region"] = {"startLine": each.line}
        location: dict[str, Any] = {"physicalLocation": place}
        if each.document is not None:
            name = f"{each.document.kind} {each.document.qualified_name} {each.field}".strip()
            location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "object"}]
        results.append(
            {
                "ruleId": each.rule,
                "ruleIndex": rules.index(each.rule),
                "level": each.level.value,
                "message": {"text": each.message},
                "locations": [location],
            }
        )
    driver = {"name": "specdecode", "version": __version__, "rules": [{"id": rule} for rule in rules]}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


class Form(StrEnum):
    """Output format."""

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
    engine_version: Annotated[
        str | None,
        typer.Option(help="vLLM version of servers of other projects whose image tag does not contain it."),
    ] = None,
    storage_classes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=(
                "StorageClasses of the cluster: the output of kubectl get storageclasses -o yaml. Warns about "
                "captures whose claim finds no StorageClass."
            ),
        ),
    ] = None,
    admission_policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="ValidatingAdmissionPolicies with their bindings, ConfigMaps and Namespaces: the output of "
            "helm template or kubectl get.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if there are warnings.")] = False,
    output: Annotated[
        Form, typer.Option("--output", "-o", help="Format: text, json, sarif, or markdown for CI summaries.")
    ] = Form.TEXT,
) -> None:
    """Report objects that the API server, admission or the operator would reject, with the reason.

    Objects of other projects that run vLLM are checked as plan reads them. Their
    findings are warnings at most.

    An object that fits nowhere is a warning, as in admission. The check uses
    --nodes, or else the GPU products that the object names, or else all known
    ones. An arm of a capture must fit where its deployment runs.

    Exits with 0 when there are no errors, 2 when there are, 3 with --strict when
    there are warnings.
    """
    reading = input_files.read_ours(
        sources(files, file), input_files.OUR_KINDS, input_files.foreign_converter(engine_version)
    )
    allowed = allowed_names(allow_pod_template)
    asked = input_files.InputOptions(
        nodes, model_config or [], calibration, facts or [], hub_models(wanted=hub), allowed
    )
    with ended(DocumentError):
        inputs = asked.read(reading.documents)
        classes = None if storage_classes is None else input_files.read_storage_classes(storage_classes)
        policies = None if admission_policy is None else _policies(admission_policy)
    terms = admission_findings.Terms(
        allowed_paths(allow_host_path),
        allowed,
        does_not_fit=not refuse_does_not_fit,
        nodes=inputs.nodes,
        devices=inputs.devices,
        calibration=inputs.calibration,
        storage_classes=classes,
    )
    findings = find(reading, inputs, terms, policies)
    _print(findings, len(reading.documents), output)
    levels = {finding.level for finding in findings}
    if admission_findings.Level.ERROR in levels:
        raise typer.Exit(ExitCode.INVALID)
    raise typer.Exit(ExitCode.TIGHT if strict and admission_findings.Level.WARNING in levels else ExitCode.OK)


def _policies(file: str) -> admission_findings.Policies:
    found = admission_findings.Policies.of(
        [each.body for each in input_files.read_all(file) if isinstance(each, input_files.Document)]
    )
    if not found.bindings and not found.policies:
        raise DocumentError(
            f"{file}: no ValidatingAdmissionPolicy found: set limits in the chart's values and render the chart again,"
            " or omit --admission-policy"
        )
    if not found.bindings or not found.policies:
        lacks = "bindings of its policies" if found.policies else "policies of its bindings"
        raise DocumentError(f"{file}: the {lacks} are missing: include both, as helm template does")
    return found


def _print(findings: Sequence[Finding], objects: int, output: Form) -> None:
    counts = Counter(finding.level.value for finding in findings)
    notes = f", notes: {counts['note']}" if counts["note"] else ""
    counted = f"objects: {objects}, errors: {counts['error']}, warnings: {counts['warning']}{notes}"
    if output is Form.SARIF:
        print_json(sarif(findings))
    elif output is Form.JSON:
        rows = [
            {
                "level": each.level.value,
                "rule": each.rule,
                "message": each.message,
                "file": each.file,
                "line": each.line,
                "kind": each.document.kind if each.document else None,
                "name": each.document.qualified_name if each.document else None,
                "field": each.field or None,
            }
            for each in findings
        ]
        print_json({"objects": objects, "findings": rows})
    elif output is Form.MARKDOWN:
        say(lint_markdown(findings, counted))
    else:
        for each in findings:
            said = f"{each.level}: {each.message} [{each.rule}]"
            say_line(f"{each.place}: {said}" if each.place else said)
        say_line(counted)
