"""`specdecode capture validate` and `specdecode capture-job`, as people and pods run them."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.files.merge import merge
from specdecode_operator.cli.main import app
from tests.support.recordings import ZERO_S, Recording, Scenario

GOOD = b'{"prompt_tokens": 1, "output_tokens": 1, "ttft_ms": 1.0, "arrival_ms": 0.0}\n'
BAD = b'{"prompt_tokens": 1, "output_tokens": 2, "ttft_ms": 1.0}\n'


def validate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["capture", "validate", *map(str, arguments)])


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    folder = Recording(Scenario()).write(tmp_path / "demo")
    merge(folder, TraceMeta(), ZERO_S)
    return folder


class TestValidate:
    def test_valid_file_is_ok(self, tmp_path: Path) -> None:
        (tmp_path / "trace.jsonl").write_bytes(GOOD)
        result = validate(tmp_path / "trace.jsonl")
        assert result.exit_code == 0
        assert result.output.startswith(f"{tmp_path}/trace.jsonl: ok\n  trace.jsonl: 1 line\n")

    def test_manifest_without_files_is_one_problem(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text("{}")
        result = validate(tmp_path)
        assert result.exit_code == 1
        told = "manifest.json cannot be read: Object missing required field `files` [manifest]"
        assert result.output == f"{tmp_path}: PROBLEMS\n  manifest.json: 1 problem\n    {told}\n"

    def test_invalid_line_is_reported_with_its_number(self, tmp_path: Path) -> None:
        (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(GOOD + BAD))
        result = validate(tmp_path / "trace.jsonl.gz")
        assert result.exit_code == 1
        assert "    line 2: output_tokens is 2, but itl_ms and itl_summary are missing [no-gaps]" in result.output

    def test_capture_folder_shows_gates_and_summary(self, capture: Path) -> None:
        result = validate(capture)
        assert result.exit_code == 0
        assert "  pass  accounting 0 (limit 0): 12 sent = 0 HTTP-rejected" in result.output
        assert "TTFT client" in result.output

    def test_each_file_in_folder_is_validated(self, tmp_path: Path) -> None:
        (tmp_path / "a-trace.jsonl").write_bytes(GOOD)
        (tmp_path / "b-trace.jsonl").write_bytes(BAD)
        result = validate(tmp_path)
        assert result.exit_code == 1
        assert "a-trace.jsonl: ok" in result.output
        assert "b-trace.jsonl: PROBLEMS" in result.output

    def test_failed_gate_is_a_problem(self, capture: Path) -> None:
        client = capture / "client.jsonl.part"
        client.write_bytes(b"\n".join(client.read_bytes().splitlines()[:-1]) + b"\n")
        result = validate(capture)
        assert result.exit_code == 1
        assert "  FAIL  accounting 1 (limit 0)" in result.output

    def test_json_has_gates_summary_and_problems(self, capture: Path, tmp_path: Path) -> None:
        (tmp_path / "trace.jsonl").write_bytes(BAD)
        result = validate(capture, tmp_path / "trace.jsonl", "-o", "json")
        assert result.exit_code == 1
        whole, alone = json.loads(result.stdout)["validated"]
        assert (whole["passed"], alone["passed"]) == (True, False)
        assert whole["gates"]["accounting"]["passed"]
        assert whole["summary"]["requests"]["completed"] == 12
        assert alone["files"][0]["problems"][0]["line"] == 1

    @pytest.mark.parametrize("name", ["absent", "empty", "notes.txt"])
    def test_unusable_input_exits_with_status_2(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("hello")
        (tmp_path / "trace.jsonl").write_bytes(BAD)
        result = validate(tmp_path / "trace.jsonl", tmp_path / name)
        assert result.exit_code == 2
        assert f"error: {tmp_path / name}: " in result.stderr
        assert "[no-gaps]" in result.stdout


class TestCaptureJob:
    def test_capture_job_command_is_hidden(self) -> None:
        assert "capture-job" not in CliRunner().invoke(app, ["--help"]).output

    @pytest.mark.parametrize("command", ["prepare", "run"])
    def test_failure_is_written_to_termination_log(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        monkeypatch.delenv("SPECDECODE_CAPTURE", raising=False)
        log = tmp_path / "termination-log"
        result = CliRunner().invoke(app, ["capture-job", command, "--termination-log", str(log)])
        assert result.exit_code == 1
        assert json.loads(log.read_bytes())["error"]["reason"] == "InvalidSettings"
        assert "InvalidSettings: SPECDECODE_CAPTURE is not set" in result.stderr

    def test_prepare_command_installs_recorder_and_reports_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "volume").mkdir()
        settings = {
            "namespace": "team",
            "capture": "demo",
            "root": str(tmp_path / "volume"),
            "engine": {"url": "http://127.0.0.1:8000", "model": "m", "max_model_len": 100, "vocab_size": 100},
            "workload": {},
            "seed": 0,
        }
        monkeypatch.setenv("SPECDECODE_CAPTURE", json.dumps(settings))
        monkeypatch.setenv("SPECDECODE_ATTEMPT", "uid")
        log = tmp_path / "termination-log"
        arguments = ["--recorder", str(tmp_path / "recorder"), "--termination-log", str(log)]
        result = CliRunner().invoke(app, ["capture-job", "prepare", *arguments])
        assert result.exit_code == 0, result.output
        assert json.loads(log.read_bytes())["prepared"].endswith("team/demo/as-deployed/1.part-uid")
        assert (tmp_path / "recorder").is_dir()
