"""Speed and memory of `specdecode plan --batch` as a process, with a config.json in each line."""

import json
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, at_least, at_most, growth
from bench.processes import Used, run_command
from bench.sizing.speed import NEW_REQUESTS, PRODUCTS, estimates_per_second
from specdecode_operator.sizing.catalogue import find_entry

TARGET: Final = "meta-llama/Llama-3.1-70B-Instruct"
DRAFT: Final = "meta-llama/Llama-3.1-8B-Instruct"
LINES: Final = 20_000
SIZES: Final = (2_000, 6_000, LINES)
ROUNDS: Final = 3
OTHER_MODELS: Final = 2_000
"""Lines of which no two have the same config.json."""


def cases() -> Iterator[dict[str, Any]]:
    """Yield a sweep over the settings of a pair, in which every line has both config.json files."""
    target, draft = _config(TARGET), _config(DRAFT)
    number = 0
    while True:
        speculative = {
            "method": "draft_model",
            "model": DRAFT,
            "model_config": draft,
            "num_speculative_tokens": 1 + number % 8,
        }
        yield {
            "id": number,
            "vllm_version": "0.32",
            "gpu": PRODUCTS[number % 2],
            "tp": 2,
            "gpu_memory_utilization": (80 + number % 15) / 100,
            "max_model_len": 2048 + 16 * (number // 2 % 1000),
            "max_num_seqs": 16 + number % 509,
            "quantization": "fp8",
            "model": TARGET,
            "model_config": target,
            "speculative": speculative,
        }
        number += 1


def other_models() -> Iterator[dict[str, Any]]:
    """Yield the same cases, each of a target that no other line has."""
    for case in cases():
        width = case["model_config"]["intermediate_size"] + 128 * case["id"]
        yield {**case, "model_config": {**case["model_config"], "intermediate_size": width}}


def figures() -> Iterator[Figure]:
    """Yield lines a second of CPU time, start included, how that grows, and the memory of the longest file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {size: _write(folder / f"{size}.jsonl", cases(), size) for size in SIZES}
        start_s = min(run_command("--version").cpu_s for _ in range(ROUNDS))
        runs = {
            size: min((_run(file) for file in [files[size]] * ROUNDS), key=lambda used: used.cpu_s) for size in files
        }
        longest = runs[LINES]
        ready = estimates_per_second(NEW_REQUESTS)
        rate = LINES / longest.cpu_s
        size_mb = files[LINES].stat().st_size / 1e6
        remark = (
            f"{LINES:,} lines, {size_mb:.0f} MB, a process from start to end, best of {ROUNDS}; "
            f"{100 * rate / ready:.0f} % of the {ready:,.0f} of geometry that is there, same run"
        )
        yield Figure("lines of plan --batch", rate, "1/s of CPU", at_least(25_000), remark)
        yield Figure("lines of plan --batch, memory", longest.memory_mib, "MiB", at_most(250), f"{LINES:,} lines")
        yield growth("lines of plan --batch", "s", {size: used.cpu_s - start_s for size, used in runs.items()})
        differing = _run(_write(folder / "models.jsonl", other_models(), OTHER_MODELS))
        remark = f"{OTHER_MODELS:,} lines, no target twice; {differing.memory_mib:.0f} MiB"
        yield Figure(
            "lines of plan --batch, all targets differ", OTHER_MODELS / differing.cpu_s, "1/s of CPU", None, remark
        )


def _config(model: str) -> dict[str, Any]:
    entry = find_entry(model)
    if entry is None:
        raise LookupError(model)
    return dict(entry.config)


def _write(file: Path, of: Iterator[dict[str, Any]], count: int) -> Path:
    file.write_text("".join(json.dumps(case) + "\n" for case in islice(of, count)), encoding="utf-8")
    return file


def _run(file: Path) -> Used:
    return run_command("plan", "--batch", str(file), "--out", str(file.with_suffix(".out")), "--strict")
