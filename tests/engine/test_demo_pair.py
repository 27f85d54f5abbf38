"""A real vLLM with the demo's pair: the draft saves most steps of the target, as its documents say."""

import json
from pathlib import Path
from typing import Any

import httpx
import yaml

from specdecode_operator.enums import Method
from tests.engine.engine_process import Engine
from tests.engine.recorder_server import REPOSITORY, serving
from tests.support import plain_http

EXAMPLES = REPOSITORY / "examples"
PROMPTS, TOKENS = ("The quick brown fox", "Speculative decoding is", "Once upon a time"), 64
ANSWER_S = 600


def make_pair(engine: Engine, folder: Path) -> None:
    """Write the demo's models as the Job does."""
    documents = yaml.safe_load_all((EXAMPLES / "tiny-models.yaml").read_text())
    (job,) = (each for each in documents if each["kind"] == "Job")
    containers = job["spec"]["template"]["spec"]["containers"]
    (arguments,) = (each["args"] for each in containers if each["name"] == "deep")
    options = [each for each in arguments if not each.startswith("--out=")]
    engine.run(str(EXAMPLES / "tiny_pair.py"), f"--out={folder}", *options)


def test_target_of_the_demo_takes_five_tokens_per_step(engine: Engine, tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_pair(engine, models)
    asked = yaml.safe_load((EXAMPLES / "tiny-cpu.yaml").read_text())["spec"]["speculation"]
    speculation = {
        "method": Method(asked["method"]).value,
        "model": str(models / "draft"),
        "num_speculative_tokens": asked["numSpeculativeTokens"],
    }
    with serving(engine, models, tmp_path / "server", speculation=speculation) as server:
        for prompt in PROMPTS:
            question: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            answer = plain_http.post(f"{server.url}/v1/completions", json=question, timeout=ANSWER_S)
            assert answer.status_code == httpx.codes.OK, json.dumps(answer.json())
        counters = server.counters()
    steps, accepted = (counters[f"vllm:spec_decode_num_{each}_total"] for each in ("drafts", "accepted_tokens"))
    assert 1 + accepted / steps > 5, "or the draft may not pay off"
