"""`specdecode calibrate --from-deployment`: what the operator saw becomes an entry."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from specdecode_operator.cli.main import app
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.observed.engine_reports import residual_share
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, parse_calibration
from tests.support.decisions import desired_state
from tests.support.llama import LLAMA_8B_CONFIG
from tests.support.objects import H200, deployment, pair_70b, parent, tiny_cpu
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.observed.test_engine_reports import reading

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


def calibrate(out: Path, body: dict[str, Any], *more: str) -> Result:
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(body))
    return CliRunner().invoke(app, ["calibrate", "--from-deployment", str(file), "--output", str(out), *more])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def test_the_residual_of_a_serving_object_becomes_an_entry(out: Path) -> None:
    body = serving(1000)
    done = calibrate(out, body)
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


def test_what_was_fed_back_predicts_what_the_engine_reports(out: Path) -> None:
    calibrate(out, serving(1000))
    calibration = parse_calibration(out.read_text())
    body = serving(1000, calibration)
    status = body["status"]
    assert abs(status["observed"]["kvCacheResidualBytes"]) <= 16 * status["plan"]["kvBytesPerToken"], "within a block"
    assert status["plan"]["kvCacheTokens"] == status["observed"]["kvCacheTokens"]
    planned = next(found for found in status["conditions"] if found["type"] == "Planned")
    assert "calibrated:" in planned["message"]


def test_a_plan_that_was_calibrated_already_gives_the_same_entry(out: Path) -> None:
    """The residual in the status is what is left of the error; the entry is the whole of it."""
    calibrate(out, serving(1000))
    (first,) = parse_calibration(out.read_text()).entries
    calibrate(out, serving(1000, Calibration((first,))))
    (second,) = parse_calibration(out.read_text()).entries
    assert abs(second.residual_bytes - first.residual_bytes) < 16 * 229_376, "within a block"
    assert first.residual_bytes > 3 * GIB


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
        (stale, "get it again"),
        (replanned, "get it again"),
        (silent, "kvCacheResidualBytes: wait until"),
        (damaged, "plan.tensor"),
        (unknown, "use --model-config ID=PATH"),
        (undivided, "status.plan"),
        (requantized, "target INT4 needs a checkpoint"),
        (captured_otherwise, "cudagraphMode, maxCudagraphCaptureSize: only engines with vLLM's own CUDA graphs"),
        (captured_less, "cudagraphMode, maxCudagraphCaptureSize: only engines with vLLM's own CUDA graphs"),
        (undersized, "it was not the engine that was predicted"),
    ],
)
def test_what_shows_no_residual_says_why_and_writes_nothing(change: Any, words: str, out: Path) -> None:
    body = serving(1000)
    change(body)
    done = calibrate(out, body)
    assert done.exit_code == 2
    assert words in done.output
    assert "llama" in done.output
    assert not out.exists()


def test_cpu_has_nothing_to_calibrate(out: Path) -> None:
    done = calibrate(out, serving(0, spec=tiny_cpu()))
    assert done.exit_code == 2
    assert "only GPUs" in done.output


def test_an_unknown_model_is_taken_from_its_config(out: Path, tmp_path: Path) -> None:
    body = serving(1000)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B_CONFIG))
    body["spec"]["speculation"]["draft"]["model"] = "acme/unheard-of"
    done = calibrate(out, body, "--model-config", f"acme/unheard-of={config}")
    assert done.exit_code == 0, done.output
    (entry,) = parse_calibration(out.read_text()).entries
    assert entry.model.endswith(" + acme/unheard-of")


def test_a_file_without_objects_is_refused(out: Path) -> None:
    assert "holds no SpecDecodeDeployment" in calibrate(out, {"kind": "Other"}).output


def test_a_replay_shows_nothing(out: Path) -> None:
    done = calibrate(out, serving(0, spec=replaying()))
    assert done.exit_code != 0
    assert "spec.engine.replay: only engines that run a model show what memory it takes" in done.output
    assert not out.exists()


def test_the_entry_has_as_many_requests_as_ran(out: Path) -> None:
    # A model with states whose KV cache has too few blocks for the default of 256.
    spec = {
        "target": {"model": "Qwen/Qwen3.6-35B-A3B"},
        "speculation": {"method": "mtp", "numSpeculativeTokens": 2},
        "parallelism": {"tensor": 1},
        "serving": {"maxModelLen": 8192, "gpuMemoryUtilizationPercent": 55},
    }
    done = calibrate(out, serving(10, spec=spec))
    assert done.exit_code == 0, done.output
    (entry,) = json.loads(out.read_text())["entries"]
    assert entry["max_num_seqs"] < 256
