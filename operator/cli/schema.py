"""`specdecode schema`: JSON schemas of command output."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer


class Printed(StrEnum):
    """Commands that print data."""

    PLAN = "plan"
    EXPLAIN = "explain"
    ESTIMATE = "estimate"
    ADVISE = "advise"
    VERDICT = "verdict"
    FIGURES = "figures"
    VERIFY = "verify"
    COMPARISON = "comparison"


def schema_command(command: Annotated[Printed, typer.Argument(help="Whose output it describes.")]) -> None:
    """Print the JSON schema of what a command prints with -o json, and estimate and verdict as a line for each case.

    comparison is what capture compare prints, and a capture's comparison.json.
    """
    typer.echo(schema_text(command), nl=False)


def schema_text(command: Printed) -> str:
    """Return the schema of a command's output."""
    if command is Printed.COMPARISON:
        return _schema_of_comparison()
    from pydantic import BaseModel  # noqa: PLC0415  only this command needs them

    from specdecode_operator.cli.advise.answer import AdviseOutput  # noqa: PLC0415
    from specdecode_operator.cli.attestation import VerifyOutput  # noqa: PLC0415
    from specdecode_operator.cli.estimate import EstimateOutput  # noqa: PLC0415
    from specdecode_operator.cli.explain import ExplainOutput  # noqa: PLC0415
    from specdecode_operator.cli.figures import FiguresOutput  # noqa: PLC0415
    from specdecode_operator.cli.plan.data import PlanOutput  # noqa: PLC0415
    from specdecode_operator.cli.verdict import VerdictOutput  # noqa: PLC0415

    models: dict[Printed, type[BaseModel]] = {
        Printed.PLAN: PlanOutput,
        Printed.EXPLAIN: ExplainOutput,
        Printed.ESTIMATE: EstimateOutput,
        Printed.ADVISE: AdviseOutput,
        Printed.VERDICT: VerdictOutput,
        Printed.FIGURES: FiguresOutput,
        Printed.VERIFY: VerifyOutput,
    }
    return _text(models[command].model_json_schema(mode="serialization"))


def _schema_of_comparison() -> str:
    import msgspec  # noqa: PLC0415

    from specdecode_operator.capture.comparison.comparison_file import Comparison  # noqa: PLC0415

    return _text(msgspec.json.schema(Comparison))


def _text(described: dict[str, Any]) -> str:
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
