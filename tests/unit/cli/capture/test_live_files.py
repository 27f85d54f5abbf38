"""Commands that read the files of a live capture, which has no client and no phases."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdecode_operator.api.capture import CaptureWorkload, Dataset, DatasetFormat, Pattern, Phase, Prompts
from specdecode_operator.capture.load.prompts import prompt_source
from specdecode_operator.capture.load.run_settings import EngineAddress, RunSettings
from specdecode_operator.cli.main import app
from specdecode_operator.replay.model_file import read_model
from tests.support.live_capture import PlayedPod, collector, environment, publish
from tests.support.recordings import Scenario


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a volume with a live capture of two pods."""
    root = tmp_path_factory.mktemp("volume")
    pods = [
        PlayedPod("a", Scenario(warmup=0, requests=40, servers=2, output_tokens=60)),
        PlayedPod("b", Scenario(warmup=0, requests=40, seed=1), node="node-2"),
    ]
    asyncio.run(publish(root, *pods))
    return root


@pytest.fixture
def folder(volume: Path) -> Path:
    return volume / "team/live/as-deployed/1"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(map(str, arguments)))
    return result.exit_code, " ".join(result.output.replace("│", "").split())


def test_validate_checks_a_live_capture_against_its_manifest(folder: Path) -> None:
    code, text = run("capture", "validate", folder, "--output", "json")
    assert code == 0
    (found,) = json.loads(text)["validated"]
    assert {"accounting", "finished_requests", "generated_tokens", "engine_counters"} <= found["gates"].keys()
    assert (found["summary"]["requests"]["admitted"], found["summary"]["requests"]["completed"]) == (80, 80)
    assert found["summary"]["engine"]["ttft_ms"]["count"] == 80


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("manifest.json", "manifest.json cannot be read: not a regular file [manifest]"),
        ("trace.jsonl", "not a regular file; devices and pipes are not read [file]"),
        ("client.jsonl", "not a regular file; devices and pipes are not read [file]"),
    ],
)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_validate_does_not_read_pipes_and_devices(tmp_path: Path, name: str, problem: str, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    code, text = run("capture", "validate", tmp_path)
    assert code == 1
    assert problem in text


def test_report_of_a_live_capture_shows_engine_figures(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, text = run("capture", "report", folder, "--out", page)
    assert code == 0, text
    assert "left out: TTFT at the client and at the engine: live traffic has no load generator" in text
    words = page.read_text()
    for title in ("Acceptance by position", "Tokens per decode step", "TTFT and TPOT", "Timeline of requests"):
        assert f">{title}</h2>" in words
    assert "Prompts P50 40, P99 40 tokens, outputs P50 40, P99 60 tokens." in words
    assert "live traffic of 2 pods in 600 s" in words
    assert "<td>0 (100%)</td>" in words, "temperatures"
    assert "ITL P50" in words


def test_report_warns_of_gaps(tmp_path: Path) -> None:
    async def record() -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a", "absent"])) as running:
            (peer,) = await running.join(pod)
            await running.until(lambda: running.connected("a") == 1, "the pod has joined")
            running.advance(150)
            played = await peer.armed(pod)
            await peer.send(*played.recorded)
            await running.received(2 + len(played.recorded))
            await peer.close()
            await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            running.advance(600)
            await running.published()

    asyncio.run(record())
    page = tmp_path / "page.html"
    code, text = run("capture", "report", tmp_path / "team/live/as-deployed/1", "--out", page)
    assert code == 0, text
    words = page.read_text()
    assert "Pod absent was not recorded: its sidecar never connected" in words
    assert "Pod a, API server 0: an unknown number of requests not recorded: the connection ended" in words


def test_fit_combines_all_engines_of_a_live_capture(folder: Path, tmp_path: Path) -> None:
    code, text = run("replay", "fit", folder, "--out", tmp_path / "model.json")
    assert code == 0, text
    assert "fitted to 80 requests" in text
    assert "2 engines were recorded" in text
    assert [capture.requests for capture in read_model(tmp_path / "model.json").origin.captures] == [80]


def test_fit_of_a_sampled_capture_says_so(tmp_path: Path) -> None:
    asyncio.run(publish(tmp_path, PlayedPod("a", Scenario(warmup=0, requests=60)), sample_percent=50))
    code, text = run("replay", "fit", tmp_path / "team/live/as-deployed/1", "--out", tmp_path / "model.json")
    assert code == 0, text
    assert "only 50 % of the requests were recorded" in text


def test_prefix_matching_with_salted_hashes_is_refused(folder: Path) -> None:
    code, text = run("replay", "serve", folder, "--match", "prefix")
    assert code == 2
    assert "block_hashes of a live capture are salted" in text


def test_gate_refuses_a_live_capture(folder: Path) -> None:
    code, text = run("capture", "gate", folder, folder)
    assert code == 2
    assert "is a live capture" in text


def test_load_replays_the_lengths_of_a_live_capture(volume: Path) -> None:
    settings = RunSettings(
        namespace="n",
        capture="c",
        engine=EngineAddress(url="http://127.0.0.1:8000", model="m", max_model_len=4096, vocab_size=32_000),
        workload=CaptureWorkload(
            prompts=Prompts(dataset=Dataset(path="team/live/as-deployed/1", format=DatasetFormat.TRACE)),
            phases=[Phase(name="again", pattern=Pattern.RECORDED)],
        ),
        seed=0,
    )
    source = prompt_source(settings, volume)
    assert {len(source.first("again", index).content) for index in range(80)} == {40}
    assert {source.output_tokens("again", index) for index in range(80)} == {20, 60}
    assert len(source.recorded_s("again")) == 81
