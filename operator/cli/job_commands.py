"""Commands that Jobs run, hidden from help: `capture-job`, `training-job`, `read-model` and `webhook-certificate`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.cli.main import application
from specdecode_operator.cli.options import ended
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.deployment.models.checkpoint_reader import Folder, leave_answer

capture_job_app = application("Run in the pod of a capture's Job.", hidden=True)

_Termination = Annotated[Path, typer.Option(help="File for the termination message.")]
_TERMINATION_LOG: Final = Path("/dev/termination-log")


@capture_job_app.command("prepare")
def prepare_command(
    *,
    recorder: Annotated[Path, typer.Option(help="Folder on the PYTHONPATH of the engine.")] = Path(
        "/specdecode/recorder"
    ),
    termination_log: _Termination = _TERMINATION_LOG,
) -> None:
    """Check the volume, make the attempt's folders, and copy the recorder."""
    from specdecode_operator.capture.job.entrypoint import prepare_job  # noqa: PLC0415

    _end(termination_log, lambda: prepare_job(recorder))


@capture_job_app.command("run")
def run_command(*, termination_log: _Termination = _TERMINATION_LOG) -> None:
    """Send the workload to the engine, then merge, validate and publish the recorded files."""
    from specdecode_operator.capture.job.entrypoint import run_job  # noqa: PLC0415

    _end(termination_log, run_job)


@capture_job_app.command("collect")
def collect_command(*, termination_log: _Termination = _TERMINATION_LOG) -> None:
    """Record the traffic of running engines, then merge, validate and publish the recorded files."""
    from specdecode_operator.capture.job.collect import collect_job  # noqa: PLC0415

    _end(termination_log, collect_job)


training_job_app = application("Run in the pod of a training's Job.", hidden=True)


@training_job_app.command("export")
def export_command(
    *,
    bundle: Annotated[Path, typer.Option(help="File for the steps that run in the trainer's image.")] = Path(
        "/specdecode/trainer/training.zip"
    ),
    termination_log: _Termination = _TERMINATION_LOG,
) -> None:
    """Write the rows of captures or of a file, and the bundle for the trainer's image."""
    from specdecode_operator.training.files.publish import export_job  # noqa: PLC0415

    _end(termination_log, lambda: export_job(bundle))


@training_job_app.command("publish")
def publish_command(*, termination_log: _Termination = _TERMINATION_LOG) -> None:
    """Check the trained head and publish it on the claim."""
    from specdecode_operator.training.files.publish import publish_job  # noqa: PLC0415

    _end(termination_log, publish_job)


def _end(termination_log: Path, work: Callable[[], bytes]) -> None:
    from specdecode_operator.capture.files.formats import CaptureError  # noqa: PLC0415
    from specdecode_operator.capture.job.entrypoint import error_message  # noqa: PLC0415

    try:
        message, code = work(), 0
    except CaptureError as error:
        say_line(f"{error.reason}: {error.message}", err=True)
        message, code = error_message(error), 1
    # Outside a pod the file does not exist, and the exit code is enough.
    with suppress(OSError):
        termination_log.write_bytes(message)
    raise typer.Exit(code)


read_model_app = application("Run in the pod of a Job that reads a model.", hidden=True)


@read_model_app.command("folder")
def folder_command(
    path: Annotated[str, typer.Argument(help="Directory of the model.")],
    *,
    message: Annotated[Path, typer.Option(help="File for the answer.")] = Path("/dev/termination-log"),
) -> None:
    """Read config.json and safetensors headers of a directory."""
    raise typer.Exit(leave_answer(message, lambda: Folder(path)))


@read_model_app.command("hub")
def hub_command(
    model: Annotated[str, typer.Argument(help="Id of the repository.")],
    *,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    message: Annotated[Path, typer.Option(help="File for the answer.")] = Path("/dev/termination-log"),
) -> None:
    """Read config.json and safetensors headers of a repository on the hub, without its weights."""
    # Other Jobs do not need an HTTP client.
    from specdecode_operator.cli.hub import HubClient, HubSettings, ListedRepository  # noqa: PLC0415

    raise typer.Exit(leave_answer(message, lambda: ListedRepository(HubClient(HubSettings.of()), model, revision)))


def webhook_certificate_command(
    *,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the Secret and of the Service.")],
    secret: Annotated[str, typer.Option(metavar="NAME", help="Secret to which the certificate is written.")],
    service: Annotated[str, typer.Option(metavar="NAME", help="Service by which the API server calls the webhook.")],
    configuration: Annotated[
        str, typer.Option(metavar="NAME", help="ValidatingWebhookConfiguration that must trust the certificate.")
    ],
    current: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder where the current Secret is mounted. It may be missing."),
    ] = None,
) -> None:
    """Renew the certificate of the admission webhook if needed, and make the API server trust it.

    The certificate is self-signed and valid for 90 days. Run the command every
    week. The previous certificate stays trusted until it expires, because pods get
    the new one up to a minute later.
    """
    # Importing kopf and the Kubernetes client takes a second.
    from specdecode_operator.cluster.client import Cluster, ClusterError  # noqa: PLC0415
    from specdecode_operator.handlers.certificate_renewal import kept_or_renewed, write_certificate  # noqa: PLC0415

    files = {}
    if current is not None:
        # The files are symlinks, and missing until the Secret exists.
        with suppress(OSError):
            files = {file.name: file.read_bytes() for file in current.iterdir() if file.is_file()}
    made = kept_or_renewed(files, [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"])

    async def write() -> None:
        cluster = await Cluster.connect()
        try:
            # Name of the webhook in the chart's configuration.
            webhook = (configuration, "validate.specdecode.io")
            await write_certificate(cluster, made.files, made.trust, (namespace, secret), webhook)
        finally:
            await cluster.close()

    with ended(ClusterError):
        asyncio.run(write())
    word = "kept" if made.certificate == files.get("tls.crt") else "written"
    say_line(f"certificate {word} in Secret {namespace}/{secret}; {configuration} trusts it")
