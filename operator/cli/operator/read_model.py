"""`specdecode read-model`: what the Job that reads an unknown model runs; not for people."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli.application import application

if TYPE_CHECKING:
    from specdecode_operator.resolver.read_model_facts import Files

read_model_app = application("Run in the pod of a Job that reads a model.", hidden=True)


@read_model_app.command("folder")
def folder_command(
    path: Annotated[str, typer.Argument(help="Directory of the model.")],
    *,
    message: Annotated[Path, typer.Option(help="File for the answer.")] = Path("/dev/termination-log"),
) -> None:
    """Read config.json and safetensors headers of a directory."""
    from specdecode_operator.resolver.read_model_facts import Folder, leave_answer  # noqa: PLC0415

    raise typer.Exit(leave_answer(message, lambda: Folder(path)))


@read_model_app.command("hub")
def hub_command(
    model: Annotated[str, typer.Argument(help="Id of the repository.")],
    *,
    revision: Annotated[str | None, typer.Option(help="Its branch, tag or commit.")] = None,
    message: Annotated[Path, typer.Option(help="File for the answer.")] = Path("/dev/termination-log"),
) -> None:
    """Read config.json and safetensors headers of a repository on the hub; no weights are fetched."""
    from specdecode_operator.resolver.read_model_facts import leave_answer  # noqa: PLC0415

    raise typer.Exit(leave_answer(message, lambda: _repository(model, revision)))


def _repository(model: str, revision: str | None) -> "Files":
    from specdecode_operator.cli.hub.client import HubClient, HubSettings  # noqa: PLC0415
    from specdecode_operator.cli.hub.repository import ListedRepository  # noqa: PLC0415

    return ListedRepository(HubClient(HubSettings.of()), model, revision)
