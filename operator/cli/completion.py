"""`specdecode completion`: shell completion of commands, options and their values.

Each list of values is looked up only when a shell asks for it.
"""

from enum import StrEnum
from typing import Annotated

import typer


def models(incomplete: str) -> list[str]:
    """Return the models and heads of the catalogue."""
    from specdecode_operator.sizing.catalogue import hub_ids  # noqa: PLC0415

    return _beginning(incomplete, list(hub_ids()))


def gpus(incomplete: str) -> list[str]:
    """Return the GPUs whose memory is known, by the names that people use."""
    from specdecode_operator.sizing.devices import family_of, known_products  # noqa: PLC0415

    names = [family_of(product) for product in known_products()]
    return _beginning(incomplete, [*names, *known_products()])


def methods(incomplete: str) -> list[str]:
    """Return the methods of speculation."""
    from specdecode_operator.enums import Method  # noqa: PLC0415

    return _beginning(incomplete, list(Method))


def precisions(incomplete: str) -> list[str]:
    """Return what a target may be served in."""
    from specdecode_operator.enums import Quantization  # noqa: PLC0415

    return _beginning(incomplete, list(Quantization))


def cache_dtypes(incomplete: str) -> list[str]:
    """Return the element types of a KV cache."""
    from specdecode_operator.enums import KvCacheDtype  # noqa: PLC0415

    return _beginning(incomplete, list(KvCacheDtype))


def versions(incomplete: str) -> list[str]:
    """Return the vLLM versions that are known."""
    from specdecode_operator.vllm.profiles import KNOWN_VERSIONS  # noqa: PLC0415

    return _beginning(incomplete, list(KNOWN_VERSIONS))


def _beginning(incomplete: str, values: list[str]) -> list[str]:
    found = dict.fromkeys(str(value) for value in values)
    return [value for value in found if value.lower().startswith(incomplete.lower())]


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
