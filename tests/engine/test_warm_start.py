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
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SAVED = re.compile(r"saved AOT compiled function to (\S+)")
FOUND = re.compile(r"(?:Directly load AOT compilation from path|load failure from) ([^\s,]+)")
"""On the CPU vLLM 0.32 finds what was saved, but cannot load it (it lacks finalize_loading) and compiles anew, from
Inductor's own cache. On GPUs it is loaded."""


def serve_once(engine: Engine, models: Path, folder: Path, name: str) -> str:
    """Start an engine as its pod's command does, wait until it counts, end it; return its log."""
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}/health", folder / f"{name}.log"
    script = Path(warm_start.__file__).read_text()
    speculation = {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": 3}
    command = [str(engine.python), "-c", script, f"--folder={folder / 'compiled'}", f"--cache={folder / 'cache'}"]
    command += [f"--health={url}", "--"]
    command += [str(engine.python), "-m", "vllm.entrypoints.cli.main", "serve", str(models / "target")]
    command += ["--host=127.0.0.1", f"--port={port}", "--max-model-len=512"]
    command += ["--max-num-seqs=4", "--max-num-batched-tokens=512", f"--speculative-config={json.dumps(speculation)}"]
    quiet = QUIET | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1", "HOME": str(folder)}
    environment = os.environ | quiet | {"PYTHONPATH": str(engine.packages or ""), "VLLM_ENABLE_STARTUP_PLAN": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        eventually(lambda: _serves(process, url, log), "the engine serves", START_S)
        eventually((folder / "compiled" / warm_start.PUBLISHED).exists, "its cache is published")
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return log.read_text()


def _serves(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    if process.poll() is not None:
        message = f"vLLM ended with {process.returncode}:\n{log.read_text()[-4000:]}"
        raise RuntimeError(message)
    try:
        return httpx.get(url, trust_env=False, timeout=60).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def test_second_engine_finds_the_published_compile_cache(engine: Engine, tmp_path: Path) -> None:
    engine.run(str(ROOT / "examples/tiny_pair.py"), "--out", str(tmp_path / "models"))
    (tmp_path / "compiled").mkdir()
    first = serve_once(engine, tmp_path / "models", tmp_path, "first")
    saved, published = set(SAVED.findall(first)), tmp_path / "compiled" / warm_start.PUBLISHED
    assert len(saved) == len(("target", "draft")), "the engine was to compile both"
    copies = [published / Path(path).relative_to(tmp_path / "cache") for path in saved]
    stamps = [copy.stat().st_mtime_ns for copy in copies]
    # Another pod: only what was published is there.
    shutil.rmtree(tmp_path / "cache")
    second = serve_once(engine, tmp_path / "models", tmp_path, "second")
    assert set(FOUND.findall(second)) == saved
    assert [copy.stat().st_mtime_ns for copy in copies] == stamps, "whatever it writes, it writes into its own copy"
