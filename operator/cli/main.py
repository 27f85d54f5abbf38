"""The command `specdecode`: the operator and what people run beside it."""

import os
from typing import Annotated, ClassVar

import typer

from specdecode_operator.cli.application import LazyGroup, application
from specdecode_operator.cli.ending import run_to_its_end
from specdecode_operator.version import __version__


class _Commands(LazyGroup):
    later: ClassVar = {
        "crds": "operator.crds:crds_command",
        "plan": "plan.command:plan_command",
        "estimate": "estimate:estimate_command",
        "advise": "advise.command:advise_command",
        "verdict": "verdict.command:verdict_command",
        "figures": "figures.command:figures_command",
        "explain": "explain.command:explain_command",
        "render": "render.command:render_command",
        "init": "init:init_command",
        "lint": "lint.command:lint_command",
        "calibrate": "calibrate.command:calibrate_command",
        "doctor": "doctor.command:doctor_command",
        "verify": "attestation.verify:verify_command",
        "import": "import_deployment.command:import_command",
        "schema": "outputs.schema:schema_command",
        "completion": "completion:completion_command",
        "operator": "operator.command:operator_command",
        "attestation-webhook": "attestation.webhook:attestation_webhook_command",
        "webhook-certificate": "operator.webhook_certificate:webhook_certificate_command",
        "models": "models:models_app",
        "capture": "capture.commands:capture_app",
        "replay": "replay.commands:replay_app",
        "capture-job": "capture.job:capture_job_app",
        "read-model": "operator.read_model:read_model_app",
    }


app = application("vLLM with speculative decoding on Kubernetes: sized, launched and proven.", cls=_Commands)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdecode {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _print_version(wanted=value),
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Entry point of the console script."""
    # They would be looked for among all packages that are installed, at each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    run_to_its_end(app)
