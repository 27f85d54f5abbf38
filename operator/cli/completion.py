"""`specdecode completion`: shell completion of commands, options and their values.

Lists of values are imported only when a shell requests them.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

import typer
from typer._completion_shared import get_completion_script  # no public function exists


def _values(module: str, find: Callable[[Any], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        # Import only when a shell requests the values.
        found = dict.fromkeys(map(str, find(import_module(f"specdecode_operator.{module}"))))
        return [value for value in found if value.lower().startswith(incomplete.lower())]

    return complete


models = _values("sizing.catalogue", lambda catalogue: catalogue.hub_ids())
gpus = _values(
    "sizing.devices",
    lambda devices: [*map(devices.family_of, devices.known_products()), *devices.known_products()],
)
methods = _values("enums", lambda enums: enums.Method)
precisions = _values("enums", lambda enums: enums.Quantization)
cache_dtypes = _values("enums", lambda enums: enums.KvCacheDtype)
versions = _values("vllm.profiles", lambda profiles: profiles.KNOWN_VERSIONS)


class Shell(StrEnum):
    """Supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion_command(shell: Annotated[Shell, typer.Argument(help="Shell that will load the script.")]) -> None:
    """Print the completion script of a shell, for commands, options and values.

    For the current shell: source <(specdecode completion bash)

    For all new shells, write it to the folder from which the shell loads it:
    specdecode completion fish > ~/.config/fish/completions/specdecode.fish
    """
    script = get_completion_script(prog_name="specdecode", complete_var="_SPECDECODE_COMPLETE", shell=shell.value)
    typer.echo(script)
