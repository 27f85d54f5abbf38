"""`specdecode crds`: print the CustomResourceDefinitions."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def crds_command(
    folder: Annotated[
        Path | None, typer.Option(help="Write each into a file of its own in this folder, instead of printing them.")
    ] = None,
) -> None:
    """Print the CustomResourceDefinitions as YAML, ready for kubectl apply."""
    # Only this command needs the models of the API, which take a third of a second to load.
    from specdecode_operator.api.crd.definitions import crd_file_name, crd_yaml, crds  # noqa: PLC0415

    if folder is None:
        sys.stdout.write("---\n".join(map(crd_yaml, crds())))
        return
    for crd in crds():
        (folder / crd_file_name(crd)).write_text(crd_yaml(crd), encoding="utf-8")
