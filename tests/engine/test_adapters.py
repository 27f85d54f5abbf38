"""A real vLLM with adapters and speculation, started with the arguments that the operator renders."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.vllm.arguments import ADAPTERS, ARGUMENTS
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import SERVED
from tests.engine.recorder_server import Server, serving
from tests.support.objects import Body, tiny_cpu

HERE = Path(__file__).parent
PROMPT, TOKENS = "The quick brown fox", 24
ANSWER_S = 600
RANKS = {"first": 8, "second": 12}


def arguments(folder: Path) -> list[str]:
    """Return the arguments for adapters of an engine, with the paths of this machine."""
    adapters: list[Body] = [{"name": name, "model": name, "rank": rank} for name, rank in RANKS.items()]
    spec = SpecDecodeDeploymentSpec.parse(
        tiny_cpu(adapters=adapters, adapterSlots={"gpu": 1}, engine={"version": SERVED, "image": "localhost/engine:1"})
    )
    facts = valid_facts(spec)
    settings = engine_settings(spec, facts.pair, 1)
    words: list[str] = []
    for each in ARGUMENTS:
        if each.field == ADAPTERS and (values := each.values(settings, facts.profile)) is not None:
            words += [each.flag, *(value.replace("/models/", f"{folder}/") for value in values)]
    return words


def answer(server: Server, model: str) -> str:
    """Return the most likely continuation of a prompt."""
    question: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    said = httpx.post(f"{server.url}/v1/completions", json=question, trust_env=False, timeout=ANSWER_S)
    assert said.status_code == httpx.codes.OK, said.text
    text: str = said.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("method", ["draft_model", pytest.param("ngram", marks=pytest.mark.long)])
def test_adapters_answer_by_name_with_speculation(engine: Engine, models: Path, tmp_path: Path, method: str) -> None:
    folder = tmp_path / "adapters"
    engine.run(str(HERE / "tiny_adapters.py"), str(folder))
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculation["model"] = str(models / "draft")
    else:
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with serving(engine, models, tmp_path / "server", *arguments(folder), speculation=speculation) as server:
        listed = httpx.get(f"{server.url}/v1/models", trust_env=False, timeout=ANSWER_S).json()["data"]
        assert {each["id"] for each in listed} == {"tiny", *RANKS}
        answers = {name: answer(server, name) for name in ("tiny", *RANKS)}
        assert len(set(answers.values())) == len(answers), answers
        assert {name: answer(server, name) for name in answers} == answers, "slots are used in turn"
        assert server.counters()["vllm:spec_decode_num_drafts_total"] > 0
