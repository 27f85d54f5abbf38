"""A capture with several arms on a real vLLM: one engine after the other, and what each answers."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.comparison.result import Comparison
from specdecode_operator.capture.files.checks import Checks
from specdecode_operator.capture.validation.validate import validate_capture
from tests.engine.engine_process import QUIET, Engine
from tests.engine.recorder_server import NGRAM, Line
from tests.support.arm_pods import ArmPod, arm, free_port

# Four starts of an engine are a ninth of the run that is held to fifteen minutes.
pytestmark = pytest.mark.long

RECORD = {"tokenIds": False, "stepStats": True}
CHECKS = {"greedyPrompts": 3, "structuredRequests": 2}
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 160
VOCAB = 1024
NO_SPACES = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
"""A model of random weights may answer nothing else."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def workload(requests: int) -> Line:
    synthetic = {"promptTokens": PROMPT_TOKENS, "outputTokens": OUTPUT_TOKENS}
    phases = [{"name": "closed", "pattern": "Closed", "concurrency": 2, "requests": requests}]
    return {"prompts": {"synthetic": synthetic}, "phases": phases, "warmupRequests": 4}


def real_arm(engine: Engine, target: Path, bundle: Path, port: int, speculation: Line | None) -> Line:
    """Return how vLLM is an arm's engine."""
    command = [str(engine.python), "-m", "vllm.entrypoints.cli.main", "serve", str(target), "--host=127.0.0.1"]
    command += [f"--port={port}", "--served-model-name=tiny", "--enforce-eager", "--max-model-len=512"]
    command += ["--max-num-seqs=8", "--enable-logging-iteration-details", f"--structured-outputs-config={NO_SPACES}"]
    command += [f"--chat-template={TEMPLATE}"]
    command += [f"--speculative-config={json.dumps(speculation)}"] if speculation else []
    path = os.pathsep.join(str(each) for each in (bundle, engine.packages) if each)
    env = QUIET | {"PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    address = {"url": f"http://127.0.0.1:{port}", "model": "tiny", "max_model_len": 512, "vocab_size": VOCAB}
    return {"command": command, "env": env, "engine": address, "start_seconds": 400}


def measure(
    engine: Engine,
    target: Path,
    root: Path,
    speculation: dict[str, Line | None],
    **changes: Any,
) -> tuple[ArmPod, Comparison]:
    """Return the pod of a capture that is published, and what its arms come to."""
    port = free_port()
    bundle = root / "uid-1" / "bundle"
    arms = [arm(name, port, **real_arm(engine, target, bundle, port, config)) for name, config in speculation.items()]
    pod = ArmPod(root, **{"arms": arms, "record": RECORD, "deadline_seconds": 600, "checks": CHECKS, **changes})
    with pod.containers():
        pod.job.run()
    comparison = pod.job.compare()
    assert comparison is not None
    return pod, comparison


def checks(pod: ArmPod, name: str) -> Checks:
    return msgspec.json.decode((pod.volume / f"team/demo/{name}/1/checks.json").read_bytes(), type=Checks)


def test_lookup_answers_what_the_target_answers(engine: Engine, heads: Path, tmp_path: Path) -> None:
    """Both arms have counters of their own, their greedy answers agree token for token, and forms are whole."""
    arms = {"off": None, "ngram": NGRAM}
    pod, comparison = measure(engine, heads / "target", tmp_path, arms, repetitions=1, workload=workload(12))
    assert pod.published() == ["ngram/1", "off/1"]
    for name in arms:
        assert validate_capture(pod.volume / f"team/demo/{name}/1").problems == []
        counters = pod.manifest(name, 1).engine_counters
        assert counters is not None
        assert counters.generation_tokens == 12 * OUTPUT_TOKENS
        assert (counters.draft_tokens is not None) == (name == "ngram")
        found = checks(pod, name)
        assert [len(each.tokens) for each in found.greedy.answers] == [128] * 3
        assert all(margin is not None and margin >= 0 for each in found.greedy.answers for margin in each.top2_margin)
        assert (found.structured.asked, found.structured.parsed) == (2, 2)
        assert found.tool_calls.not_measured is not None
        assert "--tool-call-parser" in found.tool_calls.not_measured
    _, ngram = comparison.arms
    assert ngram.drafting is not None
    assert ngram.drafting.acceptance > 0.5
    assert ngram.outputs is not None
    assert (ngram.outputs.outputs, ngram.outputs.prompts, ngram.outputs.equal) == ("Equal", 3, 3)
