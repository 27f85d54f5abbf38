"""The emulated engine in each version of vLLM that the operator starts: the same plugin, found out by looking."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.cli.input_files import InputOptions, read_ours
from specdecode_operator.cli.plan.answers import ask
from tests.engine import newest_package
from tests.engine.emulated_server import HYBRID, emulating
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import BESIDE, NEWEST, find_packages
from tests.support import plain_http

MODEL = "Qwen3-Next-80B-A3B-Instruct"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.long
@pytest.mark.parametrize("version", BESIDE)
def test_emulated_engine_of_each_version_matches_the_plan_and_serves(
    version: str, engine: Engine, tmp_path: Path
) -> None:
    packages = find_packages(version)
    if packages is None:
        pytest.skip(f"vLLM {version} is not installed here: ./just engine-versions")
    more = [found] if version == NEWEST and (found := newest_package.PACKAGE.find()) else []
    plan = tmp_path / "plan.yaml"
    plan.write_text(f'{HYBRID}  engine: {{version: "{version}"}}\n')
    budget: Any = ask(read_ours([str(plan)]), InputOptions()).answers[0].candidates[0].budget
    with emulating(engine.beside(packages, *more), tmp_path, plan) as server:
        server.wait_until_healthy()
        told = server.cache_config()
        assert int(told["num_gpu_blocks"]) == budget.num_blocks
        assert int(told["kv_cache_size_tokens"]) == budget.kv_cache_tokens

        def ask_for(**body: Any) -> Any:
            given = {"model": MODEL, "max_tokens": 200, **body}
            return plain_http.post(f"{server.url}/v1/completions", json=given, timeout=120).json()

        answered = ask_for(prompt=[[400, 401] * 20, [402] * 30], max_tokens=50, logprobs=2)
        assert answered["usage"]["completion_tokens"] == 100
        (structured,) = ask_for(prompt="Say it.", structured_outputs={"json": SCHEMA})["choices"]
        assert structured["finish_reason"] == "stop"
        assert isinstance(json.loads(structured["text"])["age"], int)
        counted = server.counters()
        assert counted["vllm:spec_decode_num_accepted_tokens_total"] > 0
        assert server.stop() == 0
    assert "steps, " in server.log.splitlines()[-1]
