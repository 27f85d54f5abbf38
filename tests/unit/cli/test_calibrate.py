"""`specdecode calibrate`."""

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from specdecode_operator.cli.calibrate import Given, UnusableLogError, measure
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.observed.engine_reports import residual_share
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import (
    UNCALIBRATED,
    Calibration,
    CalibrationEntry,
    parse_calibration,
    serialize_calibration,
)
from specdecode_operator.vllm.startup_log import MalformedLogError, read_startup_log
from tests.support.decisions import desired_state
from tests.support.llama import LLAMA_8B_CONFIG
from tests.support.objects import H100, H200, deployment, pair_70b, parent
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_explain import figures
from tests.unit.deployment.observed.test_engine_reports import reading
from tests.unit.vllm.test_startup_log import HEAD_0_32

MEMORY = """
(Worker_TP0 pid=10) INFO [model_runner.py:425] Model loading took 41.4 GiB memory and 5.4 seconds
(Worker_TP0 pid=10) INFO [gpu_worker.py:759] Available KV cache memory: 78.5 GiB
(EngineCore pid=9) INFO [kv_cache_utils.py:2328] GPU KV cache size: 367,456 tokens, Maximum concurrency for 8,192 tokens per request: 44.86x
(Worker_TP0 pid=10) INFO [gpu_worker.py:1034] Free memory on device (139.3/139.8 GiB) on startup. Desired GPU memory utilization is (0.9, 125.82 GiB). Actual usage is 43.9 GiB for consumed memory (weights + non-torch), 3.42 GiB for peak activation, and 0.7 GiB for CUDAGraph memory.
(APIServer pid=1) INFO: Application startup complete.
"""  # noqa: E501  as printed
LOG = HEAD_0_32 + MEMORY


def calibrate(out: Path, *arguments: str, product: str = H200) -> Result:
    return CliRunner().invoke(app, ["calibrate", "--gpu", product, "--append-to", str(out), *arguments])


def entries(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out.read_text())["entries"]
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "start.log"
    file.write_text(LOG)
    return file


def test_log_gives_a_table_and_a_calibration_entry(log: Path, tmp_path: Path) -> None:
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


def test_entries_are_added_without_duplicates(log: Path, tmp_path: Path) -> None:
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
        (LOG.replace("dtype=torch.bfloat16", "dtype=torch.float32"), "16-bit dtypes"),
        (LOG.replace("meta-llama/Llama-3.1-70B", "acme/unheard-of"), "config.json"),
        (LOG.replace("0.9, 'quant", "0.915, 'quant"), "multiple of 0.01"),
    ],
    ids=["empty", "no sequences", "never came so far", "pipeline", "float32", "unknown model", "half a percent"],
)
def test_unusable_log_says_why_and_writes_nothing(text: str, words: str, tmp_path: Path) -> None:
    file, out = tmp_path / "start.log", tmp_path / "calibration.json"
    file.write_text(text)
    done = calibrate(out, "--from-log", str(file))
    assert done.exit_code == 2
    assert words in done.output
    assert str(file) in done.output
    assert not out.exists()


def test_bad_input_is_refused(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    assert "is a MIG slice" in calibrate(out, "--from-log", str(log), product=f"{H200}-MIG-1g.18gb").output
    assert "exactly one of --from-log" in calibrate(out).output
    assert "exactly one of --from-log" in calibrate(out, "--from-log", str(log), "--from-deployment", str(log)).output
    missing = CliRunner().invoke(app, ["calibrate", "--append-to", str(out), "--from-log", str(log)])
    assert (missing.exit_code, "--gpu is missing" in missing.output) == (2, True)
    assert "use a readable file" in calibrate(out, "--from-log", str(tmp_path / "none")).output
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
    done = calibrate(out, "--model", model, "--tp", "2", "--shape", "64x4096", "--shape", "256x8192")
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


def test_failed_engine_is_reported_with_its_log(fake_vllm: Path, tmp_path: Path) -> None:
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
def test_malformed_number_in_a_log_is_no_internal_error(wrong: str) -> None:
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


# --calibration of `plan`, also with --explain and --batch: they say what measurements say, and name them.

TARGET, DRAFT = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
ENTRY = CalibrationEntry(
    H100, "0.33", "V2", 2, False, 256, 8192, "draft_model", 5, f"{TARGET} + {DRAFT}", "FP8", "BF16", GIB
)
FP8 = {"target": {"model": TARGET, "quantization": "FP8"}}


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.json"
    file.write_text(serialize_calibration(Calibration((ENTRY,))))
    return file


def test_plan_corrects_only_measured_products(specdecode: Specdecode, write: WriteObject, calibration: Path) -> None:
    path = write("a.yaml", manifest("a", **FP8))
    plain, corrected = (
        json.loads(specdecode("plan", "-f", path, "-o", "json", *more).stdout)["objects"][0]["candidates"]
        for more in ([], ["--calibration", calibration])
    )
    tens = {candidate["product"]: candidate for candidate in plain if candidate["tensor"] == 2}
    for candidate in corrected:
        if candidate["tensor"] != 2:
            assert candidate in plain
            continue
        more = GIB if candidate["product"] == H100 else 0
        before = tens[candidate["product"]]
        assert candidate["correction_bytes"] == more
        assert candidate["per_gpu"]["available_kv"] == before["per_gpu"]["available_kv"] - more
        assert (candidate["calibration"] is not None) == bool(more)
    text = specdecode("plan", "-f", path, "--calibration", calibration).stdout
    assert "2 x H100, TP 2: calibrated: 1.0 GiB more for the engine on each GPU, after a measured start" in text
    assert "calibrated" not in specdecode("plan", "-f", path).stdout


def test_plan_warns_if_no_calibration_entry_applies(
    specdecode: Specdecode, write: WriteObject, calibration: Path
) -> None:
    path = write("a.yaml", manifest("a", parallelism={"tensor": 4}))
    told = specdecode("plan", "-f", path, "--calibration", calibration).stderr
    assert f"warning: --calibration: {calibration}: has no entry for these engines" in told
    used = write("b.yaml", manifest("b", **FP8))
    assert "warning" not in specdecode("plan", "-f", used, "--calibration", calibration).stderr


def test_explain_shows_the_correction_and_adds_up(
    specdecode: Specdecode, write: WriteObject, calibration: Path
) -> None:
    path = write("a.yaml", manifest("a", **FP8))
    plain, corrected = (
        figures(specdecode("plan", "--explain", "-f", path, *more).stdout)
        for more in ([], ["--calibration", calibration])
    )
    assert corrected["- correction"] == GIB
    assert corrected["- non-torch"] == plain["- non-torch"]
    assert "- correction" not in plain
    charged = sum(size for name, size in corrected.items() if name.startswith("- "))
    assert corrected["budget"] - charged == corrected["= left for KV cache"] == plain["= left for KV cache"] - GIB


def test_batch_corrects_only_measured_cases(specdecode: Specdecode, calibration: Path) -> None:
    case = {
        "gpu": "H100",
        "model": TARGET,
        "quantization": "fp8",
        "tp": 2,
        "max_num_seqs": 256,
        "speculative": {"method": "draft_model", "num_speculative_tokens": 5, "model": DRAFT},
    }
    lines = "\n".join(json.dumps(each) for each in (case, {**case, "tp": 4}))
    plain, corrected = (
        [
            json.loads(line)
            for line in specdecode("plan", "--batch", "-", "--out", "-", *more, stdin=lines).stdout.splitlines()
        ]
        for more in ([], ["--calibration", calibration])
    )
    assert corrected[0]["per_gpu"]["available_kv"] == plain[0]["per_gpu"]["available_kv"] - GIB
    assert "a measured start" in corrected[0]["calibration"]
    assert corrected[1] == plain[1], "nobody measured four GPUs"


@pytest.mark.parametrize("option", [[], ["--explain"], ["--batch", "-"]], ids=str)
def test_unusable_calibration_file_is_an_error(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, option: list[str]
) -> None:
    files = [] if "--batch" in option else ["-f", write("a.yaml", manifest("a"))]
    for content, words in ((None, "No such file"), ("{", "is not valid JSON"), ("{}", "format")):
        file = tmp_path / "bad.json"
        if content is not None:
            file.write_text(content)
        done = specdecode("plan", *option, *files, "--calibration", file, stdin="{}")
        assert done.exit_code == 2
        assert words in done.stderr
        assert str(file) in done.stderr
        assert not done.stdout.strip()


# `specdecode calibrate --from-deployment`: what the operator saw becomes an entry.

NODES = (NodeFacts("h200-0", H200, 8),)


def serving(
    missing_blocks: int, calibration: Calibration = UNCALIBRATED, spec: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The object as kubectl prints it, while an engine serves that got so many blocks less than an estimate says."""
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", **parent(spec or pair_70b())}
    owner = parse_deployment(body)
    plain, intent = desired_state(owner, NODES), desired_state(owner, NODES, calibration=calibration)
    assert isinstance(plain.outcome, Launch)
    budget = plain.outcome.plan.chosen.budget
    blocks = budget.num_blocks - missing_blocks
    engine = reading(int(blocks / 512 * 8192), blocks, 16 if spec is None else None)
    seen = Observation(deployment(replicas=1, updated=1, available=1), readings={"llama-0": engine})
    status = compose_status(owner, intent, seen, datetime.now(UTC))
    body["status"] = status.model_dump(by_alias=True, mode="json", exclude_none=True)
    return body


def calibrate_deployment(out: Path, body: dict[str, Any], *more: str) -> Result:
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(body))
    return CliRunner().invoke(app, ["calibrate", "--from-deployment", str(file), "--append-to", str(out), *more])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def test_residual_of_a_serving_deployment_becomes_an_entry(out: Path) -> None:
    body = serving(1000)
    done = calibrate_deployment(out, body)
    assert done.exit_code == 0, done.output
    (entry,) = json.loads(out.read_text())["entries"]
    residual_bytes = body["status"]["observed"]["kvCacheResidualBytes"]
    assert residual_bytes == 1000 * 16 * body["status"]["plan"]["kvBytesPerToken"]
    assert entry == {
        "product": H200,
        "engine_version": "0.33",
        "runner": "V2",
        "tensor": 2,
        "enforce_eager": False,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "model": "meta-llama/Llama-3.1-70B-Instruct + meta-llama/Llama-3.1-8B-Instruct",
        "target_precision": "BF16",
        "draft_precision": "BF16",
        "residual_bytes": residual_bytes,
    }
    assert "left for the KV cache" in done.output
    assert "Llama-3.1-8B-Instruct in BF16 + BF16, vLLM 0.33" in done.output
    assert "draft_model K=5" in done.output


def test_calibrated_plan_predicts_the_reported_kv_cache(out: Path) -> None:
    calibrate_deployment(out, serving(1000))
    calibration = parse_calibration(out.read_text())
    body = serving(1000, calibration)
    status = body["status"]
    assert abs(status["observed"]["kvCacheResidualBytes"]) <= 16 * status["plan"]["kvBytesPerToken"], "within a block"
    assert status["plan"]["kvCacheTokens"] == status["observed"]["kvCacheTokens"]
    planned = next(found for found in status["conditions"] if found["type"] == "Planned")
    assert "calibrated:" in planned["message"]


def stale(body: dict[str, Any]) -> None:
    body["metadata"]["generation"] += 1


def replanned(body: dict[str, Any]) -> None:
    body["status"]["plan"]["kvCacheTokens"] += 10_000


def silent(body: dict[str, Any]) -> None:
    del body["status"]["observed"]


def damaged(body: dict[str, Any]) -> None:
    body["status"]["plan"]["tensor"] = "two"


def requantized(body: dict[str, Any]) -> None:
    body["status"]["plan"]["targetQuantization"] = "INT4"


def undersized(body: dict[str, Any]) -> None:
    """The engine reports far more than was predicted, as one with smaller weights does."""
    plan, observed = body["status"]["plan"], body["status"]["observed"]
    observed["kvCacheResidualBytes"] = -32 * GIB
    observed["kvCacheTokens"] = plan["kvCacheTokens"] + 32 * GIB // plan["kvBytesPerToken"]
    observed["kvCacheResidual"] = residual_share(plan["kvCacheTokens"], observed["kvCacheTokens"])


def captured_otherwise(body: dict[str, Any]) -> None:
    body["spec"]["serving"] = body["spec"].get("serving", {}) | {"cudagraphMode": "FULL_DECODE_ONLY"}


def captured_less(body: dict[str, Any]) -> None:
    body["spec"]["serving"] = body["spec"].get("serving", {}) | {"maxCudagraphCaptureSize": 64}


def unknown(body: dict[str, Any]) -> None:
    body["spec"]["target"]["model"] = "acme/unheard-of"


def undivided(body: dict[str, Any]) -> None:
    body["status"]["plan"]["tensor"] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stale, "get the object again"),
        (replanned, "get the object again"),
        (silent, "kvCacheResidualBytes is missing: wait until"),
        (damaged, "plan.tensor"),
        (unknown, "use --model-config ID=PATH"),
        (undivided, "status.plan"),
        (requantized, "target INT4 needs a checkpoint"),
        (
            captured_otherwise,
            "cudagraphMode, maxCudagraphCaptureSize: calibration supports only vLLM's default CUDA graphs",
        ),
        (captured_less, "cudagraphMode, maxCudagraphCaptureSize: calibration supports only vLLM's default CUDA graphs"),
        (undersized, "another engine than the predicted one"),
    ],
)
def test_deployment_without_a_residual_says_why_and_writes_nothing(change: Any, words: str, out: Path) -> None:
    body = serving(1000)
    change(body)
    done = calibrate_deployment(out, body)
    assert done.exit_code == 2
    assert words in done.output
    assert "llama" in done.output
    assert not out.exists()


def test_unknown_model_is_taken_from_its_model_config(out: Path, tmp_path: Path) -> None:
    body = serving(1000)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B_CONFIG))
    body["spec"]["speculation"]["draft"]["model"] = "acme/unheard-of"
    done = calibrate_deployment(out, body, "--model-config", f"acme/unheard-of={config}")
    assert done.exit_code == 0, done.output
    (entry,) = parse_calibration(out.read_text()).entries
    assert entry.model.endswith(" + acme/unheard-of")


def test_file_without_deployments_is_refused(out: Path) -> None:
    assert "contains no SpecDecodeDeployment" in calibrate_deployment(out, {"kind": "Other"}).output
