"""Shared command behaviour: plain-language help, lazy loading, and exits without a traceback."""

import io
import os
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from importlib import import_module
from typing import Any, ClassVar, Final, NoReturn

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_WORDS: Final = {
    "bool": "",
    "str": "TEXT",
    "int": "NUMBER",
    "int range": "NUMBER",
    "float": "NUMBER",
    "float range": "NUMBER",
    "path": "PATH",
    "Path": "PATH",
}
"""What help calls a value, by the type that Python calls it. A switch has none."""


_OF_THE_LIBRARY: Final = "Value error, "
_OF_A_BOUND: Final = "Input should be "
_WIDEST_TYPE: Final = 13


class Group(TyperGroup):
    """Commands whose values have names for people."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is asked for."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _in_plain_words(error)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group itself."""
        return [_named(each, ctx) for each in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of the group."""
        command = super().get_command(ctx, cmd_name)
        for parameter in [] if command is None else command.get_params(ctx):
            _named(parameter, ctx)
        return command


class LazyGroup(Group):
    """Commands of which the one that is called is loaded, and no other: all of them take as long as a plan."""

    later: ClassVar[Mapping[str, str]]
    """Where each command is, by its name: the module in this folder, and the function or the group in it."""

    def __init__(self, **settings: Any) -> None:
        """Take what the library gives each group."""
        super().__init__(**settings)
        self.commands = _Commands(self.later)

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names, without the commands."""
        return [*self.commands]


class _Commands(UserDict[str, Any]):
    """Commands by name, each loaded when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(where := self.data[name], str):
            self.data[name] = _loaded(name, where)
        return self.data[name]


def _loaded(name: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    found = getattr(import_module(f"specdecode_operator.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
        command.name = name
        return command
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return typer.main.get_command(alone)


def application(description: str, *, cls: type[Group] = Group, hidden: bool = False) -> typer.Typer:
    """Return a command with further ones under it, each with the docstring of its function as help."""
    return typer.Typer(
        cls=cls,
        help=description,
        hidden=hidden,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _named(parameter: Any, ctx: Any) -> Any:
    if isinstance(parameter, TyperOption) and parameter.metavar is None:
        kind = parameter.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]")
        parameter.metavar = _WORDS.get(kind, f"<{kind}>")
        numbers = parameter._get_number_range_help_str()  # noqa: SLF001  the library gives it no other way
        shown = _type_in_lines(parameter.metavar, f"[{numbers}]" if numbers else "")
        parameter.display_type_rich = lambda **_: shown or None  # type: ignore[method-assign]
        parameter._get_number_range_help_str = lambda: None  # type: ignore[method-assign]  # noqa: SLF001
    elif isinstance(parameter, TyperArgument):
        parameter.metavar = parameter.metavar or parameter.name.upper()
        parameter.display_type_rich = _no_type  # type: ignore[method-assign]
    # `completion` says how, for each shell; the options of the library only know the one they run in.
    parameter.hidden = parameter.hidden or parameter.name in ("install_completion", "show_completion")
    return parameter


def _in_plain_words(error: typer.BadParameter) -> str:
    what, cause = error.message.removeprefix(_OF_THE_LIBRARY), error.__cause__
    is_bound = what.startswith(_OF_A_BOUND) and isinstance(cause, ValueError)
    found: list[Any] = getattr(cause, "errors", list)() if is_bound else []
    if not found:
        return what
    return f"{printable(str(found[0]['input']))}: must be {what.removeprefix(_OF_A_BOUND).partition(', unable')[0]}"


def _type_in_lines(name: str, numbers: str) -> str:
    """Return an option's type and range, in lines where they are so wide that names would be cut in 80 columns."""
    in_one = f"{name} {numbers}".strip()
    if len(in_one) <= _WIDEST_TYPE:
        return in_one
    if len(numbers) > _WIDEST_TYPE:
        numbers = numbers.replace("x<=", "x\n<=")
    return f"{name}\n{numbers}" if numbers else name.replace("|", "|\n")


def _no_type(ctx: Any) -> None:
    """Name no type of an argument: its name says what it is."""


class Ending(IntEnum):
    """What the shell gets of a command that something stopped, beside its own exit codes."""

    # As sysexits.h has them
    DEFECT = 70
    NOT_WRITTEN = 74
    # As shells say that a signal ended a program
    INTERRUPTED = 130
    PIPE_CLOSED = 141


TRACEBACK: Final = "SPECDECODE_TRACEBACK"

_IN_PODS: Final = ("operator", "capture-job", "read-model")
"""Commands that nobody can run again to see more."""


def run_to_its_end(command: Callable[[], None]) -> NoReturn:
    """Run a command and end the process: with its exit code, or with one line on what stopped it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whatever the locale, and whatever bytes the name of a file has.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _end(Ending.INTERRUPTED)
    except BrokenPipeError:
        # Who reads has enough, as head does: that is no error of anyone.
        _end(Ending.PIPE_CLOSED)
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else "standard output"
        _end(Ending.NOT_WRITTEN, f"{place}: {error.strerror or error}: write to another place")
    except MemoryError:
        _end(Ending.DEFECT, "there is not enough memory for it: give it less at once")
    except Exception as error:  # noqa: BLE001  the last to hear of it
        _end_with_defect(error)
    sys.exit(0)


def _end_with_defect(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK) or sys.argv[1:2] in [[name] for name in _IN_PODS]:
        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    hint = f"this is a defect of specdecode: please report what {TRACEBACK}=1 shows"
    _end(Ending.DEFECT, f"{clip(what, 300)}: {hint}")


def _end(code: Ending, message: str | None = None) -> NoReturn:
    with suppress(OSError, AttributeError, ValueError):
        if message is not None:
            sys.stderr.write(f"error: {printable(message)}\n")
        sys.stderr.flush()
    # What could not be written would be tried, and told, once more.
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
