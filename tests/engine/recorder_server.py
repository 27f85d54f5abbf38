"""A real vLLM that serves a tiny model on the CPU, with the recorder and the independent observer in it."""

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from devcluster.cluster.settings import free_ports
from specdecode_operator.vllm.logging_config import LOGGING_CONFIG_VARIABLE, WATCH, WATCH_FILE, logging_config
from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.engine import chunk_observer
from tests.engine.engine_process import QUIET, START_S, Engine
from tests.support import plain_http
from tests.support.waiting import eventually

STOP_S = 240
REPOSITORY = Path(__file__).parents[2]
TERMINATION_LOG = "termination-log"
"""In a server's folder: where an engine leaves its last words."""
# Several threads that wait for each other, on cores that others use too, take many times the CPU time of one.
AS_IN_PODS = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}

Line = dict[str, Any]
Chunks = dict[str, list[tuple[float, int]]]


@dataclass(frozen=True)
class Server:
    """A running engine."""

    url: str
    process: subprocess.Popen[bytes]
    segments_folder: Path
    observer_folder: Path
    log: Path

    def wait_until_healthy(self) -> None:
        """Return once it serves; fail where it ends."""
        eventually(lambda: _is_healthy(self), "the engine is healthy", START_S)

    def close_recording(self) -> None:
        """Order the recorder to close, and wait for its word."""
        (self.segments_folder / "close").touch()
        eventually(lambda: all(lines[-1]["k"] == "closed" for lines in self.segments()), "segments are closed")

    def segments(self) -> list[list[Line]]:
        """Return the lines of every segment; fail where one is not whole."""
        texts = [path.read_text() for path in sorted(self.segments_folder.glob("segment-*.jsonl"))]
        return [[json.loads(line) for line in text.splitlines()] for text in texts]

    def observed(self) -> Chunks:
        """Return what every request got, with its engine stamps, as seen inside the engines."""
        chunks: Chunks = {}
        for path in sorted(self.observer_folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                request_id, stamp_s, tokens, _ = json.loads(line)
                if tokens:
                    chunks.setdefault(request_id, []).append((stamp_s, tokens))
        return chunks

    def counters(self) -> Counter[str]:
        """Return the counters of /metrics, summed over engines; those by position carry it in their name."""
        found: Counter[str] = Counter()
        page = plain_http.get(f"{self.url}/metrics", timeout=120).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    position = sample.labels.get("position")
                    found[sample.name if position is None else f"{sample.name}[{position}]"] += int(sample.value)
        return found


@contextmanager
def serving(
    engine: Engine,
    models: Path,
    folder: Path,
    *options: str,
    speculation: Line | None = None,
    packages: Sequence[Path] = (),
    **environment: str,
) -> Iterator[Server]:
    """Start an engine, wait until it is healthy, and end it: see `starting`."""
    with starting(
        engine, models, folder, *options, speculation=speculation, packages=packages, **environment
    ) as server:
        server.wait_until_healthy()
        yield server


@contextmanager
def starting(
    engine: Engine,
    models: Path,
    folder: Path,
    *options: str,
    speculation: Line | None = None,
    packages: Sequence[Path] = (),
    **environment: str,
) -> Iterator[Server]:
    """Start an engine, with more packages if given, and end it; everything that it writes goes below a folder.

    Both plugins are in it. An empty SPECDECODE_RECORD_DIR or OBSERVER_DIR among the variables keeps one quiet.
    """
    plugins, segments, observed = folder / "plugins", folder / "segments", folder / "observed"
    for each in (plugins, segments, observed):
        each.mkdir(parents=True)
    RECORDER.write(plugins)
    _write_observer(plugins)
    (port,) = free_ports(1)
    log, logging, watch = folder / "vllm.log", folder / "logging.json", folder / WATCH_FILE
    watch.write_text(WATCH)
    logging.write_text(logging_config("INFO", str(folder / TERMINATION_LOG), str(watch), str(folder / "noted")))
    command: list[str | Path] = [
        engine.python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        models / "target",
        "--host=127.0.0.1",
    ]
    command += [f"--port={port}", "--served-model-name=tiny", "--enforce-eager", "--max-model-len=1024"]
    command += ["--max-num-seqs=16", "--enable-logging-iteration-details", *options]
    command += [f"--speculative-config={json.dumps(speculation or NGRAM)}"]
    variables = {
        "PYTHONPATH": os.pathsep.join(str(each) for each in (plugins, *packages, engine.packages) if each),
        "SPECDECODE_RECORD_DIR": str(segments),
        chunk_observer.FOLDER_VARIABLE: str(observed),
        **AS_IN_PODS,
        "VLLM_LOGGING_LEVEL": "INFO",
        LOGGING_CONFIG_VARIABLE: str(logging),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | QUIET | variables | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, segments, observed, log)
    try:
        yield server
    finally:
        _end(process)


def make_models(engine: Engine, folder: Path, noise: float = 0.1) -> Path:
    """Write the tiny target and its draft below a folder."""
    script = REPOSITORY / "examples" / "tiny_pair.py"
    engine.run(str(script), "--out", str(folder), "--agreement-noise", str(noise))
    return folder


def _write_observer(plugins: Path) -> None:
    shutil.copy(chunk_observer.__file__, plugins / "chunk_observer.py")
    info = plugins / "chunk_observer-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chunk-observer\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nchunk_observer = chunk_observer:register\n")


def _is_healthy(server: Server) -> bool:
    if server.process.poll() is not None:
        message = f"vLLM ended with {server.process.returncode}:\n{server.log.read_text()[-4000:]}"
        raise RuntimeError(message)
    try:
        return plain_http.get(f"{server.url}/health", timeout=60).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the engine and every process of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
