"""An engine without model and GPU, started as a user starts it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from devcluster.cluster.settings import free_ports
from tests.engine.engine_process import START_S, Engine
from tests.support import plain_http
from tests.support.waiting import eventually

STOP_S = 240

STEP_MS = 6.0
REQUEST_US = 20.0
RATES = (0.8, 0.6, 0.42, 0.3, 0.2)

DENSE = Path(__file__).parents[2] / "examples" / "llama-70b.yaml"
"""Full attention with a draft model, on two H200."""

HYBRID = """
apiVersion: specdecode.io/v1alpha1
kind: SpecDecodeDeployment
metadata: {name: hybrid}
spec:
  target: {model: Qwen/Qwen3-Next-80B-A3B-Instruct}
  speculation: {method: mtp, numSpeculativeTokens: 2}
  parallelism: {tensor: 2}
  accelerator: {products: [NVIDIA-H200]}
  serving: {maxModelLen: 8192, maxNumSeqs: 8}
"""
"""States beside attention, with a draft of its own."""

HYBRID_BLOCKS = 60
"""Room for one or two of the requests of its test, not for four of them."""

MODEL = {
    "schema": 1,
    "origin": {"model": "made-up", "gpu": "NVIDIA-H200", "tp": 2},
    "step_time": {"curve": [[1, STEP_MS]], "request_us": REQUEST_US, "ranges": {"requests": [1, 64]}},
    "acceptance": {
        "num_speculative_tokens": 5,
        "outcomes": [[5, accepted] for accepted in range(6)],
        "classes": [{"share": 1, "outcomes": [0.2, 0.2, 0.18, 0.12, 0.1, 0.2]}],
    },
}


@dataclass(frozen=True)
class Emulated:
    """A running one."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def segments(self) -> list[list[dict[str, Any]]]:
        texts = [path.read_text() for path in sorted((self.folder / "segments").glob("segment-*.jsonl"))]
        return [[json.loads(line) for line in text.splitlines()] for text in texts]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """All steps so far, as the executor wrote them down."""
        lines = (self.folder / "kept" / "engine" / "told" / "steps.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"it ended with {self.process.returncode}:\n{self.log[-4000:]}")
        try:
            return plain_http.get(f"{self.url}/health", timeout=60).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def wait_until_healthy(self) -> None:
        eventually(self.is_healthy, "the emulated engine is healthy", START_S)

    def metrics(self) -> list[Any]:
        text = plain_http.get(f"{self.url}/metrics", timeout=120).text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def counters(self) -> dict[str, float]:
        """Return the counters; those by position carry it in their name."""
        found: dict[str, float] = {}
        for sample in self.metrics():
            if sample.name.endswith("_total"):
                position = sample.labels.get("position")
                name = sample.name if position is None else f"{sample.name}[{position}]"
                found[name] = found.get(name, 0) + sample.value
        return found

    def cache_config(self) -> dict[str, str]:
        return next(dict(sample.labels) for sample in self.metrics() if sample.name == "vllm:cache_config_info")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextmanager
def emulating(
    engine: Engine,
    folder: Path,
    plan: Path,
    *options: str,
    model: dict[str, Any] | None = None,
    address: tuple[str, int] | None = None,
) -> Iterator[Emulated]:
    """Start one for a deployment, and end it; everything that it writes goes below a folder."""
    host, port = address or ("127.0.0.1", *free_ports(1))
    fitted = folder / "model.json"
    fitted.write_text(json.dumps(model or MODEL))
    command = [sys.executable, "-m", "specdecode_operator", "replay", "serve", "--mode", "emulated", str(fitted)]
    place = next(iter(engine.more), engine.packages) or engine.python
    command += ["--plan", str(plan), "--engine", str(place), "--host", host, "--port", str(port)]
    command += ["--keep", str(folder / "kept"), "--record", str(folder / "segments"), *options]
    others = (*engine.more[1:], engine.packages) if engine.more else ()
    borrowed = {"PYTHONPATH": os.pathsep.join(str(each) for each in others if each)} if others else {}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | borrowed, stdout=log, stderr=log)
    try:
        yield Emulated(f"http://{host}:{port}", process, folder)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def emulating_both(engine: Engine, folder: Path) -> Iterator[tuple[Emulated, Emulated]]:
    """Begin to start both beside each other."""
    plan = folder / "hybrid.yaml"
    plan.write_text(HYBRID)
    dense, hybrid = folder / "dense", folder / "hybrid"
    for each in (dense, hybrid):
        each.mkdir()
    blocks = f"--engine-arg=--num-gpu-blocks-override={HYBRID_BLOCKS}"
    with emulating(engine, dense, DENSE) as first, emulating(engine, hybrid, plan, blocks) as second:
        yield first, second
