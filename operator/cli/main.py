"""The `specdecode` command: its table of commands, and the entry point of the console script."""

import os
from typing import Annotated, ClassVar

import typer

from specdecode_operator.cli.command_groups import LazyGroup, application, run_to_its_end
from specdecode_operator.version import __version__


class _Commands(LazyGroup):
    later: ClassVar = {
        "crds": "operator:crds_command",
        "plan": "plan.command:plan_command",
        "estimate": "estimate:estimate_command",
        "advise": "advise.command:advise_command",
        "verdict": "verdict:verdict_command",
        "figures": "figures:figures_command",
        "explain": "explain:explain_command",
        "render": "render:render_command",
        "init": "init:init_command",
        "lint": "lint:lint_command",
        "calibrate": "calibrate:calibrate_command",
        "doctor": "doctor.command:doctor_command",
        "verify": "attestation:verify_command",
        "import": "importing:import_command",
        "schema": "schema:schema_command",
        "completion": "completion:completion_command",
        "operator": "operator:operator_command",
        "attestation-webhook": "attestation:attestation_webhook_command",
        "webhook-certificate": "job_commands:webhook_certificate_command",
        "models": "models:models_app",
        "capture": "capture.commands:capture_app",
        "replay": "main:replay_app",
        "capture-job": "job_commands:capture_job_app",
        "read-model": "job_commands:read_model_app",
    }


class _Replay(LazyGroup):
    later: ClassVar = {
        "prepare": "replay.serve:prepare_command",
        "serve": "replay.serve:serve_command",
        "drive": "replay.drive:drive_command",
        "compare": "replay.fit:compare_command",
        "fit": "replay.fit:fit_command",
        "forecast": "replay.synth:forecast_command",
        "synth": "replay.synth:synth_command",
    }


replay_app = application("Captures without a GPU: played back, fitted, compared, forecast, made.", cls=_Replay)
app = application("vLLM with speculative decoding on Kubernetes: sized, launched and proven.", cls=_Commands)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"specdecode {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
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
