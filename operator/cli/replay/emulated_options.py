"""Options of `specdecode replay serve --mode emulated`, and which of the others it takes."""

from pathlib import Path
from typing import Annotated, Final

import typer

Plan = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="emulated: the SpecDecodeDeployment whose engine it is.")
]
Engine = Annotated[
    Path | None,
    typer.Option(
        "--engine",
        metavar="PYTHON",
        help="emulated: the python that has vLLM, or its folder of packages. Absent: this.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="emulated: the model's own tokenizer. Absent: one is made, of which a text takes twice as many tokens.",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FOLDER",
        help="Empty folder for a capture of what is served; emulated: for the recorder's segments.",
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep", metavar="FOLDER", help="emulated: keep the engine's files here, each step's time with them."
    ),
]
EngineArgument = Annotated[
    list[str] | None,
    typer.Option("--engine-arg", metavar="ARGUMENT", help="emulated: further argument for vLLM. May be repeated."),
]

_TAKEN: Final = frozenset({
    "traces", "mode", "host", "port", "seed", "served_model_name",
    "plan", "engine", "tokenizer", "record", "keep", "engine_arg", "nodes", "model_config", "hub", "calibration",
})  # fmt: skip

_OWN: Final = frozenset({
    "plan", "engine", "tokenizer", "keep", "engine_arg", "nodes", "model_config", "hub", "calibration",
})  # fmt: skip


_OF_RECORDS: Final = frozenset({"match", "unmatched"})
_OF_BATCHES: Final = frozenset({"max_num_seqs", "max_num_batched_tokens"})


def refuse_options(context: typer.Context, mode: str) -> None:
    """Refuse options that were written, and that this mode would not heed."""
    written = [
        parameter
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name or "")) is not None and source.name == "COMMANDLINE"
    ]
    for parameter in written:
        name = parameter.name or ""
        if mode == "emulated" and name not in _TAKEN:
            raise typer.BadParameter("is not heeded with --mode emulated: leave it out", param_hint=parameter.opts[0])
        if mode == "steps" and name in _OF_BATCHES:
            raise typer.BadParameter("is not heeded with --mode steps: leave it out", param_hint=parameter.opts[0])
        if mode == "modelled" and name in _OF_RECORDS:
            raise typer.BadParameter("is not heeded with --mode modelled: leave it out", param_hint=parameter.opts[0])
        if mode != "emulated" and name in _OWN:
            raise typer.BadParameter("is heeded with --mode emulated alone: leave it out", param_hint=parameter.opts[0])
