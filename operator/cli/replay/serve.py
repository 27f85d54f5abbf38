"""`specdecode replay serve`: a capture as an OpenAI-compatible server."""

import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.replay import emulated_options as emulated
from specdecode_operator.cli.terminal import say
from specdecode_operator.replay.engines.acceptance import AcceptanceSchedule
from specdecode_operator.replay.engines.matching import Matching, Unmatched
from specdecode_operator.replay.recording.read import RecordingError

_EXTRA = ("starlette", "uvicorn", "uvloop", "httptools", "numpy")


class Mode(StrEnum):
    """What answers requests."""

    STEPS = "steps"
    MODELLED = "modelled"
    EMULATED = "emulated"


def serve_command(  # noqa: PLR0913  each is an option
    context: typer.Context,
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Folders of captures, or traces, one after the other. modelled, emulated: a fitted model.",
        ),
    ],
    *,
    mode: Annotated[
        Mode,
        typer.Option(
            help="steps: as recorded. modelled: drawn from what was recorded, as the load is. emulated: vLLM's own"
            " server, with a fitted model for its GPUs."
        ),
    ] = Mode.STEPS,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests may give; may be repeated. Absent: the trace's.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that requests must have; may be repeated. Absent: VLLM_API_KEY.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer at most.", min=1)] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="modelled: requests in one batch at most. Absent: as recorded.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="modelled: tokens in one step at most. Absent: as recorded.", min=1)
    ] = None,
    match: Annotated[Matching, typer.Option(help="How requests find their records.")] = Matching.ARRIVAL,
    unmatched: Annotated[
        Unmatched,
        typer.Option(
            help="What comes when no record is left: repeat begins again, refuse answers 409, modelled draws from all."
        ),
    ] = Unmatched.REPEAT,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave lines out that cannot be read.")
    ] = False,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache holds. Absent: a largest batch.", min=1)
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Accepted share of drafts in place of the recorded: 0.7, or by seconds: 0:0.8,60:0.3."),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Factor of every time: 0.5 is twice as fast.", min=0.001)] = 1.0,
    load_factor: Annotated[
        float, typer.Option(help="Requests that each one stands for in running, waiting and KV use.", min=0)
    ] = 1.0,
    slow_start: Annotated[float, typer.Option(help="Seconds before it listens.", min=0)] = 0.0,
    fail_share: Annotated[float, typer.Option(help="Share of requests answered with 500.", min=0, max=1)] = 0.0,
    hang_after: Annotated[float | None, typer.Option(help="Seconds until no token comes any more.", min=0)] = None,
    crash_after: Annotated[float | None, typer.Option(help="Seconds until the process dies.", min=0)] = None,
    drain_timeout: Annotated[
        int, typer.Option(help="Seconds that answers may take to their end after SIGTERM.", min=0)
    ] = 60,
    max_connections: Annotated[
        int, typer.Option(help="Connections at a time; others get 503. Not for emulated.", min=1)
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    plan: emulated.Plan = None,
    engine: emulated.Engine = None,
    tokenizer: emulated.Tokenizer = None,
    record: emulated.Record = None,
    keep: emulated.Keep = None,
    engine_arg: emulated.EngineArgument = None,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
) -> None:
    """Serve a capture: every request gets the tokens of a recorded one, in its bursts and at its gaps.

    Speaks as vLLM does: completions and chats, streamed or not, models, health
    and metrics, those of speculation too. Text is made up, four bytes a token.

    For example: specdecode replay serve captures/demo --port 8000

    With --mode emulated it starts vLLM itself, which needs no GPU and no
    weights for it: its HTTP server, scheduler, prefix cache and KV blocks serve
    the deployment of --plan, and a model that `specdecode replay fit` made says
    how long a step takes and what is accepted. At its end it says whether this
    machine was fast enough to be believed.

    For example: specdecode replay serve --mode emulated model.json --plan deployment.yaml --engine venv/bin/python

    Ends with 0 after SIGTERM or Ctrl-C, when what was being answered is answered; with 2 where nothing can be served.
    """
    emulated.refuse_options(context, mode.value)
    if mode is Mode.EMULATED:
        from specdecode_operator.cli.options import hub_models  # noqa: PLC0415
        from specdecode_operator.cli.render.answers import Options  # noqa: PLC0415
        from specdecode_operator.cli.replay.emulated import Asked, serve_emulated  # noqa: PLC0415

        rendering = Options(nodes, model_config or [], calibration, models=hub_models(wanted=hub))
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
        raise typer.Exit(serve_emulated(asked))
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        names = ", ".join(missing)
        raise typer.BadParameter(f"needs the extra replay ({names}): install 'specdecode-operator[replay]'")
    # The server takes longer to load than the rest of the command line.
    from specdecode_operator.replay.server import serve as server  # noqa: PLC0415
    from specdecode_operator.replay.server import source as sources  # noqa: PLC0415

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
            acceptance=_schedule(acceptance),
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


def _schedule(text: str | None) -> AcceptanceSchedule | None:
    try:
        return None if text is None else AcceptanceSchedule.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--acceptance") from error
