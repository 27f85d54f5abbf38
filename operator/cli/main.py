"""The command `specdecode`: the operator and what people run beside it."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli.application import application
from specdecode_operator.cli.calibrate.command import calibrate_command
from specdecode_operator.cli.capture.commands import capture_app
from specdecode_operator.cli.capture.job import capture_job_app
from specdecode_operator.cli.completion import completion_command
from specdecode_operator.cli.crds import crds_command
from specdecode_operator.cli.doctor.command import doctor_command
from specdecode_operator.cli.ending import run_to_its_end
from specdecode_operator.cli.estimate import estimate_command
from specdecode_operator.cli.import_deployment.command import import_command
from specdecode_operator.cli.init import init_command
from specdecode_operator.cli.lint.command import lint_command
from specdecode_operator.cli.models import models_app
from specdecode_operator.cli.options import AllowPodTemplateOption, allowed_names
from specdecode_operator.cli.outputs.schema import schema_command
from specdecode_operator.cli.plan.command import plan_command
from specdecode_operator.cli.plan.explain import explain_command
from specdecode_operator.cli.render.command import render_command
from specdecode_operator.version import __version__

app = application("vLLM with speculative decoding on Kubernetes: sized, launched and proven.")
app.command("crds")(crds_command)
app.command("plan")(plan_command)
app.command("estimate")(estimate_command)
app.command("explain")(explain_command)
app.command("render")(render_command)
app.command("init")(init_command)
app.command("lint")(lint_command)
app.command("calibrate")(calibrate_command)
app.command("doctor")(doctor_command)
app.command("import")(import_command)
app.command("schema")(schema_command)
app.command("completion")(completion_command)
app.add_typer(models_app, name="models")
app.add_typer(capture_app, name="capture")
app.add_typer(capture_job_app, name="capture-job", hidden=True)


@app.command("operator")
def operator_command(  # noqa: PLR0913  each is an option
    *,
    health_port: Annotated[int, typer.Option(help="Port of /livez and /readyz, for the probes.")] = 8080,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics; 0 takes a free one.")] = 8081,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file. It may be absent, and is read again when it changes.")
    ] = None,
    allow_host_path: Annotated[
        list[str] | None,
        typer.Option(help="Directory of nodes that objects may have their models in; may be given several times."),
    ] = None,
    allow_pod_template: AllowPodTemplateOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every step.")] = False,
) -> None:
    """Run the operator: in a cluster as its service account, elsewhere as KUBECONFIG says."""
    # Loading kopf and the Kubernetes client takes a second that other commands need not spend.
    from specdecode_operator.handlers.main import run_operator  # noqa: PLC0415

    host_paths = tuple(allow_host_path or ())
    for path in host_paths:
        if not path.startswith("/") or ".." in path.split("/"):
            raise typer.BadParameter(f"{path}: must be an absolute path without ..", param_hint="--allow-host-path")
    run_operator(
        health_port=health_port,
        metrics_port=metrics_port,
        calibration=calibration,
        host_paths=host_paths,
        pod_template=allowed_names(allow_pod_template),
        verbose=verbose,
    )


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
    run_to_its_end(app)
