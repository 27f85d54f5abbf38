"""Captures with arms, made by replay engines in virtual time: for what compares them, its pictures and its bench."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.formats import (
    CLIENT,
    DATA_FILES,
    MANIFEST,
    TRACE,
    Checks,
    GreedyAnswer,
    GreedyCheck,
    ParsingCheck,
    TraceMeta,
)
from specdecode_operator.capture.files.publish import file_entry
from specdecode_operator.replay.emulated.engine_model import Acceptance, StepTime, from_rates
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.synthetic_load import Lengths, Prompts, parse_arrivals
from specdecode_operator.replay.virtual_run import GivenBehaviour, VirtualRun, spread

RATES: Final = (0.8, 0.6, 0.42, 0.3)
CURVE: Final = ((1, 10.0), (64, 11.0), (1024, 60.0))
"""Weights are read whatever is in a step; beyond 64 tokens arithmetic takes over, and speculation stops paying."""

PROMPTS: Final = Prompts(
    prompt_tokens=Lengths(100, 300), output_tokens=Lengths(30, 60), shared_prefix_tokens=64, block_size=16, seed=5
)


@dataclass(frozen=True)
class MadeArm:
    """How an arm's engine behaves."""

    rates: tuple[float, ...] = ()  # of each drafted position; nothing is drafted without
    slower: float = 1.0  # than the others, in every step
    draft_ms: float = 0.3
    greedy: tuple[int, ...] = tuple(range(20))
    parsed: int = 8
    lossy: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def acceptance(self) -> Acceptance | None:
        return from_rates(self.rates) if self.rates else None


PLAIN: Final = MadeArm()
SPECULATING: Final = MadeArm(rates=RATES)


@dataclass(frozen=True)
class MadeCapture:
    """What is measured."""

    arms: dict[str, MadeArm] = field(default_factory=lambda: {"plain": PLAIN, "drafted": SPECULATING})
    arrivals: str = "closed:4"
    requests: int = 64
    repetitions: int = 2
    seed: int = 1
    start_effect: float = 0.0  # standard deviation of what a start makes of all of its steps, as a share
    slo: dict[str, int] = field(default_factory=dict)
    noise: float = 0.1
    prompts: Prompts = PROMPTS
    curve: tuple[tuple[float, float], ...] = CURVE
    temperatures: tuple[str | None, ...] = ()  # of the phases, where they have their own

    @property
    def phases(self) -> list[Any]:
        phases = [
            parse_arrivals(each, self.requests, None, each.replace(":", "-").replace("+", "-"))
            for each in self.arrivals.split(",")
        ]
        own = self.temperatures or [None] * len(phases)
        return [
            each.model_copy(update={"temperature": temperature}) for each, temperature in zip(phases, own, strict=True)
        ]

    @property
    def workload(self) -> dict[str, Any]:
        phases = [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in self.phases]
        dataset = {"configMap": {"name": "prompts"}, "path": "prompts.jsonl", "format": "JSONL"}
        return {"prompts": {"dataset": dataset}, "phases": phases}

    def make(self, folder: Path) -> Path:
        """Write all arms and repetitions, and return the folder."""
        for repetition in range(1, self.repetitions + 1):
            for name in self.arms:
                self.make_one(folder, name, repetition)
        return folder

    def make_one(self, folder: Path, name: str, repetition: int) -> Path:
        """Write one repetition of an arm."""
        arm, place = self.arms[name], folder / name / str(repetition)
        place.mkdir(parents=True)
        random = Random(f"{self.seed}/{name}/{repetition}")
        scale = arm.slower * max(0.5, 1 + random.gauss(0, self.start_effect))
        step_time = StepTime(
            curve=tuple((tokens, ms * scale) for tokens, ms in self.curve),
            prefill_token_us=20.0 * scale,
            draft_ms=arm.draft_ms * scale,
            residuals=spread(self.noise),
        )
        k = len(arm.rates)
        speculative = {"method": "eagle3", "num_speculative_tokens": k} if k else None
        run = VirtualRun(
            behaviour=GivenBehaviour(step_time, arm.acceptance, random.getrandbits(30)),
            limits=Limits(max_num_seqs=256, block_size=16, num_gpu_blocks=20_000),
            meta=TraceMeta(schema=1, block_size=16, speculative=speculative),
        )
        run.phases(place, self.prompts, self.phases, "test")
        _write_client(place)
        if repetition == 1:
            _write_checks(place, arm)
        self._write_manifest(place, name, repetition, speculative)
        return place

    def _write_manifest(self, place: Path, name: str, repetition: int, speculative: Any) -> None:
        arm = self.arms[name]
        manifest = {
            "namespace": "default",
            "capture": "test",
            "arm": name,
            "repetition": repetition,
            "experiment": {
                "arms": list(self.arms),
                "baseline": next(iter(self.arms)),
                "repetitions": self.repetitions,
                "order": [list(self.arms)] * self.repetitions,
                "slo": self.slo,
                "lossy": {key: each.lossy for key, each in self.arms.items() if each.lossy},
            },
            "vllm": "0.33.0",
            "model": "tiny",
            "gpu": "NVIDIA H100 80GB HBM3",
            "gpu_uuids": ["GPU-1"],
            "node": "node",
            "config": {"max_num_seqs": 256, "async_scheduling": True, "speculative": speculative} | arm.config,
            "context": {
                "command": ["vllm", "serve", json.dumps(speculative)],
                "plan": {"perGpu": {"targetWeightsBytes": 16_000, "draftWeightsBytes": 800}} | arm.plan,
            },
            "workload": self.workload,
            "seed": self.seed,
            "record": {},
            "engine_counters": {"generation_tokens": 1, "kv_cache_tokens": 320_000},
            "files": {
                file: msgspec.to_builtins(file_entry(place / file)) for file in DATA_FILES if (place / file).exists()
            },
        }
        (place / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _write_client(place: Path) -> None:
    """Write what a client beside the engine would have seen."""
    lines = []
    for text in (place / TRACE).read_bytes().splitlines()[1:]:
        record = json.loads(text)
        latency_ms = record["ttft_ms"] + sum(record.get("itl_ms") or ())
        lines.append(
            {
                "id": record["request_id"],
                "phase": record["phase"],
                "index": int(record["request_id"].rpartition("-")[2]),
                "outcome": "completed",
                "sent_ms": record["arrival_ms"],
                "finished_ms": record["arrival_ms"] + latency_ms,
                "ttft_ms": record["ttft_ms"],
                "latency_ms": latency_ms,
                "prompt_tokens": record["prompt_tokens"],
                "max_tokens": record["output_tokens"],
                "completion_tokens": record["output_tokens"],
                "temperature": 0.0,
            }
        )
    lines.sort(key=lambda line: float(str(line["sent_ms"])))
    (place / CLIENT).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _write_checks(place: Path, arm: MadeArm) -> None:
    answer = GreedyAnswer(
        prompt_sha256="a" * 64, prompt_tokens=8, tokens=list(arm.greedy), top2_margin=[1.5] * len(arm.greedy)
    )
    checks = Checks(
        greedy=GreedyCheck(answers=[answer]),
        structured=ParsingCheck(asked=8, parsed=arm.parsed),
        tool_calls=ParsingCheck(not_measured="the tokenizer has no chat template"),
    )
    (place / "checks.json").write_bytes(msgspec.json.encode(checks))


def rewrite(path: Path, change: Any) -> None:
    """Change a JSON document in place."""
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(change(document) or document), encoding="utf-8")


def renew(place: Path) -> None:
    """Have a manifest say of its files what they are now."""

    def change(manifest: Any) -> None:
        manifest["files"] = {
            file: msgspec.to_builtins(file_entry(place / file)) for file in DATA_FILES if (place / file).exists()
        }

    rewrite(place / MANIFEST, change)


def of_equal_arms(**options: Any) -> MadeCapture:
    """Return a capture whose two arms are the same."""
    return replace(MadeCapture(arms={"plain": PLAIN, "other": replace(PLAIN)}), **options)
