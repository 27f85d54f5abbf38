"""`specdecode completion`: what makes a shell complete commands, options and values."""

from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    """Shells that can be taught."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion_command(shell: Annotated[Shell, typer.Argument(help="Shell to print it for.")]) -> None:
    """Print the script that makes a shell complete commands, options and values.

    For the shell that is open: source <(specdecode completion bash)

    For all that are opened later, write it where the shell looks for it:
    specdecode completion fish > ~/.config/fish/completions/specdecode.fish
    """
    from typer._completion_shared import get_completion_script  # noqa: PLC0415  (the library has no other)

    script = get_completion_script(prog_name="specdecode", complete_var="_SPECDECODE_COMPLETE", shell=shell.value)
    typer.echo(script)
