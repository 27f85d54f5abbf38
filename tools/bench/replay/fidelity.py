"""How near replay comes to a real engine under loads that it was not fitted to.

    .venv/bin/python -m bench.replay.fidelity FOLDER [--sets draft ngram] [--rounds 8] [--seconds 3]

Captures that are not in FOLDER yet are made there (`tools/bench/replay/real_captures.py`): a real vLLM for the CPU,
whose loads take turns of some seconds, so that a machine that is faster in one minute than in the next is so for all of
them. Some loads are fitted, 4 and 8 clients; held out are half and twice as many, prompts four times as long, and
another K. How far one half of the rounds is from the other is the floor (``again``), which no forecast can beat. Then
every load that was held out is forecast in virtual time from the fitted step times and acceptance (``steps``), by the
donors of `replay fit` (``modelled``), and sent to vLLM with the emulated executor (``emulated``).
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from bench.replay.real_captures import (
    AGAIN,
    MAX_NUM_SEQS,
    OUTPUT_TOKENS,
    SETS,
    SHAPE,
    VOCABULARY,
    EngineOptions,
    Place,
    Planned,
    capture_all,
    place_below,
)
from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, read_recording
from specdecode_operator.replay.emulated.engine_model import KEY, acceptance_from_json, step_time_from_json
from specdecode_operator.replay.emulation import PLUGIN
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.model_file import FittedModel
from specdecode_operator.replay.modelled_engine import ModelledBehaviour
from specdecode_operator.replay.stepped_engine import Behaviour
from specdecode_operator.replay.synthetic_load import Lengths, Prompts, parse_arrivals
from specdecode_operator.replay.virtual_run import GivenBehaviour, VirtualRun

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
FITTED: Final = {"draft": ("closed-4", "closed-8"), "ngram": ("closed-2", "closed-4")}
"""Loads of the first capture of a set that are fitted."""

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


def load_of(request: RecordedRequest) -> str:
    """Return the name of the load that a request belongs to."""
    return (request.phase or "").partition(AGAIN)[0]


def loads_of(recording: Recording) -> dict[str, list[RecordedRequest]]:
    """Return the requests of each load, all rounds of it together."""
    found: dict[str, list[RecordedRequest]] = {}
    for request in recording.requests:
        found.setdefault(load_of(request), []).append(request)
    return found


def every_other_round(requests: Sequence[RecordedRequest], rest: int) -> list[RecordedRequest]:
    """Return the requests of rounds whose number divided by 2 leaves this rest."""
    return [each for each in requests if int((each.phase or "").partition(AGAIN)[2] or 0) % 2 == rest]


def only(recording: Recording, loads: Sequence[str], folder: Path) -> Recording:
    """Return what a recording holds of some loads; its step statistics are written to a folder."""
    requests = [each for each in recording.requests if load_of(each) in loads]
    rounds: dict[str, list[RecordedRequest]] = {}
    for each in requests:
        rounds.setdefault(each.phase or "", []).append(each)
    spans_ms = [
        (min(each.arrival_ms or 0.0 for each in of), max(each.end_ms or 0.0 for each in of)) for of in rounds.values()
    ]
    steps = folder / "step-stats.jsonl"
    with steps.open("w", encoding="utf-8") as file:
        for line in (recording.trace.parent / steps.name).open(encoding="utf-8"):
            moment_ms = json.loads(line)["ts_ms"]
            if any(begin_ms <= moment_ms <= end_ms + 1 for begin_ms, end_ms in spans_ms):
                file.write(line)
    return replace(recording, requests=requests, steps=steps)


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


def _tokens_until(request: RecordedRequest, moment_ms: float) -> int:
    chunk_ms = (request.arrival_ms or 0.0) + request.ttft_ms + np.concatenate(([0.0], np.cumsum(request.gaps_ms)))
    return int(np.array(request.chunk_tokens)[chunk_ms <= moment_ms].sum())


def in_virtual_time(behaviour: Behaviour, planned: Planned, fitted: FittedModel, seconds: int, out: Path) -> Recording:
    """Return what an engine does with the loads of a capture, in no time."""
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
        parse_arrivals(f"closed:{clients}", None, seconds, name)
        for number in range(REPETITIONS)
        for name, clients in zip(load.names(number), load.concurrency, strict=True)
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
    """What became of one load that was held out."""

    name: str
    real: Sequence[RecordedRequest]
    others: dict[str, Sequence[RecordedRequest]]  # by the column that they stand in

    def errors(self, figure: str) -> list[str]:
        """Return by how much each column differs from the real engine's figure."""
        floor = [figures(every_other_round(self.real, rest)).rows()[figure] for rest in (0, 1)]
        value = figures(self.real).rows()[figure]
        found = [f"{100 * (floor[1] / floor[0] - 1):+.1f} %"]
        for column in COLUMNS[1:]:
            of = self.others.get(column)
            found.append(f"{100 * (figures(of).rows()[figure] / value - 1):+.1f} %" if of else "")
        return [f"{value:.4g}", *found]


def summary(measured: Sequence[Measured], wanted: Sequence[str]) -> str:
    """Return a table for each figure, a line for each load."""
    lines = []
    for figure in wanted:
        lines += [f"| {figure} | real | {' | '.join(COLUMNS)} |", f"| --- | ---: {'| ---: ' * len(COLUMNS)}|"]
        lines += [f"| {each.name} | {' | '.join(each.errors(figure))} |" for each in measured]
        lines.append("")
    return "\n".join(lines)


class Bench:
    """One set: what was fitted to some loads of it, and what that makes of the others."""

    def __init__(self, place: Place, name: str, work: Path) -> None:
        """Make the captures that are not there, and fit."""
        self._place, self._planned, self._work, self._fitted_loads = place, SETS[name], work, FITTED[name]
        if not all((place.out / each).is_dir() for each in self._planned):
            capture_all(place, self._planned)
        self._real = {each: read_recording(place.out / each) for each in self._planned}
        (work / name).mkdir()
        fitted_to = only(self._real[name], self._fitted_loads, work / name)
        model = fit([fitted_to], draft_share=DRAFT_SHARE if name == "draft" else 0.0)
        if model.step_time is None or model.acceptance is None:
            raise RuntimeError(f"{name}: too little was recorded to fit it")
        self.fitted = model
        self._fitted_name = name

    def measure(self, *, emulated: bool) -> list[Measured]:
        """Return all loads that were held out."""
        columns = {name: self._in_virtual_time(name) for name in self._planned}
        if emulated:
            self._emulate()
            for name in self._planned:
                columns[name]["emulated"] = loads_of(read_recording(self._work / "emulated" / name))
        return [
            Measured(f"{name}, {load}", requests, {column: of[load] for column, of in columns[name].items()})
            for name, real in self._real.items()
            for load, requests in sorted(loads_of(real).items())
            if name != self._fitted_name or load not in self._fitted_loads
        ]

    def _in_virtual_time(self, name: str) -> dict[str, dict[str, list[RecordedRequest]]]:
        """Return the loads by fitted step times and acceptance, and by donors where K is theirs."""
        planned, fitted, seconds = self._planned[name], self.fitted, self._place.seconds
        step_time, acceptance = (
            step_time_from_json(fitted.step_time or {}),
            acceptance_from_json(fitted.acceptance or {}),
        )
        lead_ms = float(np.median(fitted.ttft.lead_ms)) if fitted.ttft else 0.0
        given = GivenBehaviour(step_time, acceptance, SEED, lead_ms=lead_ms, width=planned.k)
        found = {"steps": in_virtual_time(given, planned, fitted, seconds, self._work / f"{name}-steps")}
        if planned.k == acceptance.num_speculative_tokens:
            donors = ModelledBehaviour(fitted, SEED)
            found["modelled"] = in_virtual_time(donors, planned, fitted, seconds, self._work / f"{name}-modelled")
        return {column: loads_of(recording) for column, recording in found.items()}

    def _emulate(self) -> None:
        """Send all loads to emulated engines; it takes as long as with real ones."""
        out = self._work / "emulated"
        out.mkdir()
        with tempfile.TemporaryDirectory() as folder:
            options = {name: emulated_options(self.fitted, Path(folder) / name) for name in self._planned}
            capture_all(replace(self._place, out=out), self._planned, options)
            for verdict in sorted(Path(folder).glob("*/told/lateness.txt")):
                sys.stdout.write(verdict.read_text())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Measure replay against a real vLLM on the CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=tuple(SETS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=3, help="for each load in a round (default: %(default)s)")
    parser.add_argument("--no-emulated", action="store_true", help="leave out the engines that take real time")
    arguments = parser.parse_args()
    place = place_below(arguments.folder, arguments.rounds, arguments.seconds)
    measured = []
    for name in arguments.sets:
        work = arguments.folder / f"forecasts-{name}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        measured += Bench(place, name, work).measure(emulated=not arguments.no_emulated)
    sys.stdout.write(summary(measured, SUMMARY))


if __name__ == "__main__":
    main()
