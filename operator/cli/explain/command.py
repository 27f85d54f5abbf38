"""`specdecode explain`: every term of a budget with its formula and numbers."""

from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.options import ExitCode, TableOrData
from specdecode_operator.cli.outputs.printing import print_data
from specdecode_operator.cli.plan.outcome import say_what_is_missing
from specdecode_operator.cli.terminal import line_width, say

if TYPE_CHECKING:
    from specdecode_operator.cli.plan.answers import Answers


def explain_command(  # noqa: PLR0913  each is an option
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    facts: options.FactsOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="table, json or yaml.")] = TableOrData.TABLE,
) -> None:
    """Show how the memory of the chosen candidate is counted, term by term; the sums are those of `plan`.

    Exits with 0, 2 for invalid input, or 5 when a model is unknown here.
    """
    # Sizing and the API's models take longer to load than the rest of the command line.
    from specdecode_operator.cli.input_files import read_deployments  # noqa: PLC0415
    from specdecode_operator.cli.plan.answers import INVALID, UNKNOWN, ask  # noqa: PLC0415

    reading = read_deployments(options.sources(files, file))
    models = options.hub_models(wanted=hub)
    result = ask(reading, nodes, model_config or [], calibration, models=models, facts=facts or [])
    if output is TableOrData.TABLE:
        _print(result)
    else:
        from specdecode_operator.cli.explain.data import explain_data  # noqa: PLC0415

        print_data(explain_data(result), output)
    say_what_is_missing(result.errors, result.unknown, hub=hub)
    verdicts = {answer.verdict for answer in result.answers}
    if result.errors or INVALID in verdicts:
        raise typer.Exit(ExitCode.INVALID)
    if UNKNOWN in verdicts:
        raise typer.Exit(ExitCode.UNKNOWN)


def _print(result: "Answers") -> None:
    from specdecode_operator.cli.explain.text import explain_text  # noqa: PLC0415

    width = line_width()
    texts = (explain_text(each, width) for each in result.answers)
    say("\n\n".join(texts), nl=bool(result.answers), verdicts=True)
