"""`specdecode lint`: what the API server and the operator would refuse, without a cluster."""

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.options import ExitCode, allowed_names, allowed_paths, fail, hub_models, sources
from specdecode_operator.cli.outputs.printing import print_json
from specdecode_operator.cli.terminal import say, say_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdecode_operator.admission.policies import Policies
    from specdecode_operator.cli.lint.findings import Finding

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
    from specdecode_operator.admission.judgement import Level, Terms  # noqa: PLC0415
    from specdecode_operator.cli.input_files import (  # noqa: PLC0415
        read_calibration,
        read_nodes,
        read_ours,
        read_storage_classes,
        refuse_unused,
    )
    from specdecode_operator.cli.lint.findings import find  # noqa: PLC0415
    from specdecode_operator.cli.plan.given_facts import read_given  # noqa: PLC0415
    from specdecode_operator.cli.render.answers import Options  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError  # noqa: PLC0415

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
    from specdecode_operator.admission.policies import Policies  # noqa: PLC0415
    from specdecode_operator.cli.input_files import Document, read_all  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError  # noqa: PLC0415

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
    from specdecode_operator.cli.lint.sarif import sarif  # noqa: PLC0415

    if output is Form.SARIF:
        print_json(sarif(findings))
    elif output is Form.JSON:
        print_json({"objects": objects, "findings": list(map(_data, findings))})
    elif output is Form.MARKDOWN:
        from specdecode_operator.cli.lint.markdown import lint_markdown  # noqa: PLC0415

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
