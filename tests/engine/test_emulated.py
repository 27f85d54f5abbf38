"""vLLM's own server, scheduler and caches, with a fitted model in the place of its GPUs."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_operator.cli.input_files import InputOptions, read_ours
from specdecode_operator.cli.plan.answers import ask
from specdecode_operator.replay.emulated.batch import Lateness
from specdecode_operator.vllm.engine_metrics import read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.engine.emulated_server import DENSE, HYBRID, HYBRID_BLOCKS, RATES, REQUEST_US, STEP_MS, Emulated
from tests.support import plain_http
from tests.support.waiting import eventually

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def both(emulated_begun: tuple[Emulated, Emulated]) -> tuple[Emulated, Emulated]:
    for server in emulated_begun:
        server.wait_until_healthy()
    return emulated_begun


@pytest.fixture
def emulated(both: tuple[Emulated, Emulated]) -> Emulated:
    return both[0]


def _complete(server: Emulated, **body: Any) -> httpx.Response:
    given = {"model": server_model(server), "ignore_eos": True} | body
    return plain_http.post(f"{server.url}/v1/completions", json=given, timeout=120)


def server_model(server: Emulated) -> str:
    models = plain_http.get(f"{server.url}/v1/models", timeout=120).json()
    return str(models["data"][0]["id"])


def _planned(path: Path) -> Any:
    answers = ask(read_ours([str(path)]), InputOptions())
    return answers.answers[0].candidates[0].budget


def test_emulated_kv_cache_equals_the_plan(emulated: Emulated) -> None:
    budget = _planned(DENSE)
    told = emulated.cache_config()
    assert int(told["num_gpu_blocks"]) == budget.num_blocks
    assert int(told["kv_cache_size_tokens"]) == budget.kv_cache_tokens
    assert float(told["kv_cache_max_concurrency"]) == pytest.approx(budget.max_concurrency)


def test_responses_are_counted_by_their_status(emulated: Emulated) -> None:
    assert _complete(emulated, prompt="a", max_tokens=1).status_code == httpx.codes.OK
    assert _complete(emulated, prompt="a", max_tokens=1, model="unknown").status_code == httpx.codes.NOT_FOUND
    page = plain_http.get(f"{emulated.url}/metrics", timeout=120).text
    assert read_metrics(page, find_profile("0.32")).server_errors == 0, "None if vLLM does not count responses"


def test_acceptance_per_position_follows_the_model(emulated: Emulated) -> None:
    before = emulated.counters()
    with ThreadPoolExecutor(16) as pool:
        prompts = [[300 + index] * 20 for index in range(16)]
        answers = list(pool.map(lambda prompt: _complete(emulated, prompt=prompt, max_tokens=300).json(), prompts))
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {300}

    def moved() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in emulated.counters().items()}

    eventually(lambda: moved()["vllm:generation_tokens_total"] == 16 * 300, "all tokens are counted")
    counted = moved()
    drafts = counted["vllm:spec_decode_num_drafts_total"]
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == 5 * drafts
    for position, rate in enumerate(RATES):
        accepted = counted[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{position}]"]
        # Four standard errors.
        assert accepted / drafts == pytest.approx(rate, abs=4 * (rate * (1 - rate) / drafts) ** 0.5)


def test_steps_take_the_modelled_time_without_overlap(emulated: Emulated) -> None:
    before = len(emulated.steps)
    # Long enough that the last of the eight has begun before the first ends, also on a busy machine.
    _complete(emulated, prompt=[[400 + index] * 8 for index in range(8)], max_tokens=1000)
    steps = emulated.steps[before:]
    assert max(step["requests"] for step in steps) == 8
    for step in steps:
        modelled_s = 1e-3 * STEP_MS + 1e-6 * REQUEST_US * step["requests"]
        assert step["ends"] - step["begins"] == pytest.approx(modelled_s, abs=1e-9)
        assert step["delivered"] >= step["ends"]
    assert all(later["begins"] >= earlier["ends"] for earlier, later in pairwise(steps))


def test_repeated_prompt_hits_the_prefix_cache(emulated: Emulated) -> None:
    prompt = [500 + index % 400 for index in range(1000)]
    _complete(emulated, prompt=prompt, max_tokens=1)
    before = emulated.counters()["vllm:prefix_cache_hits_total"]
    _complete(emulated, prompt=prompt, max_tokens=1)
    eventually(lambda: emulated.counters()["vllm:prefix_cache_hits_total"] - before == 992, "62 of its blocks are hit")


@pytest.mark.parametrize("streamed", [False, True])
def test_json_schema_output_is_valid_and_stops(emulated: Emulated, streamed: bool) -> None:
    body = {
        "model": server_model(emulated),
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 600,
        "stream": streamed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    }
    answer = plain_http.post(f"{emulated.url}/v1/chat/completions", json=body, timeout=120)
    if streamed:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        finish = choices[-1]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert finish == "stop"
    person = json.loads(text)
    assert {name: type(value) for name, value in person.items()} == {"name": str, "age": int, "tags": list}


@pytest.mark.parametrize(
    ("structured", "expected"),
    [({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[0-9]{3}-[a-f]{4}"}, "[0-9]{3}-[a-f]{4}")],
)
def test_choice_and_regex_outputs_match(emulated: Emulated, structured: Any, expected: str) -> None:
    body = {"prompt": "Say it.", "max_tokens": 60, "structured_outputs": structured, "ignore_eos": False}
    (choice,) = _complete(emulated, **body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(expected, choice["text"])


def test_logprobs_are_returned_and_prompt_logprobs_refused(emulated: Emulated) -> None:
    (choice,) = _complete(emulated, prompt="Hello", max_tokens=7, logprobs=3).json()["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 7
    assert all(
        len(each) == 4 and token in each for token, each in zip(found["tokens"], found["top_logprobs"], strict=True)
    )
    refused = _complete(emulated, prompt="Hello", max_tokens=7, prompt_logprobs=1)
    assert refused.status_code == 400
    assert "prompt_logprobs: an emulated engine does not return these" in refused.json()["error"]["message"]


def test_hybrid_model_has_the_planned_tokens_and_preempts(both: tuple[Emulated, Emulated], tmp_path: Path) -> None:
    """The plan's tokens for as many blocks; and what does not fit is preempted, and answered all the same."""
    hybrid = both[1]
    plan = tmp_path / "hybrid.yaml"
    plan.write_text(HYBRID)
    budget = _planned(plan)
    told = hybrid.cache_config()
    assert int(told["num_gpu_blocks"]) == HYBRID_BLOCKS
    assert int(told["kv_cache_size_tokens"]) == int(HYBRID_BLOCKS / budget.num_blocks * budget.max_concurrency * 8192)
    answer = _complete(hybrid, prompt=[[400 + index] * 500 for index in range(12)], max_tokens=400).json()
    assert answer["usage"]["completion_tokens"] == 12 * 400
    eventually(lambda: hybrid.counters()["vllm:num_preemptions_total"] > 0, "some were preempted")


def test_emulated_capture_is_marked_and_log_ends_with_lateness_verdict(emulated: Emulated) -> None:
    (emulated.folder / "segments" / "close").touch()
    eventually(lambda: emulated.segments[0][-1]["k"] == "closed", "the segment is closed")
    (segment,) = emulated.segments
    assert segment[0]["gpu"] == "emulated NVIDIA-H200"
    assert emulated.stop() == 0
    lateness = Lateness()
    for step in emulated.steps:
        lateness.add(step["ends"] - step["begins"], step["delivered"] - step["ends"] + step["idle_s"])
    assert emulated.log.splitlines()[-1] == lateness.verdict()
