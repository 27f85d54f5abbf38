"""`specdecode import`: an existing vLLM Deployment as the SpecDecodeDeployment that means the same."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli.options import Context, ExitCode, fail, say

if TYPE_CHECKING:
    from specdecode_operator.migration.convert import Migration

NAME_HELP: Final = "deployment/NAME, read from the cluster; with --file, the one to take of several."
FILE_HELP: Final = (
    "Read the Deployment from this YAML or JSON file, or from - for standard input, and not from the cluster."
)
NAMESPACE_HELP: Final = "Namespace of the Deployment; that of the kubeconfig's context."
NEW_NAME_HELP: Final = "Name of the new object; that of the Deployment and -sdd."
VERSION_HELP: Final = "vLLM version in the image, such as 0.32, where its tag does not tell."


class Form(StrEnum):
    """How to print the object."""

    YAML = "yaml"
    JSON = "json"


def import_command(  # noqa: PLR0913  each is an option
    deployment: Annotated[str | None, typer.Argument(metavar="deployment/NAME", help=NAME_HELP)] = None,
    *,
    file: Annotated[str | None, typer.Option("--file", "-f", metavar="FILE", help=FILE_HELP)] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help=NAMESPACE_HELP)] = None,
    context: Context = None,
    name: Annotated[str | None, typer.Option(help=NEW_NAME_HELP)] = None,
    engine_version: Annotated[str | None, typer.Option(help=VERSION_HELP)] = None,
    output: Annotated[Form, typer.Option("--output", "-o", help="yaml or json.")] = Form.YAML,
) -> None:
    """Turn an existing vLLM Deployment into a SpecDecodeDeployment that means the same.

    The object goes to standard output. Standard error says where each argument
    went, what is not kept and why, which defaults change, and the kubectl
    commands that move traffic over without downtime. Nothing is changed in the
    cluster.

    For example: specdecode import deployment/chat -n models > chat.yaml

    Exits with 0 when the object is complete, with 2 when something must be
    decided first or nothing can be imported.
    """
    from specdecode_operator.cli.import_deployment.report import report_lines  # noqa: PLC0415
    from specdecode_operator.cli.import_deployment.source import SourceError, read_source  # noqa: PLC0415
    from specdecode_operator.migration.builder import MigrationError  # noqa: PLC0415
    from specdecode_operator.migration.convert import migrate  # noqa: PLC0415

    try:
        source = read_source(deployment, file, namespace, context)
        migration = migrate(source.deployment, source.services, name=name, engine_version=engine_version)
    except (SourceError, MigrationError) as error:
        fail(error)
    typer.echo(_printed(migration, output), nl=False)
    say("\n".join(report_lines(migration, source.place)), err=True)
    raise typer.Exit(ExitCode.INVALID if migration.decisions else ExitCode.OK)


def _printed(migration: "Migration", output: Form) -> str:
    import json  # noqa: PLC0415

    import yaml  # noqa: PLC0415

    if output is Form.JSON:
        return json.dumps(migration.body, indent=2, ensure_ascii=False) + "\n"
    # Who pipes it on, or opens it later, has not seen the report.
    warning = "".join(f"# To be decided first: {' '.join(str(each).split())}\n" for each in migration.decisions)
    return warning + yaml.safe_dump(migration.body, sort_keys=False, allow_unicode=True, width=120)
