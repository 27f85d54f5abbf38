"""A capture with several arms on a real vLLM: one engine after the other, and what each answers."""

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.api.capture_status import ArmVerdict
from specdecode_operator.capture.comparison.comparison_file import Arm, Comparison
from specdecode_operator.capture.files.formats import Checks
from specdecode_operator.capture.files.validate import validate_capture
from tests.engine.engine_process import QUIET, START_S, Engine
from tests.engine.recorder_server import AS_IN_PODS, NGRAM, Line
from tests.support.arm_pods import ArmPod, arm

# Starts of engines one after the other: too many for a run that is held to fifteen minutes.
pytestmark = pytest.mark.long

RECORD = {"tokenIds": False, "stepStats": True}
CHECKS = {"greedyPrompts": 3, "structuredRequests": 2}
REPETITIONS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 2, 32, 40, 96
VOCAB = 1024
NO_SPACES = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
"""A model of random weights may answer nothing else."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser=xlam")
"""A call is the JSON of its schema here. Others want a form of their own, to whose end random weights do not come."""

WORKLOAD = {
    "prompts": {"synthetic": {"promptTokens": PROMPT_TOKENS, "outputTokens": OUTPUT_TOKENS}},
    "phases": [{"name": "closed", "pattern": "Closed", "concurrency": 2, "requests": REQUESTS}],
    "warmupRequests": 4,
}


def real_arm(engine: Engine, target: Path, bundle: Path, port: int, *options: str) -> Line:
    """Return how vLLM is an arm's engine."""
    command = [str(engine.python), "-m", "vllm.entrypoints.cli.main", "serve", str(target), "--host=127.0.0.1"]
    command += [f"--port={port}", "--served-model-name=tiny", "--enforce-eager", "--max-model-len=512"]
    command += ["--max-num-seqs=8", "--enable-logging-iteration-details", f"--structured-outputs-config={NO_SPACES}"]
    command += [f"--chat-template={TEMPLATE}", *options]
    path = os.pathsep.join(str(each) for each in (bundle, engine.packages) if each)
    env = QUIET | AS_IN_PODS | {"PYTHONPATH": path}
    address = {"url": f"http://127.0.0.1:{port}", "model": "tiny", "max_model_len": 512, "vocab_size": VOCAB}
    return {"command": command, "env": env, "engine": address, "start_seconds": START_S}


def speculating(config: Line) -> str:
    return f"--speculative-config={json.dumps(config)}"


@dataclass(frozen=True)
class Measured:
    """A capture that is published, and what its arms come to."""

    pod: ArmPod
    comparison: Comparison

    def arm(self, name: str) -> Arm:
        return next(each for each in self.comparison.arms if each.name == name)

    def checks(self, name: str) -> Checks:
        folder = self.pod.volume / f"team/demo/{name}/1"
        return msgspec.json.decode((folder / "checks.json").read_bytes(), type=Checks)


@pytest.fixture(scope="module")
def measured(engine: Engine, heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A model that repeats itself: without speculation, with lookup, and with a draft that never agrees."""
    root, port = tmp_path_factory.mktemp("arms"), free_ports(1)[0]
    real = partial(real_arm, engine, heads / "target", root / "uid-1" / "bundle", port)
    stranger = {"method": "draft_model", "model": str(heads / "stranger"), "num_speculative_tokens": 5}
    arms = {
        "off": real(*TOOLS),
        "ngram": real(speculating(NGRAM), *TOOLS),
        "stranger": real(speculating(stranger)),
    }
    pod = ArmPod(
        root,
        arms=[arm(name, port, **found) for name, found in arms.items()],
        record=RECORD,
        checks=CHECKS,
        workload=WORKLOAD,
        repetitions=REPETITIONS,
        deadline_seconds=600,
    )
    with pod.containers():
        pod.job.run()
    comparison = pod.job.compare()
    assert comparison is not None
    return Measured(pod, comparison)


def test_draft_that_is_never_accepted_does_not_pay(measured: Measured) -> None:
    stranger = measured.arm("stranger")
    assert stranger.drafting is not None
    assert stranger.drafting.acceptance < 0.02
    (load,) = stranger.loads
    assert load.compared is not None
    assert load.compared.high is not None
    assert load.compared.high < 1
    assert stranger.verdict == ArmVerdict.DOES_NOT_PAY, stranger.message


def test_ngram_goodput_ratio_has_a_confidence_interval(measured: Measured) -> None:
    """Most drafts are right, and yet it need not pay: what drafting adds is as long as a step of a tiny model."""
    ngram = measured.arm("ngram")
    assert ngram.drafting is not None
    assert ngram.drafting.acceptance > 0.5
    (load,) = ngram.loads
    assert load.compared is not None
    assert load.compared.ratio is not None
    assert load.compared.low is not None
    assert load.compared.high is not None
    assert load.compared.low < load.compared.ratio < load.compared.high


@pytest.mark.parametrize("name", ["ngram", "stranger"])
def test_greedy_answers_match_the_target(measured: Measured, name: str) -> None:
    outputs = measured.arm(name).outputs
    assert outputs is not None
    # A step that looks at drafts rounds otherwise: of two tokens that are equally likely it may take the other.
    assert outputs.outputs in {"Equal", "Explained"}
    assert outputs.prompts == 3


@pytest.mark.parametrize("name", ["off", "ngram", "stranger"])
def test_each_arm_has_its_own_engine_counters(measured: Measured, name: str) -> None:
    for repetition in range(1, REPETITIONS + 1):
        assert validate_capture(measured.pod.volume / f"team/demo/{name}/{repetition}").problems == []
        counters = measured.pod.manifest(name, repetition).engine_counters
        assert counters is not None
        assert counters.generation_tokens == REQUESTS * OUTPUT_TOKENS
        assert (counters.draft_tokens is None) == (name == "off")


@pytest.mark.parametrize("name", ["off", "ngram", "stranger"])
def test_structured_answers_parse_and_greedy_margins_are_recorded(measured: Measured, name: str) -> None:
    found = measured.checks(name)
    assert [len(each.tokens) for each in found.greedy.answers] == [OUTPUT_TOKENS] * 3
    assert all(margin is not None and margin >= 0 for each in found.greedy.answers for margin in each.top2_margin)
    assert (found.structured.asked, found.structured.parsed) == (2, 2)


@pytest.mark.parametrize("name", ["off", "ngram"])
def test_tool_calls_parse(measured: Measured, name: str) -> None:
    calls = measured.checks(name).tool_calls
    assert (calls.asked, calls.parsed, calls.not_measured) == (2, 2, None)


def test_missing_tool_call_parser_is_reported_as_not_measured(measured: Measured) -> None:
    not_measured = measured.checks("stranger").tool_calls.not_measured
    assert not_measured is not None
    assert "--tool-call-parser" in not_measured
