"""How often the upgrade gate errs, on engines in virtual time: pairs that did not change, and two that got worse."""

import sys
from collections import Counter
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from specdecode_operator.capture.comparison.regression import RegressionVerdict, judge
from tests.support.unchanged_pairs import REQUESTS, ServedEngine, with_acceptance, with_step_time

PAIRS: Final = 200
MOST_ALARMS: Final = 1
CAUGHT_AT_LEAST: Final = 0.95

NEW: Final = {
    "unchanged": ServedEngine(),
    "acceptance -10 %": with_acceptance(0.9),
    "steps 5 % slower": with_step_time(1.05),
}


def _verdicts(pair: int) -> list[tuple[str, RegressionVerdict]]:
    """Return what becomes of a golden record of its own and three new ones."""
    with TemporaryDirectory() as folder:
        golden = ServedEngine().serve(Path(folder) / "golden", 10 * pair)
        new = {name: engine.serve(Path(folder) / name, 10 * pair + 1) for name, engine in NEW.items()}
        return [(name, judge([golden], [found]).verdict) for name, found in new.items()]


def main() -> int:
    """Print how many of each come to which verdict; return 1 where they are more, or fewer, than promised."""
    with Pool() as pool:
        counts = Counter(each for found in pool.imap_unordered(_verdicts, range(PAIRS)) for each in found)
    print(f"{PAIRS} pairs each, 2 phases of {REQUESTS} requests in both, 100 tokens a request\n")
    print(f"{'new engine':18}" + "".join(f"{verdict.value:>14}" for verdict in RegressionVerdict))
    for name in NEW:
        print(f"{name:18}" + "".join(f"{counts[name, verdict]:14}" for verdict in RegressionVerdict))
    alarms = PAIRS - counts["unchanged", RegressionVerdict.HOLDS]
    caught = min(counts[name, RegressionVerdict.REGRESSED] for name in NEW if name != "unchanged")
    return int(alarms > MOST_ALARMS or caught < CAUGHT_AT_LEAST * PAIRS)


if __name__ == "__main__":
    sys.exit(main())
