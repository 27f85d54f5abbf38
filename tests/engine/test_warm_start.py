"""Real engines: what one compiled is published, and the next of the same template looks for exactly that."""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.deployment.pod_scripts import warm_start
from tests.engine.engine_process import QUIET, START_S, Engine
from tests.support import plain_http
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
SAVED = re.compile(r"saved AOT compiled function to (\S+)")
FOUND = re.compile(r"(?:Directly load AOT compilation from path|load failure from) ([^\s,]+)")
"""On the CPU vLLM 0.32 finds what was saved, but cannot load it (it lacks finalize_loading) and compiles anew, from
Inductor's own cache. On GPUs it is loaded."""


def serve_once(engine: Engine, models: Path, folder: Path, name: str, pods: int = 1) -> str:
    """Start an engine as its pods' commands do it, wait until it counts, end it; return its logs.

    Pods have one rank each, and a cache of their own, at the same path in each start.
    """
    port, master = free_ports(2)
    url, logs = f"http://127.0.0.1:{port}/health", [folder / f"{name}-{rank}.log" for rank in range(pods)]
    quiet = QUIET | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1", "HOME": str(folder)}
    environment = os.environ | quiet | {"PYTHONPATH": str(engine.packages or "")}
    environment |= {"VLLM_ENABLE_STARTUP_PLAN": "1"} if pods == 1 else {"VLLM_HOST_IP": "127.0.0.1", **UNBOUND}
    script, started = Path(warm_start.__file__).read_text(), []
    speculation = {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": 3}
    for rank, log in enumerate(logs):
        command = [str(engine.python), "-c", script, f"--folder={folder / 'compiled'}", f"--health={url}"]
        command += [f"--cache={cache(folder, rank)}", f"--pods={pods}", f"--rank={rank}", "--leader=127.0.0.1", "--"]
        command += [str(engine.python), "-m", "vllm.entrypoints.cli.main", "serve", str(models / "target")]
        command += ["--host=127.0.0.1", f"--port={port}", "--max-model-len=512"]
        command += [
            "--max-num-seqs=4",
            "--max-num-batched-tokens=512",
            f"--speculative-config={json.dumps(speculation)}",
        ]
        if pods > 1:
            command += [f"--tensor-parallel-size={pods}", "--distributed-executor-backend=mp", f"--nnodes={pods}"]
            command += [f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={master}"]
            command += ["--headless"] if rank else []
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        started.append(process)
    try:
        eventually(
            lambda: all(_runs(*each) for each in zip(started, logs, strict=True)) and _serves(url), "it serves", START_S
        )
        eventually((folder / "compiled" / warm_start.PUBLISHED).exists, "its cache is published")
    finally:
        for process in started:
            _stop(process)
    return "".join(log.read_text() for log in logs)


def cache(folder: Path, rank: int) -> Path:
    return folder / f"cache-{rank}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _runs(process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        message = f"vLLM ended with {process.returncode}:\n{log.read_text()[-4000:]}"
        raise RuntimeError(message)
    return True


def _serves(url: str) -> bool:
    try:
        return plain_http.get(url, timeout=60).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("pods", [1, 2])
def test_second_engine_finds_the_published_compile_cache(engine: Engine, tmp_path: Path, pods: int) -> None:
    engine.run(str(ROOT / "examples/tiny_pair.py"), "--out", str(tmp_path / "models"))
    (tmp_path / "compiled").mkdir()
    first = serve_once(engine, tmp_path / "models", tmp_path, "first", pods)
    saved, published = set(SAVED.findall(first)), tmp_path / "compiled" / warm_start.PUBLISHED
    assert len(saved) == pods * len(("target", "draft")), "each rank was to compile both"
    caches = {cache(tmp_path, rank): published / str(rank) if pods > 1 else published for rank in range(pods)}
    copies = [
        copy / Path(path).relative_to(own)
        for path in saved
        for own, copy in caches.items()
        if own in Path(path).parents
    ]
    stamps = [copy.stat().st_mtime_ns for copy in copies]
    # Other pods: only what was published is there.
    for own in caches:
        shutil.rmtree(own)
    second = serve_once(engine, tmp_path / "models", tmp_path, "second", pods)
    assert set(FOUND.findall(second)) == saved
    assert [copy.stat().st_mtime_ns for copy in copies] == stamps, "whatever it writes, it writes into its own copy"
