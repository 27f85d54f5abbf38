"""Exported captures, as the tools that they are for read them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.export import ExportFormat, export_capture, held_out_file
from specdecode_operator.capture.files.training_rows import Split
from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.cli.capture.export import tokenizer_at
from tests.engine import export_packages, guidellm_package
from tests.engine.engine_process import DEADLINE_S, Engine
from tests.engine.recorder_server import Server, make_models
from tests.support import plain_http
from tests.support.replay_process import replaying
from tests.support.synthetic import Truth
from tests.support.traces import META, record, write_trace

BLOCK_TOKENS = 16
ARRIVALS_MS = (20.0, 45.5, 1020.25)
LENGTHS = (40, 32, 600)


@pytest.fixture(scope="module")
def tokenizer(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(engine, tmp_path_factory.mktemp("models")) / "target"


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three requests that share a prefix of 32 tokens."""
    folder = tmp_path_factory.mktemp("capture")
    hashes = ([1, 2], [1, 2], [1, 2, *range(100, 135)])
    records = [
        record(arrival_ms=at_ms, prompt_tokens=length, block_hashes=each, temperature=0.5)
        for at_ms, length, each in zip(ARRIVALS_MS, LENGTHS, hashes, strict=True)
    ]
    write_trace(folder / "trace.jsonl", records, {**META, "block_size": BLOCK_TOKENS})
    return folder


def exported(capture: Path, out: Path, form: ExportFormat) -> Path:
    file = out / f"{form}.jsonl"
    export_capture(capture, form, file)
    return file


def read(engine: Engine, tool: str, file: Path, block_tokens: int, tokenizer: Path) -> Any:
    answer = engine.run("-m", "read_exports", tool, str(file), str(block_tokens), str(tokenizer))
    return json.loads(answer.splitlines()[-1])


@pytest.fixture(scope="module")
def tools(engine: Engine) -> Engine:
    """Return vLLM's environment with the other tools."""
    found = [each.find() for each in (export_packages.PACKAGE, guidellm_package.PACKAGE)]
    if None in found:
        pytest.skip("guidellm, aiperf and speculators are not there: ./just engine-versions installs them")
    return engine.beside(*(each for each in found if each is not None))


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    return next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def check(requests: Any, *, in_s: bool) -> None:
    """Check times, lengths and shared prefixes as a reader understood them."""
    scale = 1000 if in_s else 1
    assert [each[0] for each in requests] == pytest.approx([(at - ARRIVALS_MS[0]) / scale for at in ARRIVALS_MS])
    assert [each[1] for each in requests] == list(LENGTHS)
    assert [each[2] for each in requests] == [6, 6, 6]


def test_vllm_bench_reads_times_lengths_and_prefixes(
    engine: Engine, capture: Path, tokenizer: Path, tmp_path: Path
) -> None:
    file = exported(capture, tmp_path, ExportFormat.VLLM_BENCH)
    requests = read(engine, "vllm_bench", file, BLOCK_TOKENS, tokenizer)
    check(requests, in_s=True)
    one, two, three = (each[3] for each in requests)
    assert [len(each) for each in (one, two, three)] == list(LENGTHS)
    assert one[:32] == two == three[:32]
    assert common(one, three) == 32


@pytest.mark.long
@pytest.mark.parametrize(("form", "block_tokens"), [("aiperf", BLOCK_TOKENS), ("mooncake", 512)])
def test_aiperf_reads_times_lengths_prefixes_and_temperatures(
    tools: Engine, capture: Path, tokenizer: Path, tmp_path: Path, form: str, block_tokens: int
) -> None:
    file = exported(capture, tmp_path, ExportFormat(form))
    requests = read(tools, "aiperf", file, block_tokens, tokenizer)
    if form == "mooncake":
        assert [each[0] for each in requests] == [0, 26, 1000]
        assert [each[1:3] for each in requests] == [[length, 6] for length in LENGTHS]
        return
    check(requests, in_s=False)
    assert [each[4] for each in requests] == [{"temperature": 0.5}] * 3
    one, two, three = (each[3] for each in requests)
    assert one[:32] == two == three[:32]
    assert one[32:] != three[32:40]


@pytest.mark.long
@pytest.mark.parametrize("form", ["guidellm", "mooncake"])
def test_guidellm_reads_lengths_and_prefixes(
    tools: Engine, capture: Path, tokenizer: Path, tmp_path: Path, form: str
) -> None:
    file = exported(capture, tmp_path, ExportFormat(form))
    requests = read(tools, "guidellm", file, BLOCK_TOKENS if form == "guidellm" else 512, tokenizer)
    if form == "mooncake":
        assert [each[1] for each in requests] == list(LENGTHS)
        return
    check(requests, in_s=True)
    one, two, three = (each[3] for each in requests)
    assert one.startswith(two)
    assert three.startswith(two)
    assert not three.startswith(one)


@pytest.mark.long
def test_speculators_reads_tokens_and_loss_mask(tools: Engine, tokenizer: Path, tmp_path: Path) -> None:
    records = [
        record(prompt_tokens=3, prompt_token_ids=[1, 2, 3], output_token_ids=[number, 5, 6, 7, 8, 9])
        for number in (40, 41)
    ]
    write_trace(tmp_path / "trace.jsonl", records, META)
    file = exported(tmp_path, tmp_path, ExportFormat.SPECULATORS)
    rows = read(tools, "speculators", file, BLOCK_TOKENS, tokenizer)
    assert rows == [
        {"input_ids": [1, 2, 3, number, 5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 1]} for number in (40, 41)
    ]


@pytest.mark.long
def test_speculators_reads_both_sides_of_a_split(tools: Engine, tokenizer: Path, tmp_path: Path) -> None:
    prompts = [[1, 2, number] for number in range(40)]
    records = [record(prompt_tokens=3, prompt_token_ids=each, output_token_ids=[4, 5, 6, 7, 8, 9]) for each in prompts]
    write_trace(tmp_path / "trace.jsonl", records, META)
    file = tmp_path / "rows.jsonl"
    export_capture(tmp_path, ExportFormat.SPECULATORS, file, split=Split(holdout_percent=25))
    sides = [read(tools, "speculators", each, BLOCK_TOKENS, tokenizer) for each in (file, held_out_file(file))]
    assert all(row["loss_mask"] == [0, 0, 0, 1, 1, 1, 1, 1, 1] for side in sides for row in side)
    rows, held_out = ([row["input_ids"][:3] for row in side] for side in sides)
    assert min(len(rows), len(held_out)) > 0
    assert sorted(rows + held_out) == prompts


@pytest.mark.long
def test_tokenize_endpoint_matches_completion_prompt_tokens(small_cache: Server) -> None:
    small_cache.wait_until_healthy()
    tokenize = tokenizer_at(small_cache.url)
    for text in ("A prompt of a dataset", " <s>héllo</s>\n", "x"):
        asked = {"model": "tiny", "prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = plain_http.post(f"{small_cache.url}/v1/completions", json=asked, timeout=DEADLINE_S)
        assert tokenize(text) == answer.json()["choices"][0]["prompt_token_ids"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients") / "made"
    Truth().make(folder, "constant:20", 16)
    return folder


class TestExportedLoadsSentToReplay:
    """The tools send an exported load to a replay of the same capture."""

    @pytest.mark.long
    def test_vllm_bench_sends_the_recorded_token_counts(
        self, engine: Engine, made: Path, tokenizer: Path, tmp_path: Path
    ) -> None:
        file = exported(made, tmp_path, ExportFormat.VLLM_BENCH)
        with replaying(made) as url:
            engine.run(
                *("-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend=openai", f"--base-url={url}"),
                *("--model=trace", f"--tokenizer={tokenizer}", "--dataset-name=timed_trace"),
                *(f"--dataset-path={file}", f"--timed-trace-chunk-hash-size={BLOCK_TOKENS}", "--num-prompts=16"),
                *("--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json"),
            )  # fmt: skip
        found = json.loads((tmp_path / "result.json").read_text())
        recorded = read_recording(made).requests
        assert (found["completed"], found["failed"]) == (16, 0)
        assert found["total_input_tokens"] == sum(each.prompt_tokens for each in recorded)
        assert found["total_output_tokens"] == sum(each.output_tokens for each in recorded)

    @pytest.mark.long
    def test_guidellm_sends_the_recorded_token_counts(
        self, tools: Engine, made: Path, tokenizer: Path, tmp_path: Path
    ) -> None:
        file = exported(made, tmp_path, ExportFormat.GUIDELLM)
        source = {"kind": "json_file", "path": str(file)}
        data = json.dumps({"kind": "mooncake", "hash_id_block_size": BLOCK_TOKENS, "source": source})
        with replaying(made) as url:
            tools.run(
                *("-m", "guidellm", "run", "--disable-console", "--profile=kind=replay", f"--data={data}"),
                *(f"--backend=kind=openai_http,target={url},model=trace", "--constraint=kind=max_requests,count=16"),
                *(f"--tokenizer=kind=hf_auto,model={tokenizer}", f"--output=kind=json,path={tmp_path / 'found.json'}"),
            )
        [benchmark] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
        requests = benchmark["requests"]["successful"]
        recorded = read_recording(made).requests
        assert sorted(each["output_tokens"] for each in requests) == sorted(each.output_tokens for each in recorded)
