"""How near replay comes to a real engine under loads that it was not fitted to.

    .venv/bin/python -m bench.replay_fidelity FOLDER [--methods draft ngram] [--seconds 20]

On a quiet machine: everything is measured in seconds of this machine, and what else runs on it is in all figures. The
captures that are not in FOLDER yet are made (`bench/real_captures.py`): a real vLLM for the CPU at 4 and 8 clients,
which is fitted, and at 2 and 16, with prompts four times as long, and with another K, which are held out. Each of
these is recorded twice: how far the two are apart is the floor, which no forecast can beat. Then every load is
forecast in virtual time from the fitted step times and acceptance (``steps``), by the donors of `replay fit`
(``modelled``), and sent to vLLM with the emulated executor (``emulated``).
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.real_captures import (
    CAPTURES,
    MAX_NUM_SEQS,
    MODEL,
    OUTPUT_TOKENS,
    SHAPE,
    VOCABULARY,
    EngineOptions,
    Place,
    Planned,
    capture,
    make_models,
)
from devcluster.images.engine_environment import install_engine_environment
from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.replay.emulated.acceptance import acceptance_from_json
from specdecode_operator.replay.emulated.settings import KEY
from specdecode_operator.replay.emulated.step_time import step_time_from_json
from specdecode_operator.replay.engines.behaviour import Behaviour
from specdecode_operator.replay.engines.modelled import ModelledBehaviour
from specdecode_operator.replay.fitted.fit import fit
from specdecode_operator.replay.fitted.model import FittedModel
from specdecode_operator.replay.launch.emulation import PLUGIN
from specdecode_operator.replay.recording.read import read_recording
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording
from specdecode_operator.replay.synth.arrivals import parse_arrivals
from specdecode_operator.replay.synth.given import GivenBehaviour
from specdecode_operator.replay.synth.lengths import Lengths
from specdecode_operator.replay.synth.prompts import Prompts
from specdecode_operator.replay.synth.run import VirtualRun
from tests.engine.engine_process import Engine

BLOCK_TOKENS: Final = 32
TOKEN_BYTES: Final = 2 * 2 * 64 * 2
"""Of a layer: keys and values of two heads of 64, in bf16."""

_LAYER: Final = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1536
_HEAD: Final = 512 * VOCABULARY
DRAFT_SHARE: Final = (_LAYER + _HEAD) / (SHAPE["TARGET_LAYERS"] * _LAYER + _HEAD)
"""Weights that a pass of the draft reads, by those of the target."""

REPETITIONS: Final = 20
"""Of a load in virtual time, which costs nothing: so many that chance has little part in it."""

SEED: Final = 11
COLUMNS: Final = ("again", "steps", "modelled", "emulated")
SUMMARY: Final = (
    "TPOT mean, ms",
    "TPOT P50, ms",
    "TTFT mean, ms",
    "TTFT P50, ms",
    "tokens/s",
    "tokens/step",
    "tokens/step, P10 of requests",
    "tokens/step, P90 of requests",
)
AGAIN: Final = "-x"
"""Stands between the name of a phase and the number of its repetition."""


@dataclass(frozen=True)
class Figures:
    """What clients of one phase saw."""

    tpot_ms: np.ndarray
    ttft_ms: np.ndarray
    tokens_per_second: float
    tokens_per_step: float
    of_requests: np.ndarray  # tokens per step of each

    def rows(self) -> dict[str, float]:
        """Return the figures by name."""
        found = {}
        for name, values in (("TPOT", self.tpot_ms), ("TTFT", self.ttft_ms)):
            found[f"{name} mean, ms"] = float(values.mean())
            found |= {f"{name} P{each}, ms": float(np.percentile(values, each)) for each in (50, 90, 99)}
        found |= {"tokens/s": self.tokens_per_second, "tokens/step": self.tokens_per_step}
        of_requests = {
            f"tokens/step, P{each} of requests": float(np.percentile(self.of_requests, each)) for each in (10, 90)
        }
        return found | of_requests


def phases_of(recording: Recording) -> dict[str, list[RecordedRequest]]:
    """Return the requests of each phase, all repetitions of it together."""
    found: dict[str, list[RecordedRequest]] = {}
    for request in recording.requests:
        found.setdefault((request.phase or "").partition(AGAIN)[0], []).append(request)
    return found


def figures(requests: Sequence[RecordedRequest]) -> Figures:
    """Return the figures of some requests."""
    decoding_ms = np.array([sum(request.gaps_ms) for request in requests])
    tokens = np.array([request.output_tokens for request in requests])
    steps = np.array([len(request.gaps_ms) for request in requests])
    repetitions: dict[str, list[RecordedRequest]] = {}
    for request in requests:
        repetitions.setdefault(request.phase or "", []).append(request)
    return Figures(
        tpot_ms=decoding_ms / np.maximum(1, tokens - 1),
        ttft_ms=np.array([request.ttft_ms for request in requests]),
        tokens_per_second=float(np.mean([_throughput(each) for each in repetitions.values()])),
        tokens_per_step=float((tokens - 1).sum() / max(1, steps.sum())),
        of_requests=(tokens - 1) / np.maximum(1, steps),
    )


def _throughput(requests: Sequence[RecordedRequest]) -> float:
    """Return the tokens a second of the time in which every client has a request: until the last one is sent."""
    arrivals_ms = [request.arrival_ms or 0.0 for request in requests]
    begin_ms, stop_ms = min(arrivals_ms), max(arrivals_ms)
    return 1000 * sum(_tokens_until(request, stop_ms) for request in requests) / max(1e-9, stop_ms - begin_ms)


def _seconds(recording: Recording) -> int:
    """Return how long each phase of a recording sent requests."""
    arrivals_ms = [[each.arrival_ms or 0.0 for each in requests] for requests in phases_of(recording).values()]
    return max(1, math.ceil(max(max(each) - min(each) for each in arrivals_ms) / 1000))


def _tokens_until(request: RecordedRequest, moment_ms: float) -> int:
    chunk_ms = (request.arrival_ms or 0.0) + request.ttft_ms + np.concatenate(([0.0], np.cumsum(request.gaps_ms)))
    return int(np.array(request.chunk_tokens)[chunk_ms <= moment_ms].sum())


def in_virtual_time(behaviour: Behaviour, planned: Planned, fitted: FittedModel, seconds: int, out: Path) -> Recording:
    """Return what an engine does with a load, in no time."""
    load = planned.load
    prompts = Prompts(
        prompt_tokens=Lengths(load.prompt_tokens, load.prompt_tokens),
        output_tokens=Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS),
        shared_prefix_tokens=0,
        block_size=BLOCK_TOKENS,
        seed=SEED,
    )
    speculation = {"method": planned.method, "num_speculative_tokens": planned.k}
    meta = TraceMeta(schema=1, block_size=BLOCK_TOKENS, max_num_seqs=MAX_NUM_SEQS, speculative=speculation)
    turnarounds_ms = fitted.clients.turnarounds_ms if fitted.clients else (0.0,)
    run = VirtualRun(behaviour=behaviour, limits=fitted.origin.limits, meta=meta, turnarounds_ms=turnarounds_ms)
    phases = [
        parse_arrivals(f"closed:{clients}", None, seconds, f"closed-{clients}{AGAIN}{number}")
        for clients in load.concurrency
        for number in range(REPETITIONS)
    ]
    out.mkdir(parents=True)
    run.phases(out, prompts, phases, "bench")
    return read_recording(out)


def emulated_options(fitted: FittedModel, folder: Path) -> EngineOptions:
    """Return what makes a vLLM an emulated one, with the scheduling of the CPU's: nothing is scheduled ahead."""
    plugins, told = folder / "plugins", folder / "told"
    told.mkdir(parents=True)
    PLUGIN.write(plugins)
    kept = {
        "kind": "full",
        "block_size": BLOCK_TOKENS,
        "token_bytes": TOKEN_BYTES,
        "head_width": 64,
        "element_bytes": 2,
    }
    kept["page_bytes"] = BLOCK_TOKENS * TOKEN_BYTES
    settings = {
        "step_time": fitted.step_time,
        "acceptance": fitted.acceptance,
        "layers": [kept | {"count": SHAPE["TARGET_LAYERS"]}, kept | {"count": 1, "of_draft": True}],
        "kv_cache_bytes": 2**30,
        "text": [8, VOCABULARY - 8],
        "seed": SEED,
        "folder": str(told),
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    arguments = ("--load-format=dummy", "--no-async-scheduling", f"--additional-config={json.dumps({KEY: str(path)})}")
    backend = "--distributed-executor-backend=specdecode_emulated.executor.EmulatedExecutor"
    return EngineOptions((*arguments, backend), (plugins,))


@dataclass(frozen=True)
class Measured:
    """All recordings of one load."""

    name: str
    real: Recording
    others: dict[str, Recording]  # by the column that they stand in

    def table(self) -> str:
        """Return a table for each phase: the real engine's figures, and by how much others differ."""
        return "\n".join(self._of_phase(phase, requests) for phase, requests in phases_of(self.real).items())

    def error(self, column: str, phase: str, figure: str, value: float) -> str:
        """Return by how much a column differs from the real engine's value."""
        if column not in self.others:
            return ""
        return f"{100 * (figures(phases_of(self.others[column])[phase]).rows()[figure] / value - 1):+.1f} %"

    def _of_phase(self, phase: str, requests: Sequence[RecordedRequest]) -> str:
        real = figures(requests).rows()
        lines = [
            f"| {self.name}, {phase} | real | {' | '.join(self.others)} |",
            f"| --- | ---: {'| ---: ' * len(self.others)}|",
        ]
        for figure, value in real.items():
            errors = [self.error(column, phase, figure, value) for column in self.others]
            lines.append(f"| {figure} | {value:.4g} | {' | '.join(errors)} |")
        return "\n".join([*lines, ""])


def fitted_to(folder: Path, draft_share: float) -> FittedModel:
    """Return what is fitted to a capture."""
    model = fit([read_recording(folder)], draft_share=draft_share)
    if model.step_time is None or model.acceptance is None:
        raise RuntimeError(f"{folder}: too little was recorded to fit it")
    return model


def summary(measured: Sequence[Measured]) -> str:
    """Return a table for each figure that has an aim, a line for each load."""
    lines = []
    for figure in SUMMARY:
        lines += [f"| {figure} | real | {' | '.join(COLUMNS)} |", f"| --- | ---: {'| ---: ' * len(COLUMNS)}|"]
        for each in measured:
            for phase, requests in phases_of(each.real).items():
                value = figures(requests).rows()[figure]
                errors = [each.error(column, phase, figure, value) for column in COLUMNS]
                lines.append(f"| {each.name}, {phase} | {value:.4g} | {' | '.join(errors)} |")
        lines.append("")
    return "\n".join(lines)


@dataclass(frozen=True)
class Bench:
    """Where everything is, and what was fitted to."""

    place: Place
    work: Path
    fitted: FittedModel

    def in_virtual_time(self, name: str) -> dict[str, Recording]:
        """Return a load in virtual time, by fitted step times and acceptance, and by donors where K is theirs."""
        planned, fitted = CAPTURES[name], self.fitted
        seconds = _seconds(read_recording(self.place.out / name))
        # `fitted_to` sees to it that there are both.
        step_time, acceptance = (
            step_time_from_json(fitted.step_time or {}),
            acceptance_from_json(fitted.acceptance or {}),
        )
        lead_ms = float(np.median(fitted.ttft.lead_ms)) if fitted.ttft else 0.0
        given = GivenBehaviour(step_time, acceptance, SEED, lead_ms=lead_ms, width=planned.k)
        found = {"steps": in_virtual_time(given, planned, fitted, seconds, self.work / f"{name}-steps")}
        if planned.k == acceptance.num_speculative_tokens:
            donors = ModelledBehaviour(fitted, SEED)
            found["modelled"] = in_virtual_time(donors, planned, fitted, seconds, self.work / f"{name}-modelled")
        return found

    def emulated(self, name: str) -> Recording:
        """Return what an emulated engine does with a load; it takes as long as the real one."""
        out = self.work / f"{name}-emulated"
        out.mkdir()
        with tempfile.TemporaryDirectory() as folder:
            options = emulated_options(self.fitted, Path(folder))
            place = Place(self.place.engine, self.place.models, out, self.place.seconds)
            found = capture(place, name, CAPTURES[name], options)
            verdict = Path(folder) / "told" / "lateness.txt"
            sys.stdout.write(verdict.read_text() if verdict.exists() else "no verdict of lateness\n")
        return read_recording(found)

    def measure(self, name: str) -> Measured:
        """Return all that there is of a load."""
        others: dict[str, Recording] = {}
        if (again := self.place.out / f"{name}-again").is_dir():
            others["again"] = read_recording(again)
        others |= self.in_virtual_time(name) | {"emulated": self.emulated(name)}
        return Measured(name, read_recording(self.place.out / name), others)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Measure replay against a real vLLM on the CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", nargs="+", choices=("draft", "ngram"), default=("draft", "ngram"))
    parser.add_argument("--seconds", type=int, default=20, help="for each number of clients (default: %(default)s)")
    arguments = parser.parse_args()
    engine = Engine.at(install_engine_environment())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    place = Place(engine, make_models(engine, arguments.folder / MODEL), arguments.folder, arguments.seconds)
    work = arguments.folder / "forecasts"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    all_measured = []
    for method in arguments.methods:
        names = [name for name in CAPTURES if name.startswith(method)]
        for name in names:
            if not (place.out / name).is_dir():
                capture(place, name, CAPTURES[name])
        share = DRAFT_SHARE if method == "draft" else 0.0
        bench = Bench(place, work, fitted_to(place.out / f"{method}-fit", share))
        for name in names:
            if not name.endswith(("-fit", "-again")):
                all_measured.append(bench.measure(name))
                sys.stdout.write(f"{all_measured[-1].table()}\n")
                sys.stdout.flush()
    sys.stdout.write(summary(all_measured))


if __name__ == "__main__":
    main()
