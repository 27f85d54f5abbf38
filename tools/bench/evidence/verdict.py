"""How often `specdecode verdict` errs when looked at after every block, and how many blocks an effect takes."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time
from typing import Final

import numpy as np
from typer.testing import CliRunner

from bench.evidence.block_series import goodput
from bench.evidence.verdict_methods import METHODS, first_decided
from specdecode_operator.cli.main import app
from specdecode_operator.stats.verdict import PairedSeries, Verdict
from tests.support.paired_blocks import autocorrelated, normal

RUNS: Final = 1000
LOOKS: Final = 100
POWER_RUNS: Final = 200
MOST_BLOCKS: Final = 2000
REQUESTS_A_BLOCK: Final = 32
ROOT: Final = Path(__file__).parents[3]
RECORDED: Final = ROOT / "tests/data/block_series/recorded.json"

Pairs = list[tuple[float, float]]


def _student(freedom: int) -> Callable[[Random], Iterator[float]]:
    def noise(random: Random) -> Iterator[float]:
        while True:
            yield random.gauss(0, 1) / math.sqrt(random.gammavariate(freedom / 2, 2) / freedom)

    return noise


def _outliers(random: Random) -> Iterator[float]:
    while True:
        yield random.gauss(0, 1) * (20 if random.random() < 0.05 else 1)  # noqa: PLR2004  one block in twenty


def _growing(random: Random) -> Iterator[float]:
    look = 0
    while True:
        look += 1
        yield (0.2 + 2.8 * look / LOOKS) * random.gauss(0, 1)


def _wandering(random: Random) -> Iterator[float]:
    slow = autocorrelated(0.9)(random)
    while True:
        yield math.sqrt(0.3) * next(slow) + math.sqrt(0.7) * random.gauss(0, 1)


NOISES: Final[dict[str, Callable[[Random], Iterator[float]]]] = {
    "normal": normal,
    "Student's t, 3 degrees": _student(3),
    "5 % outliers, 20 times": _outliers,
    "noise that grows 15 times": _growing,
    "autocorrelation 0.3": autocorrelated(0.3),
    "autocorrelation 0.5": autocorrelated(0.5),
    "autocorrelation 0.6": autocorrelated(0.6),
    "autocorrelation 0.8": autocorrelated(0.8),
    "30 % of it wanders slowly (0.9)": _wandering,
}


def _decided(pairs: Pairs) -> int | None:
    """Return the block after which there is a verdict."""
    series = PairedSeries()
    answers = (series.add(*each).verdict for each in pairs)
    return next((look for look, each in enumerate(answers, start=1) if each is not Verdict.INCONCLUSIVE), None)


def _pairs(differences: Sequence[float]) -> Pairs:
    return [(100.0, 100.0 * math.exp(each)) for each in differences]


def _share(decided: Sequence[int | None]) -> str:
    return f"{100 * sum(each is not None for each in decided) / len(decided):9.1f}"


def _false_verdicts(pool: Pool) -> Iterator[str]:
    yield f"wrong verdicts in % of {RUNS:,} comparisons of equal arms, each looked at after each of {LOOKS} blocks"
    yield f"{'noise':34}{'verdict':>9}" + "".join(f"{name:>16}" for name in METHODS)
    for name, noise in NOISES.items():
        random = Random(name)  # noqa: S311
        differences = [[0.05 * each for each in islice(noise(random), LOOKS)] for _ in range(RUNS)]
        others = [_share(first_decided(method(np.array(differences)))) for method in METHODS.values()]
        ours = _share(pool.map(_decided, map(_pairs, differences), chunksize=20))
        yield f"{name:34}{ours}" + "".join(f"{each:>16}" for each in others)


def _recorded(random: Random) -> Iterator[Pairs]:
    """Successive blocks of one engine as the two arms, in random order."""
    series = list(json.loads(RECORDED.read_text(encoding="utf-8"))["series"].values())
    while True:
        blocks = random.choice(series)
        start = random.randrange(2)
        pairs = list(zip(blocks[start::2], blocks[start + 1 :: 2], strict=False))
        yield [random.choice([(one, other), (other, one)]) for one, other in pairs]


def _replayed(random: Random, folder: Path, seeds: int = 16) -> Iterator[Pairs]:
    """Engines in virtual time under the same load, which differ by their seed."""
    series = []
    for seed in range(seeds):
        made = folder / str(seed)
        load = "--arrivals poisson:6 --requests 400 --prompt-tokens 200 --output-tokens lognormal:60:0.5 --noise 0.1"
        CliRunner().invoke(app, ["replay", "synth", "--out", str(made), *load.split(), "--seed", str(seed)])
        series.append(goodput(made / "trace.jsonl"))
    while True:
        one, other = random.sample(series, 2)
        start = random.randrange(len(one))
        pairs = list(zip(one, other, strict=True))
        yield pairs[start:] + pairs[:start]


def _from_engines(pool: Pool) -> Iterator[str]:
    yield f"wrong verdicts in % of {RUNS:,} comparisons of equal arms, each looked at after each block"
    with TemporaryDirectory() as folder:
        for name, pairs in (
            ("blocks of vLLM, recorded", _recorded(Random(1))),  # noqa: S311
            ("replay engines, other seeds", _replayed(Random(2), Path(folder))),  # noqa: S311
        ):
            runs = list(islice(pairs, RUNS))
            yield f"{name:34}{_share(pool.map(_decided, runs, chunksize=20))}   ({max(map(len, runs))} blocks at most)"


def _look(effect: float, deviation: float, seed: int) -> int:
    random = Random(seed)  # noqa: S311
    series = PairedSeries()
    for look in range(1, MOST_BLOCKS + 1):
        found = series.add(
            100 * math.exp(random.gauss(0, deviation)), 100 * (1 + effect) * math.exp(random.gauss(0, deviation))
        )
        if found.verdict is not Verdict.INCONCLUSIVE:
            return look if found.verdict is Verdict.PAYS else MOST_BLOCKS
    return MOST_BLOCKS


def _power(pool: Pool) -> Iterator[str]:
    yield f"blocks until Pays, of half and of nine in ten of {POWER_RUNS} comparisons; requests of both arms that nine"
    yield f"in ten take, at {REQUESTS_A_BLOCK} requests a block and arm"
    yield f"{'effect':>8}{'noise of an arm':>17}{'half':>8}{'90 %':>8}{'requests':>10}"
    for effect in (0.02, 0.05, 0.1):
        for deviation in (0.01, 0.02, 0.05, 0.1):
            cases = [(effect, deviation, seed) for seed in range(POWER_RUNS)]
            looks = sorted(pool.starmap(_look, cases, chunksize=5))
            half, most = looks[POWER_RUNS // 2], looks[9 * POWER_RUNS // 10]
            requests = f"{2 * REQUESTS_A_BLOCK * most:10,}"
            yield f"{effect:8.0%}{deviation:17.0%}{half:8}{most:8}{requests}"


def _compared_power(pool: Pool) -> Iterator[str]:
    yield "blocks until a verdict, of half and of nine in ten; effects in standard deviations of a block's log ratio"
    yield f"{'noise':34}{'effect':>7}{'verdict':>12}" + "".join(f"{name:>16}" for name in METHODS)
    for name in ("normal", "5 % outliers, 20 times"):
        for effect in (0.3, 0.5, 1.0, 2.0, 5.0):
            random = Random(name)  # noqa: S311
            runs = [[0.05 * (effect + each) for each in islice(NOISES[name](random), 400)] for _ in range(POWER_RUNS)]
            ours = pool.map(_decided, map(_pairs, runs), chunksize=5)
            others = [first_decided(method(np.array(runs))) for method in METHODS.values()]
            yield f"{name:34}{effect:7}{_quantiles(ours):>12}" + "".join(f"{_quantiles(each):>16}" for each in others)


def _quantiles(looks: Sequence[int | None]) -> str:
    known = sorted(math.inf if each is None else each for each in looks)
    return " / ".join(
        "-" if math.isinf(each) else f"{each:g}" for each in (known[len(known) // 2], known[9 * len(known) // 10])
    )


def _speed() -> Iterator[str]:
    for blocks, series in ((10_000, 1), (100, 100)):
        random, began = Random(1), process_time()  # noqa: S311
        for _ in range(series):
            answers = PairedSeries()
            for _ in range(blocks):
                answers.add(100 * math.exp(random.gauss(0, 0.05)), 103 * math.exp(random.gauss(0, 0.05)))
        yield f"{series} series of {blocks:,} blocks: {process_time() - began:.1f} s CPU"


def report() -> Iterator[str]:
    """Return all figures, line by line."""
    yield from _speed()
    yield ""
    with Pool(2) as pool:
        for part in (_from_engines, _power, _compared_power, _false_verdicts):
            yield from part(pool)
            yield ""


if __name__ == "__main__":
    for line in report():
        print(line)
        sys.stdout.flush()
