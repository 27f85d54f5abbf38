"""The `specdecode` command: table of commands, plain-language help, lazy loading, and exits without a traceback."""

import gc
import io
import json
import os
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from importlib import import_module
from typing import Annotated, Any, ClassVar, Final, NoReturn

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from specdecode_operator.cli.options import HiddenName, TextOrJson
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.version import __version__

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
"""Names of value types in help, by their names in Python. Flags have no value."""
_WIDEST_TYPE: Final = 13


class Group(TyperGroup):
    """Command group with readable names of value types, in help and in errors."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; add the rejected value to pydantic's error messages."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            what, bound = error.message.removeprefix("Value error, "), "Input should be "
            if what.startswith(bound) and isinstance(error.__cause__, ValueError):
                for found in getattr(error.__cause__, "errors", list)()[:1]:
                    limit = what.removeprefix(bound).partition(", unable")[0]
                    what = f"{printable(str(found['input']))}: must be {limit}"
            error.message = what
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the group's own parameters."""
        return [_named(each, ctx) for each in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with readable names of its value types."""
        command = super().get_command(ctx, cmd_name)
        for parameter in [] if command is None else command.get_params(ctx):
            _named(parameter, ctx)
        return command


class LazyGroup(Group):
    """Group that imports a command when it is called: importing all commands takes as long as a plan."""

    later: ClassVar[Mapping[str, str]]
    """MODULE:ATTRIBUTE of each command: a module in this folder, and a function or group in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.later)

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names without importing the commands."""
        return [*self.commands]


class _Commands(UserDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        if isinstance(where := self.data[name], str):
            module, _, attribute = where.partition(":")
            # Garbage collection would make the import 10 % slower, and none of the objects is ever freed.
            gc.disable()
            found = getattr(import_module(f"specdecode_operator.cli.{module}"), attribute)
            gc.freeze()
            gc.enable()
            if isinstance(found, typer.Typer):
                command: Any = typer.main.get_group(found)
                command.name = name
            else:
                alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
                alone.command(name)(found)
                command = typer.main.get_command(alone)
            self.data[name] = command
        return self.data[name]


def application(description: str, *, cls: type[Group] = Group, hidden: bool = False) -> typer.Typer:
    """Return a command group. The help of each command is its function's docstring."""
    return typer.Typer(
        cls=cls,
        help=description,
        hidden=hidden,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _named(parameter: Any, ctx: Any) -> Any:
    if any(isinstance(each, HiddenName) for each in parameter.opts):
        accepted = parameter.opts
        parameter.opts = [each for each in accepted if not isinstance(each, HiddenName)]
        parameter.add_to_parser = lambda parser, ctx: _add_option(parameter, accepted, parser, ctx)
    if isinstance(parameter, TyperOption) and parameter.metavar is None:
        kind = parameter.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]")
        parameter.metavar = name = _WORDS.get(kind, f"<{kind}>")
        numbers = parameter._get_number_range_help_str()  # noqa: SLF001  no public function returns it
        numbers = f"[{numbers}]" if numbers else ""
        shown = f"{name} {numbers}".strip()
        if len(shown) > _WIDEST_TYPE:
            # Break the line: in 80 columns, names would be truncated.
            if len(numbers) > _WIDEST_TYPE:
                numbers = numbers.replace("x<=", "x\n<=")
            shown = f"{name}\n{numbers}" if numbers else name.replace("|", "|\n")
        parameter.display_type_rich = lambda **_: shown or None  # type: ignore[method-assign]
        parameter._get_number_range_help_str = lambda: None  # type: ignore[method-assign]  # noqa: SLF001
    elif isinstance(parameter, TyperArgument):
        parameter.metavar = parameter.metavar or parameter.name.upper()
        # The name of an argument describes its value.
        parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # noqa: ARG005
    # `specdecode completion` supports every shell; typer's options support only the current one.
    parameter.hidden = parameter.hidden or parameter.name in ("install_completion", "show_completion")
    return parameter


def _add_option(option: TyperOption, names: list[str], parser: Any, ctx: Any) -> None:
    shown, option.opts = option.opts, names
    TyperOption.add_to_parser(option, parser, ctx)
    option.opts = shown


class Ending(IntEnum):
    """Exit codes of a command that did not finish, in addition to its own."""

    # From sysexits.h
    DEFECT = 70
    NOT_WRITTEN = 74
    # 128 + signal number, as shells report it
    INTERRUPTED = 130
    PIPE_CLOSED = 141


TRACEBACK: Final = "SPECDECODE_TRACEBACK"


def run_to_its_end(command: Callable[[], None]) -> NoReturn:
    """Run a command and exit with its code; report an unexpected error on one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may have characters that the locale cannot encode.
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
        # The reader closed the pipe, as head does: not an error.
        _end(Ending.PIPE_CLOSED)
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else "standard output"
        _end(Ending.NOT_WRITTEN, f"{place}: {error.strerror or error}: write to another place")
    except MemoryError:
        _end(Ending.DEFECT, "out of memory: use fewer or smaller files")
    except Exception as error:  # noqa: BLE001  the outermost handler
        _end_with_defect(error)
    sys.exit(0)


def _end(code: Ending, message: str | None = None) -> NoReturn:
    with suppress(OSError, AttributeError, ValueError):
        if message is not None:
            sys.stderr.write(f"error: {printable(message)}\n")
        sys.stderr.flush()
    # At exit, Python would flush unwritten output again and report the same error.
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _end_with_defect(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK) or sys.argv[1:2] in [["operator"], ["capture-job"], ["read-model"]]:
        # A command in a pod cannot be run again to get a traceback.
        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    hint = f"this is a bug in specdecode: please report it with the output of {TRACEBACK}=1"
    _end(Ending.DEFECT, f"{clip(what, 300)}: {hint}")


class _TopLevel(LazyGroup):
    later: ClassVar = {
        "init": "init:init_command",
        "plan": "plan.command:plan_command",
        "lint": "lint:lint_command",
        "import": "importing:import_command",
        "models": "models:models_app",
        "status": "status:status_command",
        "doctor": "doctor:doctor_command",
        "render": "render:render_command",
        "attestation": "main:attestation_app",
        "capture": "capture.commands:capture_app",
        "training": "training:training_app",
        "metrics": "metrics:metrics_command",
        "advise": "advise.command:advise_command",
        "verdict": "verdict:verdict_command",
        "calibrate": "calibrate:calibrate_command",
        "replay": "main:replay_app",
        "completion": "completion:completion_command",
        "version": "main:version_command",
        "crds": "operator:crds_command",
        "schema": "schema:schema_command",
        "operator": "operator:operator_command",
        "attestation-webhook": "attestation:attestation_webhook_command",
        "webhook-certificate": "job_commands:webhook_certificate_command",
        "capture-job": "job_commands:capture_job_app",
        "training-job": "job_commands:training_job_app",
        "read-model": "job_commands:read_model_app",
    }
    panels: ClassVar = {
        "Plan": ("init", "plan", "lint", "import", "models"),
        "Run": ("status", "doctor", "render", "attestation"),
        "Measure": ("capture", "training", "metrics", "advise", "verdict", "calibrate"),
        "Simulate": ("replay",),
        "Other": ("completion", "version", "crds"),
    }
    """Commands by help panel. Help omits all other commands."""
    renamed: ClassVar = {
        "figures": "metrics",
        "verify": "attestation verify",
        "explain": "plan --explain",
        "estimate": "plan --batch",
        "schema figures": "schema metrics",
        "schema estimate": "schema batch",
    }
    """Former names of commands, with their new names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with its help panel."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            panel = next((panel for panel, names in self.panels.items() if cmd_name in names), None)
            command.rich_help_panel, command.hidden = panel, panel is None
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without arguments, print help and exit with 0, as kubectl does; accept former names of commands."""
        for former, name in () if ctx.resilient_parsing else self.renamed.items():
            if args[: len(former.split())] == former.split():
                typer.echo(f"specdecode {former}: renamed to specdecode {name}", err=True)
                # Of estimate, --in names the file of --batch.
                args = [*name.removesuffix("--batch").split(), *args[len(former.split()) :]]
                break
        return list(super().parse_args(ctx, args or ["--help"]))


class _Attestation(LazyGroup):
    later: ClassVar = {"verify": "attestation:verify_command"}


class _Replay(LazyGroup):
    later: ClassVar = {
        "prepare": "replay.serve:prepare_command",
        "serve": "replay.serve:serve_command",
        "drive": "replay.drive:drive_command",
        "compare": "replay.fit:compare_command",
        "fit": "replay.fit:fit_command",
        "forecast": "replay.synth:forecast_command",
        "synth": "replay.synth:synth_command",
    }


attestation_app = application("Signed attestations of rollouts.", cls=_Attestation)
replay_app = application("Captures without a GPU: replay, fit, compare, forecast, synthesize.", cls=_Replay)
app = application("Plan, launch and verify vLLM with speculative decoding on Kubernetes.", cls=_TopLevel)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"specdecode {__version__}")
        raise typer.Exit


def version_command(
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")] = TextOrJson.TEXT,
) -> None:
    """Print the version; with -o json, also the vLLM versions that the operator launches."""
    if output is TextOrJson.JSON:
        from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS  # noqa: PLC0415

        data = {"version": __version__, "vllm_versions": list(LAUNCHED_VERSIONS)}
        typer.echo(json.dumps(data, indent=2))
    else:
        _print_version(value=True)


@app.callback()
def options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Accept options before a command."""


def main() -> None:
    """Entry point of the console script."""
    # At each start, pydantic would search all installed packages for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    run_to_its_end(app)
