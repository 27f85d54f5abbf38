"""What a command that sizes takes from start to end, as people wait for it."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.figures import Figure, at_most
from bench.processes import Used, run_command
from bench.sizing.lines import cases

ROUNDS: Final = 15
EXAMPLE: Final = "examples/llama-70b.yaml"
CALCULATOR: Final = "our aim; AIConfigurator 0.12.0 takes 4.4 to 8.5 s, agilerl-arena 1.1 to 1.5 s, on 2 cores"


def figures() -> Iterator[Figure]:
    """Yield time and memory of a plan, and of a batch of one line."""
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one.jsonl"
        one.write_text(json.dumps(next(cases())) + "\n", encoding="utf-8")
        commands = {
            f"plan -f {EXAMPLE}": ("plan", "-f", EXAMPLE),
            "plan --batch of one line": ("plan", "--batch", str(one), "--out", str(one.with_suffix(".out"))),
        }
        for name, arguments in commands.items():
            best = min((run_command(*arguments) for _ in range(ROUNDS)), key=_wall_s)
            remark = (
                f"process from start to end, best of {ROUNDS}; {best.cpu_s:.2f} s of CPU, {best.memory_mib:.0f} MiB"
            )
            yield Figure(name, best.wall_s, "s", at_most(0.5, CALCULATOR), remark)


def _wall_s(used: Used) -> float:
    return used.wall_s
