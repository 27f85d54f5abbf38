"""Canary answers of a real vLLM that speculates: right ones, and wrong ones that its verification lets through."""

from functools import partial
from pathlib import Path

import pytest

from specdecode_operator.capture.recorder.canary import (
    RIGHT,
    UNSUPPORTED,
    WRONG,
    Engine,
    Settings,
    Verdict,
    ask,
    judge,
)
from specdecode_operator.deployment.canaries import CLOSE_NATS, DEFAULT_PROMPTS
from specdecode_operator.vllm.engine_metrics import CanaryReading, read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.engine.engine_process import Engine as InstalledEngine
from tests.engine.engine_versions import SERVED
from tests.engine.recorder_server import Line, Server, serving
from tests.engine.wrong_verification import write_plugin
from tests.support import plain_http

SETTINGS = Settings(DEFAULT_PROMPTS, max_tokens=24, interval_s=600, model="tiny", margin_nats=CLOSE_NATS)
K = 3
TOLD = "HTTP 400: it is a test"
unrecorded = partial(serving, SPECDECODE_RECORD_DIR="", OBSERVER_DIR="")


def draft_model(models: Path, **more: object) -> Line:
    """Return a speculation of the tiny pair."""
    return {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": K, **more}


def verdicts(engine: Engine) -> list[Verdict]:
    """Ask every prompt."""
    return [judge(engine, SETTINGS, prompt) for prompt in SETTINGS.prompts]


def test_canary_answers_of_a_verifying_engine_are_right(adapted: Server) -> None:
    client, before = Engine(adapted.url), adapted.counters()
    assert client.is_healthy()
    assert [each.word for each in verdicts(client)] == [RIGHT] * len(DEFAULT_PROMPTS)
    counters = adapted.counters() - before
    checked = ask(client, SETTINGS, DEFAULT_PROMPTS[0])
    unknown = judge(client, Settings(("x",), 1, 1, "another", 1), "x")
    assert counters["vllm:spec_decode_num_draft_tokens_total"] > counters["vllm:spec_decode_num_accepted_tokens_total"]
    assert counters["vllm:generation_tokens_total"] == len(DEFAULT_PROMPTS) * (SETTINGS.max_tokens + 1)
    assert len(checked.tokens) == SETTINGS.max_tokens
    assert unknown.word == UNSUPPORTED
    assert "HTTP 404" in unknown.details


def test_canary_answers_of_an_engine_that_accepts_rejected_drafts_are_wrong(
    engine: InstalledEngine, models: Path, tmp_path: Path
) -> None:
    plugins = [write_plugin(tmp_path / "wrong"), _write_teller(tmp_path / "teller")]
    speculation = draft_model(models)
    with unrecorded(engine, models, tmp_path, speculation=speculation, packages=plugins) as server:
        found = verdicts(Engine(server.url))
        counters = server.counters()
        page = plain_http.get(f"{server.url}/metrics").text
    assert counters["vllm:spec_decode_num_draft_tokens_total"] == counters["vllm:spec_decode_num_accepted_tokens_total"]
    assert [each.word for each in found] == [WRONG] * len(DEFAULT_PROMPTS), found
    told = read_metrics(page, find_profile(SERVED)).canaries
    assert told == CanaryReading(unsupported=TOLD), "the engine publishes what the recorder's module is told"


@pytest.mark.long
def test_canary_is_unsupported_without_prompt_logprobs_or_api_key(
    engine: InstalledEngine, models: Path, tmp_path: Path
) -> None:
    options = ("--max-logprobs=0", "--api-key=secret")
    with unrecorded(engine, models, tmp_path, *options, speculation=draft_model(models)) as server:
        found = judge(Engine(server.url, "secret"), SETTINGS, DEFAULT_PROMPTS[0])
        stranger = judge(Engine(server.url), SETTINGS, DEFAULT_PROMPTS[0])
    assert (found.word, stranger.word) == (UNSUPPORTED, UNSUPPORTED)
    assert "prompt logprobs" in found.details
    assert "401" in stranger.details


def _write_teller(folder: Path) -> Path:
    """Write a plugin that tells a verdict in each process of vLLM, as the recorder does in those with an API server."""
    info = folder / "teller-0.0.dist-info"
    info.mkdir(parents=True)
    verdict = {"prompt": "0" * 8, "verdict": UNSUPPORTED, "reason": TOLD}
    publish = f"from specdecode_recorder.canary_metrics import publish\n\ndef register():\n    publish({verdict!r})\n"
    (folder / "teller.py").write_text(publish)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: teller\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nteller = teller:register\n")
    return folder
