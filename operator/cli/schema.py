"""`specdecode schema`: JSON schemas of command output."""

import json
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Final

import msgspec
import typer


class Printed(StrEnum):
    """Commands with JSON output."""

    PLAN = "plan"
    EXPLAIN = "explain"
    BATCH = "batch"
    ADVISE = "advise"
    VERDICT = "verdict"
    METRICS = "metrics"
    STATUS = "status"
    VERIFY = "verify"
    COMPARISON = "comparison"


def schema_command(command: Annotated[Printed, typer.Argument(help="Command whose output to describe.")]) -> None:
    """Print the JSON schema of a command's output with -o json. For batch and verdict, it describes one line.

    explain and batch describe the output of plan with these options.
    comparison describes the output of capture compare and the file comparison.json.
    """
    typer.echo(schema_text(command), nl=False)


_MODELS: Final = {
    Printed.PLAN: "cli.plan.data:PlanOutput",
    Printed.EXPLAIN: "cli.plan.data:ExplainOutput",
    Printed.BATCH: "cli.plan.batch_output:BatchOutput",
    Printed.ADVISE: "cli.advise:AdviseOutput",
    Printed.VERDICT: "cli.verdict:VerdictOutput",
    Printed.METRICS: "cli.metrics:MetricsOutput",
    Printed.STATUS: "cli.status:StatusOutput",
    Printed.VERIFY: "cli.attestation:VerifyOutput",
    Printed.COMPARISON: "capture.comparison.comparison_file:Comparison",
}


def schema_text(command: Printed) -> str:
    """Return the schema of a command's output."""
    module, _, name = _MODELS[command].partition(":")
    model = getattr(import_module(f"specdecode_operator.{module}"), name)
    is_struct = command is Printed.COMPARISON
    described = msgspec.json.schema(model) if is_struct else model.model_json_schema(mode="serialization")
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
