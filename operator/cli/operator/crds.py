"""`specdecode crds`: print the CustomResourceDefinitions."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli.options import fail
from specdecode_operator.cli.text_files import place_of, replaced_whole


def crds_command(
    folder: Annotated[
        Path | None, typer.Option(help="Write each into a file of its own in this folder, instead of printing them.")
    ] = None,
) -> None:
    """Print the CustomResourceDefinitions as YAML, ready for kubectl apply."""
    # Only this command needs the models of the API, which take a third of a second to load.
    from specdecode_operator.api.crd.definitions import crd_file_name, crd_yaml, crds  # noqa: PLC0415

    if folder is None:
        typer.echo("---\n".join(map(crd_yaml, crds())), nl=False)
        return
    if not folder.is_dir():
        fail(f"--folder: {place_of(str(folder))}: is no folder: make it first, or name another")
    for crd in crds():
        file = folder / crd_file_name(crd)
        try:
            with replaced_whole(file) as stream:
                stream.write(crd_yaml(crd))
        except OSError as error:
            fail(f"--folder: {place_of(str(file))}: {error.strerror}: name a folder that can be written")
