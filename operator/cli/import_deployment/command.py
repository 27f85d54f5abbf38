"""`specdecode import`: an existing vLLM server as the SpecDecodeDeployment that means the same."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli.options import Context, ExitCode, fail
from specdecode_operator.cli.outputs.printing import json_text, yaml_text
from specdecode_operator.cli.terminal import say
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.migration.convert import Migration

_SOURCE_HELP: Final = (
    "KIND/NAME, read from the cluster (deployment, statefulset, pod, leaderworkerset, inferenceservice,"
    " llminferenceservice); with --file, the one to take of several; or, after --, a command line."
)
_FILE_HELP: Final = (
    "Read it from this file, or from - for standard input: YAML or JSON of these kinds, docker compose, values of the"
    " production-stack chart, or text with vllm serve or docker run."
)
_NAMESPACE_HELP: Final = "Namespace of the server; that of the kubeconfig's context."
_NEW_NAME_HELP: Final = "Name of the new object; by default the server's, with -sdd where it runs in Kubernetes."
_VERSION_HELP: Final = "vLLM version in the image, such as 0.32, where its tag does not tell."
_CONFIG_HELP: Final = (
    "The config.json of a model that the server is given, such as my/head=config.json; repeatable. A speculators"
    " checkpoint that is served alone becomes the target and the head that its config names."
)


class Form(StrEnum):
    """How to print the object."""

    YAML = "yaml"
    JSON = "json"


def import_command(  # noqa: PLR0913  each is an option
    source: Annotated[list[str] | None, typer.Argument(metavar="KIND/NAME | -- COMMAND...", help=_SOURCE_HELP)] = None,
    *,
    file: Annotated[str | None, typer.Option("--file", "-f", metavar="FILE", help=_FILE_HELP)] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help=_NAMESPACE_HELP)] = None,
    context: Context = None,
    name: Annotated[str | None, typer.Option(help=_NEW_NAME_HELP)] = None,
    engine_version: Annotated[str | None, typer.Option(help=_VERSION_HELP)] = None,
    model_config: Annotated[list[str] | None, typer.Option(metavar="ID=PATH", help=_CONFIG_HELP)] = None,
    output: Annotated[Form, typer.Option("--output", "-o", help="yaml or json.")] = Form.YAML,
) -> None:
    """Turn an existing vLLM server into a SpecDecodeDeployment that means the same.

    The object goes to standard output. Standard error says where each argument
    went, what is not kept and why, which defaults change, and the kubectl
    commands that move traffic over without downtime. Nothing is changed in the
    cluster.

    For example: specdecode import deployment/chat -n models > chat.yaml,
    or: specdecode import -- vllm serve Qwen/Qwen3-32B -tp 2 > chat.yaml

    Exits with 0 when the object is complete, with 2 when something must be
    decided first or nothing can be imported.
    """
    from specdecode_operator.cli.import_deployment.report import report_lines  # noqa: PLC0415
    from specdecode_operator.cli.import_deployment.source import SourceError, read_source  # noqa: PLC0415
    from specdecode_operator.cli.input_files import read_model_configs  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError  # noqa: PLC0415
    from specdecode_operator.migration.builder import MigrationError  # noqa: PLC0415
    from specdecode_operator.migration.convert import migrate_workload  # noqa: PLC0415

    try:
        found = read_source(source or [], file, namespace, context)
        migration = migrate_workload(
            found.workload,
            found.services,
            name=name,
            engine_version=engine_version,
            configs=read_model_configs(model_config or []),
        )
    except (SourceError, MigrationError, DocumentError) as error:
        fail(error)
    typer.echo(_printed(migration, output), nl=False)
    say("\n".join(map(printable, report_lines(migration, found.place))), err=True)
    raise typer.Exit(ExitCode.INVALID if migration.decisions else ExitCode.OK)


def _printed(migration: "Migration", output: Form) -> str:
    if output is Form.JSON:
        return json_text(migration.body, indent=2) + "\n"
    # Who pipes it on, or opens it later, has not seen the report.
    warning = "".join(f"# To be decided first: {' '.join(str(each).split())}\n" for each in migration.decisions)
    return warning + yaml_text(migration.body, width=120)
