"""Clients that others wrote, against a replay: they see what was recorded, to the token."""

import json
from pathlib import Path

import pytest

from specdecode_operator.capture.trace_reader import RecordedRequest, read_recording
from tests.engine import guidellm_package
from tests.engine.engine_process import Engine
from tests.engine.recorder_server import make_models
from tests.support.code_blocks import blocks
from tests.support.replay_process import replaying
from tests.support.synthetic import Truth

K = 4
KINDS = ("stream", "whole", "chat-stream", "chat-whole")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen requests, whose ids say how each is asked for."""
    folder = tmp_path_factory.mktemp("clients") / "made"
    Truth().make(folder, "constant:100", 16)
    path = folder / "trace.jsonl"
    header, *records = [json.loads(line) for line in path.read_text().splitlines()]
    for place, each in enumerate(records):
        each["request_id"] = f"{place}-{KINDS[place % len(KINDS)]}"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *records)))
    return path


def test_openai_client_receives_the_recorded_tokens(engine: Engine, trace: Path) -> None:
    recorded: dict[str, RecordedRequest] = {each.request_id or "": each for each in read_recording(trace).requests}
    with replaying(trace, "--match", "request-id", "--unmatched", "refuse", "--api-key", "secret") as url:
        asked = {
            "url": url,
            "api_key": "secret",
            "requests": [[name, each.output_tokens] for name, each in recorded.items()],
        }
        found = json.loads(engine.run("-m", "ask_with_openai", text_in=json.dumps(asked)))
    assert found["models"] == ["trace"]
    for name, each in recorded.items():
        answer = found["answers"][name]
        assert answer["usage"] == sum(answer["bursts"]) == each.output_tokens
        assert answer["finish"] == "length"
        if "stream" in name:
            assert answer["bursts"] == list(each.chunk_tokens)


def test_documented_client_prints_usage(engine: Engine, trace: Path) -> None:
    (block,) = (each for each in blocks() if each.language == "python")
    with replaying(trace) as url:
        printed = engine.run("-c", block.text.replace("http://localhost:8000", url).replace('"synthetic"', '"trace"'))
    assert "completion_tokens=64" in printed


@pytest.fixture(scope="module")
def tokenizer(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(engine, tmp_path_factory.mktemp("models")) / "target"


@pytest.mark.long
def test_vllm_bench_measures_recorded_tokens_and_acceptance(
    engine: Engine, trace: Path, tokenizer: Path, tmp_path: Path
) -> None:
    with replaying(trace) as url:
        engine.run(
            *("-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend=openai", f"--base-url={url}"),
            *("--model=trace", f"--tokenizer={tokenizer}", "--dataset-name=random", "--random-input-len=64"),
            *("--random-output-len=100", "--ignore-eos", "--num-prompts=16", "--request-rate=20"),
            *("--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json"),
        )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    recorded = read_recording(trace).requests
    assert (found["completed"], found["failed"]) == (16, 0)
    assert found["total_output_tokens"] == sum(each.output_tokens for each in recorded)
    accepted = sum(each.output_tokens - len(each.chunk_tokens) for each in recorded)
    drafted = K * sum(len(each.gaps_ms) for each in recorded)
    assert found["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / drafted, abs=2)


@pytest.mark.long
def test_guidellm_measures_recorded_tokens_and_bursts(
    engine: Engine, trace: Path, tokenizer: Path, tmp_path: Path
) -> None:
    package = guidellm_package.PACKAGE.find()
    if package is None:
        pytest.skip("guidellm is not there: `.venv/bin/python -m tests.engine.guidellm_package` installs it")
    with replaying(trace) as url:
        engine.beside(package).run(
            *("-m", "guidellm", "run", "--disable-console", "--profile=kind=constant,rate=20"),
            *(f"--backend=kind=openai_http,target={url},model=trace", "--constraint=kind=max_requests,count=16"),
            *(f"--tokenizer=kind=hf_auto,model={tokenizer}", f"--output=kind=json,path={tmp_path / 'found.json'}"),
            "--data=kind=synthetic_text,prompt_tokens=64,output_tokens=100",
        )
    [benchmark] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    recorded = read_recording(trace).requests
    assert [each["output_tokens"] for each in requests] == [each.output_tokens for each in recorded]
    bursts = sorted(each.output_tokens / len(each.chunk_tokens) for each in recorded)
    assert sorted(each["output_tokens_per_iteration"] for each in requests) == pytest.approx(bursts)
