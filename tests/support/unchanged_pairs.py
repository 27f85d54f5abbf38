"""Captures of one workload of engines in virtual time: unchanged, and a little worse."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.files.publish import file_entry
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.synthetic_load import parse_arrivals
from specdecode_operator.replay.virtual_run import GivenBehaviour, VirtualRun
from tests.support.manifests import published_manifest
from tests.support.synthetic import LIMITS, PROMPTS, RATES, STEP_TIME

REQUESTS: Final = 480
"""Of each of two phases: 96,000 tokens in all."""


@dataclass(frozen=True)
class ServedEngine:
    """An engine, and whose chances these are."""

    rates: tuple[float, ...] = RATES
    step_time: StepTime = STEP_TIME

    def serve(self, folder: Path, seed: int, requests: int = REQUESTS, arrivals: str = "closed:1,closed:8") -> Path:
        """Leave a record of the one workload, as the engine does under a seed of its own."""
        folder.mkdir(parents=True)
        for name, content in _files(msgspec.json.encode(self), seed, requests, arrivals).items():
            (folder / name).write_bytes(content)
        return folder


@cache
def _files(text: bytes, seed: int, requests: int, arrivals: str) -> dict[str, bytes]:
    """Return the files of an engine's record, cached because several tests use it and it takes 0.5 s to produce."""
    engine = msgspec.json.decode(text, type=ServedEngine)
    meta = TraceMeta(
        schema=1,
        model="model",
        gpu="H100",
        tp=1,
        block_size=16,
        speculative={"method": "eagle3", "num_speculative_tokens": len(engine.rates)} if engine.rates else None,
    )
    acceptance = from_rates(engine.rates) if engine.rates else None
    run = VirtualRun(behaviour=GivenBehaviour(engine.step_time, acceptance, seed), limits=LIMITS, meta=meta)
    phases = [parse_arrivals(each, requests, None, each.replace(":", "-")) for each in arrivals.split(",")]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run.phases(folder, PROMPTS, phases, f"capture-{seed}")
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def with_acceptance(factor: float) -> ServedEngine:
    """Return an engine whose drafts are accepted so much less often at every position."""
    return ServedEngine(rates=tuple(factor * each for each in RATES))


def with_step_time(factor: float) -> ServedEngine:
    """Return an engine all of whose steps take so much longer."""
    time = STEP_TIME
    slower = msgspec.structs.replace(
        time,
        curve=tuple((tokens, factor * ms) for tokens, ms in time.curve),
        request_us=factor * time.request_us,
        prefill_token_us=factor * time.prefill_token_us,
    )
    return ServedEngine(step_time=slower)


def published(folder: Path, workload: Mapping[str, Any], seed: int = 0) -> Path:
    """Give a record the manifest of a published capture."""
    manifest = published_manifest(
        capture=folder.parents[1].name,
        arm=folder.parent.name,
        repetition=int(folder.name),
        workload=dict(workload),
        seed=seed,
        files={name: file_entry(folder / name) for name in ("trace.jsonl", "step-stats.jsonl")},
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return folder
