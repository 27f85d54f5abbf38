"""`specdecode replay serve` and `prepare`: a capture or fitted engine behind an OpenAI-compatible API."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.capture.trace_reader import RecordingError
from specdecode_operator.cli import options
from specdecode_operator.cli.options import HiddenName, fail, refuse_written, refused
from specdecode_operator.cli.render import Options, RenderedDeployment, render
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.problems import printable
from specdecode_operator.replay import emulation as emulating
from specdecode_operator.replay.drafting import AcceptanceSchedule
from specdecode_operator.replay.model_file import ModelFileError, read_model
from specdecode_operator.replay.recorded_engine import Matching, Unmatched

Plan = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="emulated: file with the SpecDecodeDeployment to emulate.")
]
Engine = Annotated[
    Path | None,
    typer.Option(
        "--engine",
        metavar="PYTHON",
        help="emulated: Python interpreter with vLLM, or its site-packages. Defaults to this one.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="emulated: tokenizer of the model. If not set, a generated one is used, which needs about "
        "twice the tokens for a text.",
    ),
]

_TAKEN: Final = frozenset({
    "traces", "mode", "host", "port", "seed", "served_model_name",
    "plan", "engine", "tokenizer", "record", "keep", "engine_arg", "nodes", "model_config", "hub", "calibration",
})  # fmt: skip

_OWN: Final = frozenset({
    "plan", "engine", "tokenizer", "keep", "engine_arg", "nodes", "model_config", "hub", "calibration",
})  # fmt: skip


def _refuse_options(context: typer.Context, mode: str) -> None:
    """Reject options on the command line that this mode ignores."""
    if mode == "emulated":
        others = {parameter.name or "" for parameter in context.command.params} - _TAKEN
    else:
        refuse_written(context, _OWN, "requires --mode emulated: add it, or omit the option")
        others = {"max_num_seqs", "max_num_batched_tokens"} if mode == "steps" else {"match", "unmatched"}
    refuse_written(context, others, f"has no effect with --mode {mode}: omit it")


@dataclass(frozen=True)
class Asked:
    """Options of --mode emulated."""

    models: Sequence[Path]  # must be one, written by `specdecode replay fit`
    plan: str | None  # file with one SpecDecodeDeployment
    rendering: Options  # options for planning it
    engine: Path | None = None  # Python, or its site-packages, with vLLM; None: this Python
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free port
    served_model_names: Sequence[str] = ()  # replace the names in the plan
    tokenizer: Path | None = None  # folder with the model's tokenizer
    seed: int = 0
    record: Path | None = None  # folder for the recorder's segments
    keep: Path | None = None  # folder for all files; None: a temporary folder
    more: Sequence[str] = ()  # further arguments for vLLM


def _serve_emulated(asked: Asked) -> int:
    """Serve until a signal; return the exit status."""
    try:
        if len(asked.models) != 1:
            fail(f"--mode emulated uses one fitted model, not {len(asked.models)}: fit one model to all captures")
        model = read_model(asked.models[0])
        if asked.tokenizer is not None and not emulating.tokenizer_files(asked.tokenizer):
            fail(f"--tokenizer {asked.tokenizer}: contains no tokenizer: use a folder with tokenizer.json")
        launch = _planned(asked)
        emulated = emulating.emulation(launch, model)
        engine = emulating.EngineEnvironment.at(asked.engine)
        version = engine.version()
        with ExitStack() as stack:
            folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdecode-emulated-")))
            tells, tokenizer = asked.keep is not None, asked.tokenizer
            written = emulating.write_engine_folder(
                folder / "engine", emulated, tokenizer=tokenizer, seed=asked.seed, tells_steps=tells
            )
            _say_what_is_served(emulated, launch, version)
            variables = {}
            if asked.record is not None:
                asked.record.mkdir(parents=True, exist_ok=True)
                variables["SPECDECODE_RECORD_DIR"] = str(asked.record.resolve())
            port = asked.port or emulating.free_port(asked.host)
            arguments = [*written.arguments, "--host", asked.host, "--port", str(port)]
            if asked.served_model_names:
                arguments += ["--served-model-name", *asked.served_model_names]
            say_line(f"emulated: serving at http://{asked.host}:{port}", err=True)
            status = engine.serve([*arguments, *asked.more], engine.variables([written.plugins], variables))
            # The plugin reports whether this machine was fast enough.
            lateness = written.reports / "lateness.txt"
            if lateness.exists():
                say_line(lateness.read_text(encoding="utf-8").strip(), err=True)
    except (emulating.NotEmulatedError, ModelFileError) as error:
        fail(error)
    except FileExistsError as error:
        fail(f"--keep {asked.keep}: {error.filename} already exists: use another folder")
    return status


def _planned(asked: Asked) -> Launch:
    if asked.plan is None:
        fail("--mode emulated needs --plan FILE with the SpecDecodeDeployment to emulate")
    found, errors = render([asked.plan], asked.rendering)
    problems: list[DocumentError | str] = [*errors]
    problems += [f"{each.document.name}: {each.refusal}" for each in found if each.refusal]
    if problems:
        fail(problems[0])
    deployments = [each.deployment for each in found if isinstance(each.deployment, RenderedDeployment)]
    if len(deployments) != 1:
        fail(f"--plan {printable(asked.plan)}: {len(deployments)} SpecDecodeDeployments: use a file with one")
    outcome = deployments[0].desired.outcome
    if not isinstance(outcome, Launch):
        fail(f"--plan {printable(asked.plan)}: the operator would not launch it: run specdecode plan to see the reason")
    return outcome


def _say_what_is_served(emulated: emulating.Emulation, launch: Launch, version: str) -> None:
    row = launch.plan.chosen
    budget = row.budget
    place = f"{row.gpus} x {row.product}" if row.gpus else row.product
    say_line(
        f"emulated: {place}, {budget.num_blocks} KV blocks, {budget.kv_cache_tokens} tokens, vLLM {version}", err=True
    )
    planned = emulated.profile.version
    if version.split(".")[:2] != planned.split(".")[:2]:
        say_line(f"warning: the plan is for vLLM {planned}: set --engine to an engine of that version", err=True)
    for line in emulating.transfer_warnings(emulated, row.tensor, row.product):
        say_line(f"warning: {line}", err=True)


def prepare_command(  # noqa: PLR0913  each is an option
    model: Annotated[Path, typer.Argument(help="Model that specdecode replay fit wrote.", metavar="MODEL")],
    *,
    out: Annotated[
        Path, typer.Option("--out", HiddenName("-o"), help="Folder to write. It must not contain an engine.")
    ],
    plan: Annotated[str, typer.Option("--plan", metavar="FILE", help="File with the SpecDecodeDeployment to emulate.")],
    num_gpu_blocks: Annotated[
        int | None,
        typer.Option(help="Number of KV cache blocks. Defaults to the number in the plan.", min=1, max=2**32),
    ] = None,
    tokenizer: Tokenizer = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
) -> None:
    """Write the files for an emulated vLLM: models without weights, plugins, settings and a start script.

    If vLLM is installed, use `replay serve --mode emulated` instead. This command
    is for a container that has vLLM. There, start.py accepts further vLLM
    arguments. Mount the folder at the path where it was written.

    For example: specdecode replay prepare model.json --plan deployment.yaml --out /emulated
    """
    rendering = Options(nodes, model_config or [], calibration, models=options.hub_models(wanted=hub))
    try:
        launch = _planned(Asked([model], plan, rendering))
        emulated = emulating.emulation(launch, read_model(model)).with_blocks(num_gpu_blocks)
        written = emulating.write_engine_folder(out / "engine", emulated, tokenizer=tokenizer, seed=seed)
    except (emulating.NotEmulatedError, ModelFileError) as error:
        fail(error)
    except OSError as error:
        fail(f"--out {out}: {error.strerror}: use another folder")
    (out / "start.py").write_text(emulating.start_script(written.plugins, written.arguments), encoding="utf-8")
    _say_what_is_served(emulated, launch, emulated.profile.version)


class Mode(StrEnum):
    """Source of responses."""

    STEPS = "steps"
    MODELLED = "modelled"
    EMULATED = "emulated"


def serve_command(  # noqa: PLR0913  each is an option
    context: typer.Context,
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Folders of captures, or traces, used in this order. modelled, emulated: a fitted model.",
        ),
    ],
    *,
    mode: Annotated[
        Mode,
        typer.Option(
            help="steps: responses as recorded. modelled: sampled from the recording under a similar load. "
            "emulated: vLLM's own server with a fitted model instead of GPUs."
        ),
    ] = Mode.STEPS,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 selects a free port.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Model name that requests may use. May be repeated. Defaults to the name in the trace."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="API key that requests must have. May be repeated. Defaults to VLLM_API_KEY."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum number of tokens in prompt and response.", min=1)
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="modelled: maximum number of requests per batch. Defaults to the recorded value.", min=1),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="modelled: maximum number of tokens per step. Defaults to the recorded value.", min=1),
    ] = None,
    match: Annotated[Matching, typer.Option(help="How requests are matched to recorded ones.")] = Matching.ARRIVAL,
    unmatched: Annotated[
        Unmatched,
        typer.Option(
            help="When no recorded request is left: repeat starts over, refuse answers 409, modelled samples from all."
        ),
    ] = Unmatched.REPEAT,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Skip lines that cannot be parsed.")] = False,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="KV cache capacity in tokens. Defaults to the size of the largest batch.", min=1)
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Acceptance rate instead of the recorded one: 0.7, or by seconds: 0:0.8,60:0.3."),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Factor for all times: 0.5 is twice as fast.", min=0.001)] = 1.0,
    load_factor: Annotated[
        float, typer.Option(help="Factor for running requests, waiting requests and KV cache usage in /metrics.", min=0)
    ] = 1.0,
    slow_start: Annotated[float, typer.Option(help="Seconds before the server listens.", min=0)] = 0.0,
    fail_share: Annotated[float, typer.Option(help="Share of requests answered with 500.", min=0, max=1)] = 0.0,
    hang_after: Annotated[
        float | None, typer.Option(help="Seconds until the server stops sending tokens.", min=0)
    ] = None,
    crash_after: Annotated[float | None, typer.Option(help="Seconds until the process exits with 1.", min=0)] = None,
    drain_timeout: Annotated[
        int, typer.Option(help="Seconds that running responses may take after SIGTERM.", min=0)
    ] = 60,
    max_connections: Annotated[
        int, typer.Option(help="Maximum number of connections; more get 503. Not for emulated.", min=1)
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    plan: Plan = None,
    engine: Engine = None,
    tokenizer: Tokenizer = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FOLDER",
            help="Empty folder for a capture of the served requests; emulated: for segments of the recorder.",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FOLDER", help="emulated: folder for the engine's files and the time of each step."
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg", metavar="ARGUMENT", help="emulated: additional argument for vLLM. May be repeated."
        ),
    ] = None,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
) -> None:
    """Serve a capture like vLLM: each request gets the tokens of a recorded one, with the same timing.

    The server has vLLM's endpoints for completions, chats (streamed or not),
    models, health and metrics, including speculation metrics. Text is generated,
    with four bytes per token.

    For example: specdecode replay serve captures/demo --port 8000

    --mode emulated starts vLLM itself, without a GPU and without weights. vLLM's
    HTTP server, scheduler, prefix cache and KV blocks serve the deployment of
    --plan. A model from `specdecode replay fit` determines the step times and the
    acceptance. At the end, the command reports whether this machine was fast
    enough for valid results.

    For example: specdecode replay serve --mode emulated model.json --plan deployment.yaml --engine venv/bin/python

    Exits with 0 after SIGTERM or Ctrl-C, when running responses are complete, and with 2 when it cannot serve.
    """
    _refuse_options(context, mode.value)
    if mode is Mode.EMULATED:
        rendering = Options(nodes, model_config or [], calibration, models=options.hub_models(wanted=hub))
        asked = Asked(
            models=traces,
            plan=plan,
            rendering=rendering,
            engine=engine,
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            tokenizer=tokenizer,
            seed=seed,
            record=record,
            keep=keep,
            more=engine_arg or [],
        )
        raise typer.Exit(_serve_emulated(asked))
    extra = ("starlette", "uvicorn", "uvloop", "httptools", "numpy")
    if missing := [name for name in extra if find_spec(name) is None]:
        names = ", ".join(missing)
        raise typer.BadParameter(f"the extra replay is not installed ({names}): install 'specdecode-operator[replay]'")
    with refused("--acceptance", ValueError):
        schedule = None if acceptance is None else AcceptanceSchedule.parse(acceptance)
    # Importing the server takes longer than the rest of the command line.
    from specdecode_operator.replay.server import playback_source as sources  # noqa: PLC0415
    from specdecode_operator.replay.server import serve as server  # noqa: PLC0415

    settings = server.ServeSettings(
        source=sources.SourceSettings(
            traces=traces,
            skip_bad_lines=skip_bad_lines,
            mode=sources.Mode(mode),
            matching=match,
            unmatched=unmatched,
            kv_cache_tokens=kv_cache_tokens,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            time_scale=time_scale,
            acceptance=schedule,
            seed=seed,
        ),
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        api_keys=tuple(api_key or filter(None, [os.environ.get("VLLM_API_KEY")])),
        load_factor=load_factor,
        record=record,
        slow_start_s=slow_start,
        fail_share=fail_share,
        hang_after_s=hang_after,
        crash_after_s=crash_after,
        drain_timeout_s=drain_timeout,
        most_connections=max_connections,
    )
    try:
        source = sources.read_source(settings.source)
        for note in source.notes:
            say(f"note: {note}", err=True)
        server.serve(settings, source, say)
    except (RecordingError, sources.ServeError) as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(2) from error
