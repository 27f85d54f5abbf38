"""`specdecode capture live`: created objects, progress, fetched files, and Ctrl-C."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.cli.capture import watch
from specdecode_operator.cli.options import ExitCode
from tests.unit.cli.capture.conftest import CONTENT, Body, Cluster, capture, content, published

LLAMA = {"specdecodedeployment/llama": {"metadata": {"name": "llama", "namespace": "team"}}}
LIVE = {"deployment": "llama", "source": "Live", "live": {"durationSeconds": 600}}
SUMMARY = {
    "requests": {"sent": 431, "completed": 430},
    "acceptance": "71%",
    "ttftMs": {"p50": "12.3", "p90": "20.0", "p95": "25.0", "p99": "40.1"},
}
LINE = {
    "phase": "live",
    "pods": 2,
    "joined": 2,
    "seen": 240,
    "recorded": 118,
    "sampled_out": 120,
    "rate": 7.2,
    "eta_s": 480.0,
}
JOINING = LINE | {"phase": "joining", "joined": 1, "seen": 0, "recorded": 0, "sampled_out": 0, "rate": None}


def of_live(body: Body) -> Body:
    return {**body, "spec": LIVE}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watch, "_PERIOD_S", 0.0)
    monkeypatch.chdir(tmp_path)


def goes_well(cluster: Cluster, *, log: str = "") -> None:
    recording = of_live(capture(phase="Recording", job="demo-capture"))
    done = of_live(published(summary=SUMMARY))
    cluster.holds(**LLAMA, **{"specdecodecapture/demo": [{}, recording, done]}, streams={"log": log})
    cluster.publish()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--for=10m"], {"durationSeconds": 600}),
        (["--for=1h30m"], {"durationSeconds": 5400}),
        (["--for=90s", "--sample=25"], {"durationSeconds": 90, "samplePercent": 25}),
        (["--requests=500"], {"requests": 500}),
        (["--requests=500", "--pod=llama-a", "--pod=llama-b"], {"requests": 500, "pods": ["llama-a", "llama-b"]}),
    ],
)
def test_a_live_capture_is_created_followed_and_fetched(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path, options: list[str], wanted: Body
) -> None:
    goes_well(cluster, log="\n".join(map(json.dumps, (JOINING, LINE))))
    answer = run("live", "llama", "--name=demo", "--namespace=team", *options)
    assert answer.exit_code == 0, answer.stderr
    (applied,) = cluster.applied()
    spec = SpecDecodeCaptureSpec.parse(applied["spec"])
    assert (spec.deployment, spec.source) == ("llama", "Live")
    assert applied["spec"]["live"] == {"samplePercent": 100, **wanted}
    assert content(tmp_path / "captures" / "demo")["trace.jsonl"] == CONTENT
    (logs,) = cluster.calls("logs")
    assert "--container=collect" in logs
    joining, recording = (line.split() for line in answer.stdout.splitlines() if "480 s left" in line)
    assert joining[:4] == ["joining", "1", "of", "2"]
    assert recording[:8] == ["live", "seen", "240", "recorded", "118", "sampled", "out", "120"]
    assert "430 of 431 requests completed" in answer.stdout
    assert "71% of drafted tokens accepted" in answer.stdout
    assert "specdecode capture report captures/demo" in answer.stdout


def test_default_name_is_made_of_deployment_and_time(cluster: Cluster, run: Callable[..., Result]) -> None:
    long = "a-deployment-with-the-longest-name-that-there-can-be"
    cluster.holds(**{f"specdecodedeployment/{long}": {"metadata": {"name": long, "namespace": "team"}}})
    run("live", long, "--for=10m")
    (applied,) = cluster.applied()
    name = applied["metadata"]["name"]
    assert re.fullmatch(r"a-deployment-[a-z-]+-live-\d{8}-\d{6}", name)
    assert len(name) <= 52


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--for: a recording ends by time or by requests"),
        (["--for=10m", "--requests=1"], "--for: a recording ends by time or by requests"),
        (["--for=10"], "--for: 10: is not a time from 1s to 24h"),
        (["--for="], "--for: : is not a time from 1s to 24h"),
        (["--for=0s"], "--for: 0s: is not a time from 1s to 24h"),
        (["--for=25h"], "--for: 25h: is not a time from 1s to 24h"),
        (["--for=10m1h"], "--for: 10m1h: is not a time from 1s to 24h"),
    ],
)
def test_invalid_duration_is_refused(
    cluster: Cluster, run: Callable[..., Result], options: list[str], said: str
) -> None:
    cluster.holds(**LLAMA)
    answer = run("live", "llama", *options)
    assert answer.exit_code == ExitCode.INVALID
    assert answer.stderr.startswith(f"error: {said}")
    assert not cluster.calls("apply")


@pytest.mark.parametrize("option", ["--sample=0", "--sample=101", "--requests=0"])
def test_a_number_out_of_bounds_is_refused(cluster: Cluster, run: Callable[..., Result], option: str) -> None:
    cluster.holds(**LLAMA)
    answer = run("live", "llama", "--for=10m", option)
    assert answer.exit_code == ExitCode.INVALID
    assert option.partition("=")[0] in answer.stderr
    assert not cluster.calls("apply")


def test_missing_deployment_is_named(cluster: Cluster, run: Callable[..., Result]) -> None:
    cluster.holds(**LLAMA)
    answer = run("live", "lama", "--for=10m")
    assert answer.exit_code == ExitCode.INVALID
    assert answer.stderr == "error: DEPLOYMENT: lama: not found (SpecDecodeDeployments in the namespace: llama)\n"
    assert not cluster.calls("apply")


def test_existing_capture_is_not_changed(cluster: Cluster, run: Callable[..., Result]) -> None:
    cluster.holds(capture(), **LLAMA)
    answer = run("live", "llama", "--for=10m", "--name=demo")
    assert answer.exit_code == ExitCode.INVALID
    assert answer.stderr.startswith("error: --name: demo: this capture exists: ")
    assert not cluster.calls("apply")


def test_folder_with_other_files_is_refused_before_recording(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    cluster.holds(**LLAMA)
    (tmp_path / "mine").write_text("")
    answer = run("live", "llama", "--for=10m", f"--out={tmp_path}")
    assert answer.exit_code == 1
    assert "contains other files" in answer.stderr
    assert not cluster.calls("apply")


def test_stalled_capture_ends_the_command_with_the_reason(cluster: Cluster, run: Callable[..., Result]) -> None:
    told: dict[str, Any] = {
        "observedGeneration": 1,
        "reason": "RecorderNotInEngines",
        "message": "spec.source: Live: no",
    }
    conditions = [{"type": "Ready", "status": "False", **told}, {"type": "Stalled", "status": "True", **told}]
    stalled = of_live(capture(phase="Pending", conditions=conditions))
    cluster.holds(**LLAMA, **{"specdecodecapture/demo": [{}, stalled]})
    answer = run("live", "llama", "--for=10m", "--name=demo")
    assert answer.exit_code == 1
    assert answer.stderr == "error: capture demo: Pending: spec.source: Live: no\n"


def test_ctrl_c_leaves_the_capture_running_and_says_how_to_stop_it(
    cluster: Cluster, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_well(cluster)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "progress", interrupted)
    answer = run("live", "llama", "--for=10m", "--name=demo")
    assert answer.exit_code == 130
    assert "specdecode capture down demo stops it" in answer.stderr
    assert not cluster.calls("patch")
    assert not cluster.calls("delete")


def test_status_shows_the_progress_of_a_live_capture(cluster: Cluster, run: Callable[..., Result]) -> None:
    recording = of_live(capture(phase="Recording", job="demo-capture"))
    cluster.holds(recording, streams={"log": json.dumps(LINE)})
    assert "recorded    118" in run("status", "demo").stdout
    cluster.holds(recording, streams={"log": json.dumps(LINE | {"joined": 1})})
    assert "1 of 2 engine pods connected" in run("status", "demo").stdout
    cluster.holds(recording)
    assert "no request yet" in run("status", "demo").stdout
