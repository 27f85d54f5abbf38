"""Captures of a real vLLM on the CPU, made without a cluster: what replay's fits and forecasts are measured with.

    .venv/bin/python -m bench.replay.real_captures FOLDER [SET …] [--rounds 8] [--seconds 3]

Below FOLDER each capture gets a folder as `specdecode capture fetch` leaves it. The engine is unmodified; the recorder,
the load generator and the Job's own code do the rest. The pair is larger than the tiny one of the examples, so that a
step takes 10 to 60 ms on one core, far more than the host's part of it; one thread computes, which leaves the other
core to the API server and the client.

A machine that others share is faster in one minute than in the next, by a quarter and more. So the engines of a set
stand side by side, and one load after the other is sent for some seconds, to whichever engine it is for, round after
round: what is compared was measured at the same time.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bench.replay.turns import Turns
from devcluster.images.engine_environment import install_engine_environment
from specdecode_operator.capture.files.summary import summary_text
from specdecode_operator.capture.job.entrypoint import Job
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE
from specdecode_operator.capture.load.runner import run_load
from tests.engine.engine_process import Engine
from tests.engine.recorder_server import REPOSITORY, serving

MODEL: Final = "bench-pair"
SHAPE: Final = {"HIDDEN": 512, "HEADS": 8, "INTERMEDIATE": 1536, "TARGET_LAYERS": 12}
AGREEMENT_NOISE: Final = 0.08
USUAL_TOKENS, RARE_SCALE, ATTENTION_SCALE = 64, 0.3, 0.02
"""What makes the answers repeat themselves, so that ngram finds drafts that are sometimes right: few tokens that are
likely at all, and so little attention that the last tokens nearly decide the next one."""

VOCABULARY: Final = 1024
MAX_MODEL_LEN: Final = 2048
MAX_NUM_SEQS: Final = 16
MAX_NUM_BATCHED_TOKENS: Final = 128
"""So few that steps have at most 32 sizes: a vLLM for the CPU keeps kernels for so many, and stands still for up to a
second for any other, which no engine on a GPU does."""

OUTPUT_TOKENS: Final = 64
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 96, 384
TEMPERATURES: Final = [{"temperature": "0.0", "sharePercent": 100}]
"""Greedy, because vLLM on a CPU verifies drafts wrongly at other temperatures (vllm-project/vllm#55005)."""

_MAKE_PAIR: Final = """
import pathlib, sys
sys.path.insert(0, {examples!r})
import tiny_pair
for name, value in {shape}.items():
    setattr(tiny_pair, name, value)
usual_weights = tiny_pair.pair_weights
def pair_weights(parameters):
    pair = usual_weights(parameters)
    for weights in pair:
        for name in weights:
            if name.endswith("o_proj.weight"):
                weights[name] *= {attention}
        head = weights["lm_head.weight"]
        head[:8] *= {rare}
        head[8 + {usual} :] *= {rare}
    return pair
tiny_pair.pair_weights = pair_weights
parameters = tiny_pair.PairParameters(agreement_noise={noise}, target_layers=tiny_pair.TARGET_LAYERS)
tiny_pair.make_pair(pathlib.Path(sys.argv[1]), parameters)
"""


AGAIN: Final = "-x"
"""Stands between the name of a load and the number of its round."""


@dataclass(frozen=True)
class Load:
    """What one engine is sent in each round: so many clients, one phase after the other."""

    concurrency: tuple[int, ...]
    prompt_tokens: int = PROMPT_TOKENS

    def names(self, number: int) -> list[str]:
        """Return the names of its phases in a round."""
        return [f"closed-{clients}{AGAIN}{number}" for clients in self.concurrency]


@dataclass(frozen=True)
class Planned:
    """One capture: how the engine speculates, and what it is sent."""

    method: str
    k: int
    load: Load

    def speculation(self, models: Path) -> dict[str, Any]:
        """Return vLLM's --speculative-config."""
        given: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.k}
        if self.method == "draft_model":
            return given | {"model": str(models / "draft")}
        return given | {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Place:
    """Where captures are made, in how many rounds, and for how long each load is sent in one."""

    engine: Engine
    models: Path
    out: Path
    rounds: int
    seconds: int


@dataclass(frozen=True)
class EngineOptions:
    """What an engine gets that is not the usual one."""

    arguments: Sequence[str] = ()
    packages: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


SETS: Final = {
    "draft": {
        "draft": Planned("draft_model", 3, Load((4, 2, 8, 16))),
        "draft-long": Planned("draft_model", 3, Load((8,), LONG_PROMPT_TOKENS)),
        "draft-k5": Planned("draft_model", 5, Load((8,))),
    },
    "ngram": {"ngram": Planned("ngram", 3, Load((2, 1, 4, 8)))},
}
"""Captures that are made side by side."""


def make_models(engine: Engine, folder: Path) -> Path:
    """Write target and draft below a folder, where they are not there yet."""
    script = _MAKE_PAIR.format(
        examples=str(REPOSITORY / "examples"),
        shape=SHAPE,
        attention=ATTENTION_SCALE,
        rare=RARE_SCALE,
        usual=USUAL_TOKENS,
        noise=AGREEMENT_NOISE,
    )
    engine.run("-c", script, str(folder))
    return folder


def settings(name: str, load: Load, volume: Path, url: str, place: Place) -> dict[str, Any]:
    """Return what the operator would give the capture's Job."""
    return {
        "namespace": "bench",
        "capture": name,
        "root": str(volume),
        "engine": {"url": url, "model": "tiny", "max_model_len": MAX_MODEL_LEN, "vocab_size": VOCABULARY},
        "workload": {
            "prompts": {"synthetic": {"promptTokens": load.prompt_tokens, "outputTokens": OUTPUT_TOKENS}},
            "phases": [
                {"name": name, "pattern": "Closed", "concurrency": clients, "durationSeconds": place.seconds}
                for number in range(place.rounds)
                for name, clients in zip(load.names(number), load.concurrency, strict=True)
            ],
            "temperatures": TEMPERATURES,
            "warmupRequests": 24,
        },
        "seed": 1,
        "deadline_seconds": 1800,
        "context": {"image": "test"},
    }


def capture_all(
    place: Place, planned: Mapping[str, Planned], options: Mapping[str, EngineOptions] = MappingProxyType({})
) -> None:
    """Record the loads of a set, in turns, and leave the published files of each in its folder.

    Raises
    ------
    RuntimeError
        One of them was not published.
    """
    order = [(name, WARMUP_PHASE) for name in planned]
    for number in range(place.rounds):
        order += [(name, phase) for name, each in planned.items() for phase in each.load.names(number)]
    turns = Turns(order)
    beside = multiprocessing.get_context("fork")
    captures = [
        beside.Process(target=capture, args=(place, name, each, turns, options.get(name, EngineOptions())))
        for name, each in planned.items()
    ]
    for process in captures:
        process.start()
    while running := [process for process in captures if process.is_alive()]:
        wait([process.sentinel for process in running])
        if any(process.exitcode for process in captures):
            for process in running:
                process.terminate()
            raise RuntimeError("a capture failed: see above")


def capture(place: Place, name: str, planned: Planned, turns: Turns, engine: EngineOptions) -> None:
    """Start an engine, record its load, and leave the published files in a folder."""
    with tempfile.TemporaryDirectory(dir=place.out) as scratch_name:
        scratch = Path(scratch_name)
        volume = scratch / "volume"
        volume.mkdir()

        def job(url: str) -> Job:
            given = settings(name, planned.load, volume, url, place)
            return Job({"SPECDECODE_CAPTURE": json.dumps(given), "SPECDECODE_ATTEMPT": "uid-1"})

        prepared = job("http://127.0.0.1:1")
        prepared.prepare(scratch / "bundle")
        usual = [f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-seqs={MAX_NUM_SEQS}", "--block-size=32"]
        usual.append(f"--max-num-batched-tokens={MAX_NUM_BATCHED_TOKENS}")
        variables = {
            "SPECDECODE_RECORD_DIR": str(prepared.places.segments),
            "OBSERVER_DIR": "",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "NUMBA_NUM_THREADS": "1",
        }
        try:
            with serving(
                place.engine,
                place.models,
                scratch / "engine",
                *usual,
                *engine.arguments,
                speculation=planned.speculation(place.models),
                packages=engine.packages,
                **(variables | dict(engine.environment)),
            ) as server:
                published = job(server.url).run(partial(run_load, around_phase=partial(turns.around, name)))
        finally:
            shutil.copy(scratch / "engine" / "vllm.log", place.out / f"{name}.log")
        sys.stdout.write(f"{name}\n{summary_text(published.summary)}\n")
        sys.stdout.flush()
        shutil.copytree(prepared.places.final, place.out / name)


def place_below(folder: Path, rounds: int, seconds: int) -> Place:
    """Return a place with the models that it needs."""
    engine = Engine.at(install_engine_environment())
    folder.mkdir(parents=True, exist_ok=True)
    return Place(engine, make_models(engine, folder / MODEL), folder, rounds, seconds)


def main() -> None:
    """Make the captures of the sets that the command line names."""
    parser = argparse.ArgumentParser(description="Make captures of a real vLLM on the CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}; absent: all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=3, help="for each load in a round (default: %(default)s)")
    arguments = parser.parse_args()
    place = place_below(arguments.folder, arguments.rounds, arguments.seconds)
    for name in arguments.sets or SETS:
        capture_all(place, SETS[name])


if __name__ == "__main__":
    main()
