"""`specdecode init`: print a manifest to start from."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.deployment_options import Description, with_description
from specdecode_operator.cli.input_files import InputOptions, Reading
from specdecode_operator.cli.options import ExitCode, ended, fail
from specdecode_operator.cli.outputs import yaml_text
from specdecode_operator.cli.plan.answers import ask, exit_code
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError


@with_description
def init_command(
    *,
    description: Description,
    name: Annotated[
        str | None, typer.Option(help="Name of the object. Defaults to a name derived from the target.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace of the object. If not set, the manifest has none."),
    ] = None,
    model_config: options.ModelConfigOption = None,
    out: Annotated[Path | None, typer.Option(help="New file for the manifest. Defaults to standard output.")] = None,
) -> None:
    """Write the manifest that `plan` plans with the same options.

    The manifest goes to standard output, the plan to standard error:
    specdecode init --model meta-llama/Llama-3.1-70B-Instruct --gpu H200 --tp 2 > chat.yaml

    Exits as plan does. An invalid manifest is not written.
    """
    if description.by_memory:
        fail(f"--gpu: {description.by_memory}: manifests cannot request memory sizes: use a product, or omit --gpu")
    with ended(DocumentError):
        document = description.document(name, namespace)
    result = ask(Reading((document,), ()), InputOptions(model_configs=model_config or []))
    if result.errors:
        fail(result.errors[0])
    explanation, code = result.answers[0].explanation, exit_code(result, strict=False)
    say(f"error: {explanation}" if code is ExitCode.INVALID else explanation, err=True)
    if code is not ExitCode.INVALID:
        if image := document.body["spec"].get("engine", {}).get("image"):
            say_line(
                f"warning: spec.engine.image: {image}: derived from the version: check that the image exists", err=True
            )
        try:
            if out is None:
                typer.echo(yaml_text(document.body), nl=False)
            else:
                with out.open("x", encoding="utf-8") as file:
                    file.write(yaml_text(document.body))
        except OSError as error:
            if out is None:
                raise
            fail(f"--out: {out}: {error.strerror}: use a new file in an existing folder")
    raise typer.Exit(code)
