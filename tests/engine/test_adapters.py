"""Adapters and speculation of a real vLLM, started with rendered arguments."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.adapted_server import RANKS, serving_adapters
from tests.engine.engine_process import Engine
from tests.engine.recorder_server import Line, Server
from tests.support import plain_http

PROMPT, TOKENS = "The quick brown fox", 24
ANSWER_S = 600
NGRAM: Line = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def answer(server: Server, model: str) -> str:
    """Return the most likely continuation of a prompt."""
    question: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    said = plain_http.post(f"{server.url}/v1/completions", json=question, timeout=ANSWER_S)
    assert said.status_code == httpx.codes.OK, said.text
    text: str = said.json()["choices"][0]["text"]
    return text


def assert_adapters_answer_by_name(server: Server) -> None:
    drafts = server.counters()["vllm:spec_decode_num_drafts_total"]
    listed = plain_http.get(f"{server.url}/v1/models", timeout=ANSWER_S).json()["data"]
    assert {each["id"] for each in listed} == {"tiny", *RANKS}
    answers = {name: answer(server, name) for name in ("tiny", *RANKS)}
    assert len(set(answers.values())) == len(answers), answers
    assert {name: answer(server, name) for name in answers} == answers, "slots are used in turn"
    assert server.counters()["vllm:spec_decode_num_drafts_total"] > drafts


def test_adapters_answer_by_name_with_a_draft_model(adapted: Server) -> None:
    assert_adapters_answer_by_name(adapted)


@pytest.mark.long
def test_adapters_answer_by_name_with_ngram(engine: Engine, models: Path, tmp_path: Path) -> None:
    with serving_adapters(engine, models, tmp_path, NGRAM) as server:
        assert_adapters_answer_by_name(server)
