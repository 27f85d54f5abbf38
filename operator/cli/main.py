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
"""What help calls a value, by the type that Python calls it. A switch has none."""
_WIDEST_TYPE: Final = 13


class Group(TyperGroup):
    """Commands whose values and errors have names for people."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; rephrase the checking library's errors, and add the value."""
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
        """Return the parameters of the group itself."""
        return [_named(each, ctx) for each in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command of the group."""
        command = super().get_command(ctx, cmd_name)
        for parameter in [] if command is None else command.get_params(ctx):
            _named(parameter, ctx)
        return command


class LazyGroup(Group):
    """Commands that are loaded when they are called: all of them take as long as a plan."""

    later: ClassVar[Mapping[str, str]]
    """By name, the module in this folder, and the function or the group in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.later)

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names, without loading the commands."""
        return [*self.commands]


class _Commands(UserDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        if isinstance(where := self.data[name], str):
            module, _, attribute = where.partition(":")
            # Collecting garbage meanwhile takes a tenth longer, and none of it is garbage later.
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
    if any(isinstance(each, HiddenName) for each in parameter.opts):
        accepted = parameter.opts
        parameter.opts = [each for each in accepted if not isinstance(each, HiddenName)]
        parameter.add_to_parser = lambda parser, ctx: _add_option(parameter, accepted, parser, ctx)
    if isinstance(parameter, TyperOption) and parameter.metavar is None:
        kind = parameter.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]")
        parameter.metavar = name = _WORDS.get(kind, f"<{kind}>")
        numbers = parameter._get_number_range_help_str()  # noqa: SLF001  the library gives it no other way
        numbers = f"[{numbers}]" if numbers else ""
        shown = f"{name} {numbers}".strip()
        if len(shown) > _WIDEST_TYPE:
            # In lines, because names would be cut in 80 columns.
            if len(numbers) > _WIDEST_TYPE:
                numbers = numbers.replace("x<=", "x\n<=")
            shown = f"{name}\n{numbers}" if numbers else name.replace("|", "|\n")
        parameter.display_type_rich = lambda **_: shown or None  # type: ignore[method-assign]
        parameter._get_number_range_help_str = lambda: None  # type: ignore[method-assign]  # noqa: SLF001
    elif isinstance(parameter, TyperArgument):
        parameter.metavar = parameter.metavar or parameter.name.upper()
        # The name of an argument says what it is.
        parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # noqa: ARG005
    # `completion` covers each shell; the library's options only the one they run in.
    parameter.hidden = parameter.hidden or parameter.name in ("install_completion", "show_completion")
    return parameter


def _add_option(option: TyperOption, names: list[str], parser: Any, ctx: Any) -> None:
    shown, option.opts = option.opts, names
    TyperOption.add_to_parser(option, parser, ctx)
    option.opts = shown


class Ending(IntEnum):
    """Exit codes of a command that was stopped, beside its own."""

    # As in sysexits.h
    DEFECT = 70
    NOT_WRITTEN = 74
    # As shells report that a signal ended a program
    INTERRUPTED = 130
    PIPE_CLOSED = 141


TRACEBACK: Final = "SPECDECODE_TRACEBACK"


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


def _end(code: Ending, message: str | None = None) -> NoReturn:
    with suppress(OSError, AttributeError, ValueError):
        if message is not None:
            sys.stderr.write(f"error: {printable(message)}\n")
        sys.stderr.flush()
    # What could not be written would be tried, and told, once more.
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _end_with_defect(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK) or sys.argv[1:2] in [["operator"], ["capture-job"], ["read-model"]]:
        # Commands in pods cannot be run again to see more.
        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    hint = f"this is a defect of specdecode: please report what {TRACEBACK}=1 shows"
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
        "read-model": "job_commands:read_model_app",
    }
    panels: ClassVar = {
        "Plan": ("init", "plan", "lint", "import", "models"),
        "Run": ("status", "doctor", "render", "attestation"),
        "Measure": ("capture", "metrics", "advise", "verdict", "calibrate"),
        "Simulate": ("replay",),
        "Other": ("completion", "version", "crds"),
    }
    """Commands in help, by panel. Help omits all other commands."""
    renamed: ClassVar = {
        "figures": "metrics",
        "verify": "attestation verify",
        "explain": "plan --explain",
        "estimate": "plan --batch",
        "schema figures": "schema metrics",
        "schema estimate": "schema batch",
    }
    """Former names, with their new ones."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with its panel of help."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            panel = next((panel for panel, names in self.panels.items() if cmd_name in names), None)
            command.rich_help_panel, command.hidden = panel, panel is None
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print help and succeed if there are no arguments, as kubectl does; accept former names of commands."""
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
    """Take the options that stand before a command."""


def main() -> None:
    """Entry point of the console script."""
    # They would be looked for among all packages that are installed, at each start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    run_to_its_end(app)
