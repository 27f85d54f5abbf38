"""Estimates beside those of AIConfigurator, in the same run, where it is installed.

python3.11 -m venv aic && aic/bin/pip install aiconfigurator==0.12.0     # 660 MB
AICONFIGURATOR_PYTHON=aic/bin/python ./just bench --only sizing.peers
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from bench.figures import Figure, peer
from bench.sizing.speed import PRODUCTS, a_device, a_pair
from specdecode_operator.sizing.memory.budget import estimate
from specdecode_operator.sizing.pair import without_speculation

VARIABLE: Final = "AICONFIGURATOR_PYTHON"
ESTIMATES: Final = 2000
WARM: Final = 50
SCRIPT: Final = f"""
import importlib.metadata, json, time
began = time.process_time()
from aiconfigurator_core.sdk.memory import estimate_kv_cache
def ask(requests):
    estimate_kv_cache("meta-llama/Meta-Llama-3.1-70B", "h200_sxm", "vllm", "current", max_num_tokens=8192,
        max_batch_size=requests, memory_fraction_kind="of_total", memory_fraction_value=0.92, tp_size=4)
imported = time.process_time()
ask(64)
first = time.process_time()
for number in range({WARM}):
    ask(65 + number)
warm = time.process_time()
print(json.dumps(dict(version=importlib.metadata.version("aiconfigurator"), import_s=imported - began,
    first_s=first - imported, estimate_s=(warm - first) / {WARM})))
"""
"""What the peer is asked: the KV cache of a 70B on four H200, warm, with other numbers of requests each time."""


def figures() -> Iterator[Figure]:
    """Yield estimates a second of a target without a draft, which is all that the peer sizes."""
    name = "estimates of a 70B without a draft"
    theirs = _asked()
    if theirs is None:
        yield Figure(name, None, remark=f"set {VARIABLE} to the Python of an environment with aiconfigurator 0.12.0")
        return
    source = f"AIConfigurator {theirs['version']}, same run, warm"
    remark = f"its import {theirs['import_s']:.1f} s, its first estimate {theirs['first_s']:.2f} s of CPU"
    yield Figure(name, _rate(), "1/s of CPU", peer(1 / theirs["estimate_s"], source), remark)


def _asked() -> dict[str, Any] | None:
    """Return what the peer takes, in CPU time; None where nobody says where it is."""
    python = os.environ.get(VARIABLE)
    if not python:
        return None
    printed = subprocess.run([python, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout  # noqa: S603
    asked: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return asked


def _rate() -> float:
    pair, device = without_speculation(a_pair()), a_device(PRODUCTS[1])
    questions = [replace(pair, limits=replace(pair.limits, max_num_seqs=64 + number)) for number in range(ESTIMATES)]
    began_s = time.process_time()
    for question in questions:
        estimate(question, device, 4)
    return ESTIMATES / (time.process_time() - began_s)
