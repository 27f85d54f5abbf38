"""`specdecode render`: the objects and command lines that the operator would make, without a cluster."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.options import ExitCode, allowed_names, hub_models, sources
from specdecode_operator.cli.outputs.printing import print_json
from specdecode_operator.cli.plan.outcome import say_what_is_missing
from specdecode_operator.cli.terminal import say_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdecode_operator.cli.render.answers import Rendered

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
    from specdecode_operator.cli.render.answers import Options, render  # noqa: PLC0415

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
    from specdecode_operator.cli.render.text import command_text, documents_text  # noqa: PLC0415

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
