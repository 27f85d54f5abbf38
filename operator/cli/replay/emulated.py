"""`specdecode replay serve --mode emulated`: vLLM's own server, whose executor is a fitted model."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.cli.options import fail
from specdecode_operator.cli.render.answers import Options, render
from specdecode_operator.cli.render.objects import RenderedDeployment
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.problems import printable
from specdecode_operator.replay.fitted.model import ModelFileError, read_model
from specdecode_operator.replay.launch.emulation import Emulation, NotEmulatedError, emulation, transfer_warnings
from specdecode_operator.replay.launch.engine_environment import EngineEnvironment, free_port, start_script
from specdecode_operator.replay.launch.folder import EngineFolder, write_engine_folder
from specdecode_operator.replay.launch.model_folder import tokenizer_files

RECORD_VARIABLE: Final = "SPECDECODE_RECORD_DIR"
"""Where the recorder writes, as everywhere."""

VERDICT_FILE: Final = "lateness.txt"
"""In which the plugin says whether this machine was fast enough."""


@dataclass(frozen=True)
class Asked:
    """What a user asks for."""

    models: Sequence[Path]  # one, as `specdecode replay fit` wrote it
    plan: str | None  # file with one SpecDecodeDeployment
    rendering: Options  # how it is planned
    engine: Path | None = None  # python, or folder of packages, that has vLLM; None: this python
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_names: Sequence[str] = ()  # in the place of those of the plan
    tokenizer: Path | None = None  # folder with the model's own
    seed: int = 0
    record: Path | None = None  # folder for what the recorder writes
    keep: Path | None = None  # folder for all files, which stays; None: one that is removed
    more: Sequence[str] = ()  # arguments for vLLM


def serve_emulated(asked: Asked) -> int:
    """Serve until a signal comes; return the exit status."""
    try:
        if len(asked.models) != 1:
            fail(f"--mode emulated takes one fitted model, not {len(asked.models)}: fit it to all captures together")
        model = read_model(asked.models[0])
        if asked.tokenizer is not None and not tokenizer_files(asked.tokenizer):
            fail(f"--tokenizer {asked.tokenizer}: has no tokenizer: name a folder with its tokenizer.json")
        launch = _planned(asked)
        emulated = emulation(launch, model)
        engine = EngineEnvironment.at(asked.engine)
        version = engine.version()
        with ExitStack() as stack:
            folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdecode-emulated-")))
            written = write_engine_folder(
                folder / "engine",
                emulated,
                tokenizer=asked.tokenizer,
                seed=asked.seed,
                tells_steps=asked.keep is not None,
            )
            _say_what_is_served(emulated, launch, version)
            status = _serve(asked, engine, written)
            _say_verdict(written)
    except (NotEmulatedError, ModelFileError) as error:
        fail(error)
    except FileExistsError as error:
        fail(f"--keep {asked.keep}: {error.filename} is there already: name another folder")
    return status


def prepare(asked: Asked, folder: Path, num_gpu_blocks: int | None) -> None:
    """Write an engine's files below a folder, with a script that starts it where vLLM is."""
    try:
        launch = _planned(asked)
        emulated = emulation(launch, read_model(asked.models[0])).with_blocks(num_gpu_blocks)
        written = write_engine_folder(folder / "engine", emulated, tokenizer=asked.tokenizer, seed=asked.seed)
    except (NotEmulatedError, ModelFileError) as error:
        fail(error)
    except OSError as error:
        fail(f"--out {folder}: {error.strerror}: name another folder")
    (folder / "start.py").write_text(start_script(written.plugins, written.arguments), encoding="utf-8")
    _say_what_is_served(emulated, launch, emulated.profile.version)


def _planned(asked: Asked) -> Launch:
    """Return the plan of the only deployment in a file."""
    if asked.plan is None:
        fail("--mode emulated needs --plan FILE: the SpecDecodeDeployment whose engine it is")
    found, errors = render([asked.plan], asked.rendering)
    problems: list[DocumentError | str] = [*errors]
    problems += [f"{each.document.name}: {each.refusal}" for each in found if each.refusal]
    if problems:
        fail(problems[0])
    deployments = [each.deployment for each in found if isinstance(each.deployment, RenderedDeployment)]
    if len(deployments) != 1:
        fail(f"--plan {printable(asked.plan)}: {len(deployments)} SpecDecodeDeployments: name a file with one")
    outcome = deployments[0].desired.outcome
    if not isinstance(outcome, Launch):
        fail(f"--plan {printable(asked.plan)}: nothing would be launched for it")
    return outcome


def _serve(asked: Asked, engine: EngineEnvironment, written: EngineFolder) -> int:
    more = {}
    if asked.record is not None:
        asked.record.mkdir(parents=True, exist_ok=True)
        more[RECORD_VARIABLE] = str(asked.record.resolve())
    port = asked.port or free_port(asked.host)
    arguments = [*written.arguments, "--host", asked.host, "--port", str(port)]
    if asked.served_model_names:
        arguments += ["--served-model-name", *asked.served_model_names]
    arguments += asked.more
    say_line(f"emulated: serving at http://{asked.host}:{port}", err=True)
    return engine.serve(arguments, engine.variables([written.plugins], more))


def _say_what_is_served(emulated: Emulation, launch: Launch, version: str) -> None:
    row = launch.plan.chosen
    budget = row.budget
    place = f"{row.gpus} x {row.product}" if row.gpus else row.product
    say_line(
        f"emulated: {place}, {budget.num_blocks} KV blocks, {budget.kv_cache_tokens} tokens, vLLM {version}", err=True
    )
    planned = emulated.profile.version
    if version.split(".")[:2] != planned.split(".")[:2]:
        say_line(f"warning: the plan is for vLLM {planned}: name an engine of that version with --engine", err=True)
    for line in transfer_warnings(emulated, row.tensor, row.product):
        say_line(f"warning: {line}", err=True)


def _say_verdict(written: EngineFolder) -> None:
    path = written.told / VERDICT_FILE
    if path.exists():
        say_line(path.read_text(encoding="utf-8").strip(), err=True)
