"""`specdecode init`: print a manifest to start from."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.deployment_options import Description
from specdecode_operator.cli.input_files import Reading
from specdecode_operator.cli.options import ExitCode, fail
from specdecode_operator.cli.outputs import yaml_text
from specdecode_operator.cli.plan.answers import ask, exit_code
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError


def init_command(  # noqa: PLR0913  each is an option
    *,
    model: options.ModelOption = None,
    draft: options.DraftOption = None,
    method: options.MethodOption = None,
    num_speculative_tokens: options.TokensOption = None,
    gpu: options.GpuOption = None,
    tp: options.TensorOption = None,
    pp: options.PipelineOption = None,
    dp: options.DataOption = None,
    max_model_len: options.LengthOption = None,
    quantization: options.QuantizationOption = None,
    kv_cache_dtype: options.KvCacheOption = None,
    engine_version: options.VersionOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the object. Absent: made of the target's.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Its namespace. Absent: none.")] = None,
    model_config: options.ModelConfigOption = None,
    out: Annotated[Path | None, typer.Option(help="A new file for the manifest. Absent: standard output.")] = None,
) -> None:
    """Write the manifest of what `plan` with the same options plans.

    What the plan says goes to standard error, the manifest to standard output:
    specdecode init --model meta-llama/Llama-3.1-70B-Instruct --gpu H200 --tp 2 > chat.yaml

    Exits as plan does. An invalid manifest is not written.
    """
    description = Description(
        model=model,
        draft=draft,
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        gpus=tuple(gpu or ()),
        tensor=tp,
        pipeline=pp,
        data=dp,
        max_model_len=max_model_len,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        engine_version=engine_version,
    )
    if description.by_memory:
        fail(f"--gpu: {description.by_memory}: no manifest can ask for a GPU by its memory: name a product, or none")
    try:
        document = description.document(name, namespace)
    except DocumentError as error:
        fail(error)
    result = ask(Reading((document,), ()), None, model_config or [])
    if result.errors:
        fail(result.errors[0])
    say(result.answers[0].explanation, err=True)
    code = exit_code(result, strict=False)
    if code is not ExitCode.INVALID:
        if image := document.body["spec"].get("engine", {}).get("image"):
            say_line(f"warning: spec.engine.image: {image}: is vLLM's usual name for it: see that it exists", err=True)
        _write(yaml_text(document.body), out)
    raise typer.Exit(code)


def _write(manifest: str, out: Path | None) -> None:
    if out is None:
        typer.echo(manifest, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(manifest)
    except OSError as error:
        fail(f"--out: {out}: {error.strerror}: name a new file in a folder that exists")
