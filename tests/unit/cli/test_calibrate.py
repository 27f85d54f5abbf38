"""`specdecode calibrate`, from logs and with an engine that only says what vLLM says."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specdecode_operator.cli.calibrate import Given, UnusableLogError, measure
from specdecode_operator.cli.main import app
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.vllm.startup_log import MalformedLogError, read_startup_log
from tests.support.objects import H200
from tests.unit.vllm.test_startup_log import HEAD_0_32

GIB = 2**30
MEMORY = """
(Worker_TP0 pid=10) INFO [model_runner.py:425] Model loading took 41.4 GiB memory and 5.4 seconds
(Worker_TP0 pid=10) INFO [gpu_worker.py:759] Available KV cache memory: 78.5 GiB
(EngineCore pid=9) INFO [kv_cache_utils.py:2328] GPU KV cache size: 367,456 tokens, Maximum concurrency for 8,192 tokens per request: 44.86x
(Worker_TP0 pid=10) INFO [gpu_worker.py:1034] Free memory on device (139.3/139.8 GiB) on startup. Desired GPU memory utilization is (0.9, 125.82 GiB). Actual usage is 43.9 GiB for consumed memory (weights + non-torch), 3.42 GiB for peak activation, and 0.7 GiB for CUDAGraph memory.
(APIServer pid=1) INFO: Application startup complete.
"""  # noqa: E501  as printed
LOG = HEAD_0_32 + MEMORY


def calibrate(out: Path, *arguments: str, product: str = H200) -> Result:
    return CliRunner().invoke(app, ["calibrate", "--product", product, "--output", str(out), *arguments])


def entries(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out.read_text())["entries"]
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "start.log"
    file.write_text(LOG)
    return file


def test_a_log_becomes_a_table_and_an_entry(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    done = calibrate(out, "--from-log", str(log))
    assert done.exit_code == 0, done.output
    rows = {line[:30].strip(): line[30:].split() for line in done.output.splitlines()[2:8]}
    predicted, reported, residual = map(float, rows["left for the KV cache"])
    assert reported == 78.5
    assert residual == pytest.approx(predicted - reported, abs=0.011)
    assert rows["weights loaded"][1] == "41.40"
    assert rows["activation and graphs charged"][1] == "3.42", "what is left of the identity"
    (entry,) = entries(out)
    assert entry["residual_bytes"] == pytest.approx(residual * GIB, abs=0.006 * GIB)
    assert (entry["engine_version"], entry["runner"], entry["tensor"]) == ("0.32", "V2", 2)
    assert (entry["max_num_seqs"], entry["max_num_batched_tokens"], entry["method"]) == (128, 8192, "draft_model")


def test_entries_are_added_and_the_same_start_is_not_counted_twice(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    for _ in range(2):
        calibrate(out, "--from-log", str(log))
    assert len(entries(out)) == 1
    calibrate(out, "--from-log", str(log), "--max-num-seqs", "64")
    assert [entry["max_num_seqs"] for entry in entries(out)] == [64, 128]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--max-num-seqs"),
        (LOG.replace("'max_num_seqs': 128, ", ""), "add --max-num-seqs"),
        (LOG.replace("Available KV cache memory", "Available"), "Available KV cache memory"),
        (LOG.replace("pipeline_parallel_size=1", "pipeline_parallel_size=2"), "only tensor parallelism"),
        (LOG.replace("dtype=torch.bfloat16", "dtype=torch.float32"), "only engines in 16 bits"),
        (LOG.replace("meta-llama/Llama-3.1-70B", "acme/unheard-of"), "config.json"),
        (LOG.replace("0.9, 'quant", "0.915, 'quant"), "whole percents"),
    ],
    ids=["empty", "no sequences", "never came so far", "pipeline", "float32", "unknown model", "half a percent"],
)
def test_what_cannot_be_compared_says_why_and_writes_nothing(text: str, words: str, tmp_path: Path) -> None:
    file, out = tmp_path / "start.log", tmp_path / "calibration.json"
    file.write_text(text)
    done = calibrate(out, "--from-log", str(file))
    assert done.exit_code == 2
    assert words in done.output
    assert str(file) in done.output
    assert not out.exists()


@pytest.mark.parametrize("percent", [57, 58, 90])
def test_a_share_in_a_log_is_the_nearest_percent(percent: int) -> None:
    """100 * 0.57 is 56.99999999999999."""
    text = LOG.replace("0.9, 'quant", f"{percent / 100}, 'quant").replace("memory: 78.5 GiB", "memory: 31 GiB")
    terms = {term.name: term.predicted_bytes for term in measure(read_startup_log(text), Given(product=H200)).terms}
    assert terms["requested"] == pytest.approx(terms["device total"] * percent / 100, abs=1)


def test_bad_input_is_refused(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    assert "is a MIG slice" in calibrate(out, "--from-log", str(log), product=f"{H200}-MIG-1g.18gb").output
    assert "give one of --from-log" in calibrate(out).output
    assert "give one of --from-log" in calibrate(out, "--from-log", str(log), "--from-deployment", str(log)).output
    missing = CliRunner().invoke(app, ["calibrate", "--output", str(out), "--from-log", str(log)])
    assert (missing.exit_code, "--product is missing" in missing.output) == (2, True)
    assert "name a file that can be read" in calibrate(out, "--from-log", str(tmp_path / "none")).output
    out.write_text("{}")
    assert "format" in calibrate(out, "--from-log", str(log)).output
    assert out.read_text() == "{}", "a file that is not ours stays"


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vllm on the PATH that notes its arguments, says what the real one would, and then serves."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "vllm"
    head = HEAD_0_32.partition("(EngineCore")[2].replace("SpeculativeConfig(method='draft_model'", "SPECULATION")
    head = "(EngineCore" + head.replace("speculative_config=SPECULATION", "speculative_config=None, x=(")
    (folder / "log").write_text(head + MEMORY)
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{folder}/calls\ncat {folder}/log\n[ ! -e {folder}/fail ] && exec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_engines_are_run_for_each_shape_and_method(fake_vllm: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    model = "meta-llama/Llama-3.1-70B-Instruct"
    done = calibrate(out, "--model", model, "--tensor", "2", "--shape", "64x4096", "--shape", "256x8192")
    assert done.exit_code == 0, done.output
    calls = (fake_vllm / "calls").read_text().splitlines()
    assert len(calls) == 4
    assert all(f"serve {model} --load-format dummy --tensor-parallel-size 2" in call for call in calls)
    assert [("ngram" in call, "64" in call.split()) for call in calls] == [
        (False, True),
        (True, True),
        (False, False),
        (True, False),
    ]
    assert {(entry["max_num_seqs"], entry["max_num_batched_tokens"]) for entry in entries(out)} == {
        (64, 4096),
        (256, 8192),
    }


def test_an_engine_that_ends_is_told_with_its_last_words(fake_vllm: Path, tmp_path: Path) -> None:
    (fake_vllm / "fail").touch()
    (fake_vllm / "log").write_text("torch.OutOfMemoryError: CUDA out of memory")
    done = calibrate(tmp_path / "calibration.json", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert done.exit_code == 2
    assert "CUDA out of memory" in done.output


def test_without_vllm_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = calibrate(tmp_path / "calibration.json", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert "pip install '.[engine]'" in done.output


_NUMBERS = [found.span() for found in re.finditer(r"\d+(?:\.\d+)?", LOG)]


@pytest.mark.parametrize(
    "wrong",
    [
        "9" * 5000,
        "1.2.3",
        "1e999",
        "-",
        "[1]",
        "{}",
        "None",
        "{[1]: 2}",
        "{{}: 2}",
        "{(1, 2): 3}",
        "[0x" + "f" * 5000 + "]",
        "0x" + "f" * 5000,
        "'x'",
        "٣",
        "0",
        "9" * 15,
    ],
)
def test_a_malformed_log_is_an_error_of_the_input(wrong: str) -> None:
    """Every number of a log is replaced in turn: none of them may end in an internal error."""
    for start, end in _NUMBERS:
        with suppress(MalformedLogError, UnusableLogError, InvalidSpecError):
            measure(read_startup_log(LOG[:start] + wrong + LOG[end:]), Given(product=H200))


@pytest.mark.parametrize(
    ("was", "becomes", "what"),
    [
        ("78.5 GiB", "7" * 5000 + " GiB", "size in GiB"),
        ("367,456 tokens", "3" * 5000 + " tokens", "KV cache size"),
        ("44.86x", "4.4.8x", "Maximum concurrency"),
        ("(139.3/139.8 GiB)", "(139.3/1.3.9 GiB)", "size in GiB"),
        ("'max_num_seqs': 128", "'max_num_seqs': [128]", "max_num_seqs"),
        ("'gpu_memory_utilization': 0.9", "'gpu_memory_utilization': [0.9]", "gpu_memory_utilization"),
    ],
)
def test_a_malformed_value_is_reported_with_its_line(was: str, becomes: str, what: str, tmp_path: Path) -> None:
    assert was in LOG
    file, text = tmp_path / "start.log", LOG.replace(was, becomes)
    file.write_text(text)
    done = calibrate(tmp_path / "calibration.json", "--from-log", str(file))
    assert done.exit_code == 2, done.output
    line = next(number for number, each in enumerate(text.splitlines(), 1) if becomes in each)
    assert f"line {line}: {what}: " in done.output
    assert len(done.output) < 1000
