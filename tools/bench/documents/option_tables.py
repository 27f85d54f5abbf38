"""The options of each command for the reference of the command line, as the command itself has them."""

import re
from collections.abc import Iterator
from typing import Any, Final

import typer

from specdecode_operator.cli.main import app
from specdecode_operator.cli.options import HiddenName

_EXITS: Final = re.compile(r"\b(?:Exits|Ends) (?:with|as) .*", re.DOTALL)
_TYPES: Final = {"int": "NUMBER", "int range": "NUMBER", "float": "NUMBER", "float range": "NUMBER", "path": "PATH"}


def commands() -> dict[str, Any]:
    """Return the commands that people see, by their whole name; those of a group one by one."""
    return dict(_commands(typer.main.get_command(app), ""))


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def option_table(name: str) -> str:
    """Return what a command takes: arguments and options with their values, defaults and help."""
    rows = [_row(each) for each in commands()[name].params if not each.hidden]
    if not rows:
        return "It takes no options.\n"
    header = ("| option | value | default | meaning |", "| --- | --- | --- | --- |")
    return "\n".join([*header, *rows, ""])


def exit_table() -> str:
    """Return what each command says of its exit codes."""
    said = {name: _EXITS.search(command.help or "") for name, command in commands().items()}
    rows = [f"| `{name}` | {_cell(match[0])} |" for name, match in said.items() if match]
    return "\n".join(["| command | exit codes |", "| --- | --- |", *rows, ""])


def _row(option: Any) -> str:
    is_argument = option.param_type_name == "argument"
    names = [each for each in option.opts if not isinstance(each, HiddenName)]
    spellings = _metavar(option).split(" | ") if is_argument else sorted(names, key=len)
    name = ", ".join(f"`{spelling}`" for spelling in spellings)
    value = "" if _is_flag(option) or (is_argument and not option.type_descriptor.choices) else _value(option)
    return f"| {name} | {value} | {_default(option)} | {_cell(option.help or '')} |"


def _is_flag(option: Any) -> bool:
    return option.param_type_name == "option" and bool(option.is_flag)


def _value(option: Any) -> str:
    choices = option.type_descriptor.choices
    if choices:
        return ", ".join(f"`{choice.value}`" for choice in choices)
    bounds = {
        (False, False): "",
        (True, False): f", {option.min} or more",
        (False, True): f", at most {option.max}",
        (True, True): f", {option.min} to {option.max}",
    }[option.min is not None, option.max is not None]
    return f"`{_metavar(option)}`{bounds}"


def _metavar(option: Any) -> str:
    if option.metavar:
        return str(option.metavar).removesuffix("...")
    if option.param_type_name == "argument":
        return str(option.name).upper()
    shown = re.sub(r"[<>]|^<?list\[|\]", "", option.display_type(None))
    return _TYPES.get(shown, "TEXT")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    shown = getattr(option.default, "value", option.default)
    if shown is None or not option.show_default or _is_flag(option):
        return ""
    return f"`{shown}`"


def _cell(text: str) -> str:
    """Text as it may stand in a table: one line, long options as code, nothing that Markdown takes for its own."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", line)
