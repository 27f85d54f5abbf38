"""Options, exit codes and errors that several commands share."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperArgument

from specdecode_operator.cli import completion
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.deployment.pod_security import GRANTS, is_grant

if TYPE_CHECKING:
    from specdecode_operator.cli.hub import HubModels


class HiddenName(str):
    """Name of an option that help omits, such as a former name or vLLM's name."""

    __slots__ = ()


FilesArgument = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Same as -f FILE.")]
FilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Kubernetes YAML or JSON: a file, a folder (searched recursively), or - for standard input. "
        "May be repeated.",
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Plan for these nodes: the output of kubectl get nodes -o yaml. For objects that claim GPUs, kubectl get"
        " nodes,resourceslices,deviceclasses -o yaml.",
    ),
]
ModelConfigOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=PATH",
        help=(
            "config.json of a model that is not in the catalogue, or its folder with config.json and "
            "safetensors files (only the headers are needed). May be repeated."
        ),
    ),
]
FactsOption = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Facts file of a model, written by specdecode models add. May be repeated."),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Correct the estimates with a calibration file, written by specdecode calibrate.",
    ),
]
HubOption = Annotated[
    bool,
    typer.Option(
        "--hub",
        help="Read models that are not in the catalogue from the model hub: config.json and the headers of "
        "the weights. They are cached. Uses HF_ENDPOINT and HF_TOKEN.",
    ),
]

Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace. Defaults to the namespace of the kubeconfig's context."),
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="List the objects of all namespaces.")]
Selector = Annotated[
    str | None,
    typer.Option("--selector", "-l", metavar="LABELS", help="Only objects with these labels, such as team=chat."),
]
Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Keep running, and print again after each change. Stop with Ctrl-C.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Defaults to the current context.")]
Kubeconfig = Annotated[
    str | None, typer.Option(metavar="FILE", help="Kubeconfig. Defaults to KUBECONFIG, then to ~/.kube/config.")
]

VersionOption = Annotated[
    str | None, typer.Option("--engine-version", autocompletion=completion.versions, help="vLLM version, such as 0.32.")
]


AllowPodTemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-pod-template",
        help="Additional permission for podTemplate, such as hostNetwork or capabilities.IPC_LOCK. May be "
        "repeated, or a comma-separated list.",
    ),
]

AllowHostPathOption = Annotated[
    list[str] | None,
    typer.Option(help="Node directory from which objects may use models. May be repeated."),
]
RefuseOption = Annotated[
    bool,
    typer.Option(
        "--refuse-does-not-fit", help="Report an object that fits on no GPU as an error instead of a warning."
    ),
]


class ExitCode(IntEnum):
    """Exit codes, named like the verdicts of a plan."""

    OK = 0
    INVALID = 2
    TIGHT = 3
    DOES_NOT_FIT = 4
    UNKNOWN = 5


class TextOrJson(StrEnum):
    """Output format."""

    TEXT = "text"
    JSON = "json"


class PlanForm(StrEnum):
    """Output format of `plan`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    MARKDOWN = "markdown"


class TableOrData(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def fail(message: object) -> NoReturn:
    """Print an error to standard error, and exit with the code for invalid input."""
    say_line(f"error: {message}", err=True)
    raise typer.Exit(ExitCode.INVALID)


@contextmanager
def ended(*errors: type[Exception], at: str = "") -> Iterator[None]:
    """On one of these errors, print it and exit with the code for invalid input."""
    try:
        yield
    except errors as error:
        fail(f"{at}{error}")


@contextmanager
def refused(option: str | None, *errors: type[Exception]) -> Iterator[None]:
    """Report one of these errors as an error of this option."""
    try:
        yield
    except errors as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def refuse_written(context: typer.Context, names: Collection[str], why: str) -> None:
    """Reject options and arguments on the command line that have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            name = parameter.metavar if isinstance(parameter, TyperArgument) else parameter.opts[0]
            raise typer.BadParameter(why, param_hint=name)


def allowed_names(given: list[str] | None) -> frozenset[str]:
    """Parse and check the values of --allow-pod-template."""
    names = [name.strip() for each in given or [] for name in each.split(",")]
    for name in names:
        if not is_grant(name):
            known = f"use {', '.join(GRANTS)}, or a part such as capabilities.IPC_LOCK"
            message = f"{name}: cannot be allowed: {known}; for node directories, use --allow-host-path"
            raise typer.BadParameter(message, param_hint="--allow-pod-template")
    return frozenset(names)


def allowed_paths(given: list[str] | None) -> tuple[str, ...]:
    """Check the values of --allow-host-path: absolute paths without ``..``."""
    for path in given or []:
        if not path.startswith("/") or ".." in path.split("/"):
            raise typer.BadParameter(f"{path}: must be an absolute path without ..", param_hint="--allow-host-path")
    return tuple(given or ())


def sources(files: list[str] | None, with_option: list[str] | None, *, needed: bool = True) -> list[str]:
    """Return the files from arguments and from -f."""
    named = [*(files or []), *(with_option or [])]
    if needed and not named:
        raise typer.BadParameter("missing: use a file, a folder, or - for standard input", param_hint="-f FILE")
    return named


def refuse_name_of_list(name: str | None, *, all_namespaces: bool, selector: str | None) -> None:
    """Reject the name of one object together with options for a list."""
    if name and (all_namespaces or selector):
        option = "--all-namespaces" if all_namespaces else "--selector"
        raise typer.BadParameter(f"{name}: cannot be used with {option}: omit one of them", param_hint="NAME")


def hub_models(*, wanted: bool) -> "HubModels | None":
    """Return the models of the hub if wanted, otherwise None. Only these open connections to the hub."""
    if not wanted:
        return None
    from specdecode_operator.cli.hub import HubModels  # noqa: PLC0415

    return HubModels()
