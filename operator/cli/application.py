"""What all commands share: -h, help in plain words, and completion."""

from typing import Any, Final

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

_WORDS: Final = {
    "bool": "",
    "str": "TEXT",
    "int": "NUMBER",
    "int range": "NUMBER",
    "float": "NUMBER",
    "path": "PATH",
    "Path": "PATH",
}
"""What help calls a value, by the type that Python calls it. A switch has none."""


class _Group(TyperGroup):
    """Commands whose values have names for people."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group itself."""
        return [_named(each, ctx) for each in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of the group."""
        command = super().get_command(ctx, cmd_name)
        for parameter in [] if command is None else command.get_params(ctx):
            _named(parameter, ctx)
        return command


def application(description: str) -> typer.Typer:
    """Return a command with further ones under it, each with the docstring of its function as help."""
    return typer.Typer(
        cls=_Group,
        help=description,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _named(parameter: Any, ctx: Any) -> Any:
    if isinstance(parameter, TyperOption) and parameter.metavar is None:
        kind = parameter.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]")
        parameter.metavar = _WORDS.get(kind, f"<{kind}>")
    elif isinstance(parameter, TyperArgument):
        parameter.metavar = parameter.metavar or parameter.name.upper()
        parameter.display_type_rich = _no_type  # type: ignore[method-assign]
    # `completion` says how, for each shell; the options of the library only know the one they run in.
    parameter.hidden = parameter.hidden or parameter.name in ("install_completion", "show_completion")
    return parameter


def _no_type(ctx: Any) -> None:
    """Name no type of an argument: its name says what it is."""
