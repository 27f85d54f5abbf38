"""How often a capture with two equal arms is given a verdict, its engines started anew each repetition."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from specdecode_operator.capture.comparison.arm_folders import ArmManifest, Repetition
from specdecode_operator.capture.comparison.arm_verdict import judge
from specdecode_operator.capture.comparison.client_requests import Sent, paired_blocks, read_client_side
from specdecode_operator.capture.comparison.compare_arms import compare_capture
from specdecode_operator.capture.comparison.comparison_file import LoadVerdict, Slo
from specdecode_operator.capture.files.formats import MANIFEST
from specdecode_operator.stats.verdict import student_quantile
from tests.support.compared_captures import MadeCapture, of_equal_arms

RUNS: Final = 1000
PHASES: Final = "closed:2,closed:4"
STARTS: Final = 300
"""Engines that are started of each kind; comparisons draw theirs from them."""

LEVEL: Final = 0.95
SLOW_SHARE: Final = 0.2
KINDS: Final = {
    "alike": (0.0, None),
    "1 %": (0.01, None),
    "3 %": (0.03, None),
    "one in five 3 % slower": (0.03, SLOW_SHARE),
}
"""What a start makes of all of its steps: a standard deviation, or by how much some are slower."""


@dataclass(frozen=True)
class Start:
    """One start of an engine: its requests by phase, and its goodput."""

    sent: dict[str, Sent]
    goodput: dict[str, float]


def _capture(effect: float, repetitions: int, seed: int) -> MadeCapture:
    return of_equal_arms(
        arrivals=PHASES, requests=64, repetitions=repetitions, seed=seed, start_effect=effect, noise=0.05
    )


def _whole(effect: float, repetitions: int, seed: int) -> bool:
    """Return whether a capture, from its files to the verdict of its arm, is given one."""
    with TemporaryDirectory() as folder:
        made = _capture(effect, repetitions, seed)
        return compare_capture(made.make(Path(folder))).arm("other").verdict != "Inconclusive"


def _start(effect: float, slow_share: float | None, seed: int) -> Start:
    made = _capture(effect if slow_share is None else 0.0, 2, seed)
    if slow_share is not None and Random(seed).random() < slow_share:  # noqa: S311
        made = replace(made, arms={name: replace(arm, slower=1 + effect) for name, arm in made.arms.items()})
    with TemporaryDirectory() as folder:
        place = made.make_one(Path(folder), "plain", 1)
        manifest = msgspec.json.decode((place / MANIFEST).read_bytes(), type=ArmManifest)
        by_phase, span_ms = read_client_side("plain", Repetition(place, 1, manifest), Slo(), {})
    goodput = {
        phase: 1000 * sum(sent.good_tokens) / (span_ms[phase][1] - span_ms[phase][0])
        for phase, sent in by_phase.items()
    }
    return Start(by_phase, goodput)


def _loads(baseline: Sequence[Start], other: Sequence[Start]) -> list[LoadVerdict]:
    """Compare two arms as a capture does, phase by phase."""
    phases = of_equal_arms(arrivals=PHASES, requests=64).phases
    return [
        judge(
            {
                number: paired_blocks(phase, one.sent[phase.name], another.sent[phase.name])
                for number, (one, another) in enumerate(zip(baseline, other, strict=True))
            },
            [[each.goodput[phase.name] for each in arm] for arm in (baseline, other)],
            candidate=1,
            level=1 - (1 - LEVEL) / len(phases),
            whole=True,
        )
        for phase in phases
    ]


def _rules(repetitions: int, pool: Sequence[Start], seed: int) -> tuple[bool, bool, bool]:
    """Return whether two equal arms get a verdict: by blocks alone, with no repetition against it, and by both."""
    drawn = Random(seed).sample(pool, 2 * repetitions)  # noqa: S311
    baseline, other = drawn[:repetitions], drawn[repetitions:]
    found = _loads(baseline, other)
    blocks = agreeing = False
    for phase, each in zip(of_equal_arms(arrivals=PHASES).phases, found, strict=True):
        pays, costs = (each.blocks_low or 0) > 1, (each.blocks_high or math.inf) < 1
        more = [two.goodput[phase.name] > one.goodput[phase.name] for one, two in zip(baseline, other, strict=True)]
        blocks |= pays or costs
        agreeing |= (pays and all(more)) or (costs and not any(more))
    return blocks, agreeing, any(each.verdict != "Inconclusive" for each in found)


def _rates(pool: Pool) -> Iterator[str]:
    yield f"wrong verdicts in % of {RUNS:,} captures of two equal arms and two loads, of {STARTS} engines of each kind"
    yield f"{'starts differ by':26}{'repetitions':>12}{'blocks alone':>14}{'no repetition against':>23}{'verdict':>9}"
    for name, (effect, share) in KINDS.items():
        starts = pool.map(partial(_start, effect, share), range(STARTS), chunksize=5)
        for repetitions in (2, 3, 5):
            found = pool.map(partial(_rules, repetitions, starts), range(RUNS), chunksize=50)
            shares = [100 * sum(each) / RUNS for each in zip(*found, strict=True)]
            yield f"{name:26}{repetitions:12}{shares[0]:14.1f}{shares[1]:23.1f}{shares[2]:9.1f}"


def _whole_path(pool: Pool) -> Iterator[str]:
    yield f"the same from files to comparison.json, each capture with engines of its own, {RUNS:,} captures"
    found = pool.map(partial(_whole, 0.01, 2), range(RUNS), chunksize=5)
    yield f"starts differ by 1%, 2 repetitions: {100 * sum(found) / RUNS:.1f} %"


def _widths() -> Iterator[str]:
    yield "half the interval of starts, in standard deviations of a start's goodput, by loads of the workload"
    yield f"{'arms':>6}{'loads':>7}" + "".join(f"{f'{each} repetitions':>15}" for each in (2, 3, 4, 5, 8))
    for arms in (2, 4, 8):
        for loads in (1, 2, 4):
            share = 1 - (1 - LEVEL) / loads / 2
            halves = [student_quantile(share, arms * (each - 1)) * math.sqrt(2 / each) for each in (2, 3, 4, 5, 8)]
            yield f"{arms:6}{loads:7}" + "".join(f"{each:15.1f}" for each in halves)


def report() -> Iterator[str]:
    """Return all figures, line by line."""
    yield from _widths()
    with Pool(2) as pool:
        for part in (_rates, _whole_path):
            yield ""
            yield from part(pool)


if __name__ == "__main__":
    for line in report():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
