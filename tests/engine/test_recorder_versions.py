"""The recorder around the classes of every vLLM that it is made for."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from specdecode_operator.capture.recorder_bundle import write_bundle
from tests.engine.engine_process import DEADLINE_S, HERE, QUIET, Engine
from tests.engine.engine_versions import NEWEST, OLDER, find_packages
from tests.engine.recorder_server import make_models

TRIMS_FROM = "0.32"
"""The first that cuts what follows a stop string."""


@pytest.fixture(scope="module")
def models(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(engine, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("version", [*(pytest.param(version, marks=pytest.mark.long) for version in OLDER), NEWEST])
def test_records_with_the_classes_of(version: str, engine: Engine, models: Path, tmp_path: Path) -> None:
    older = None if version == NEWEST else find_packages(version)
    if older is None and version != NEWEST:
        pytest.skip(f"vLLM {version} is not installed: ./just engine-versions")
    plugins, segments = tmp_path / "plugins", tmp_path / "segments"
    segments.mkdir()
    write_bundle(plugins)
    done = subprocess.run(
        [engine.python, HERE / "recorder_on_classes.py", segments, models / "target"],
        env=os.environ
        | QUIET
        | {"PYTHONPATH": os.pathsep.join(str(each) for each in (plugins, older, engine.packages) if each)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = segments.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    header, closed = lines[0], lines[-1]
    assert header["vllm"].startswith(f"{version}.")
    assert (closed["reason"], closed["dropped"], closed["first_error"]) == ("ordered", 0, None)
    records = {line["id"]: line for line in lines if line["k"] == "request"}
    assert {name: record["ended_by"] for name, record in records.items()} == {
        "plain": "engine",
        "left": "abort",
        "stopped": "stop_string",
        "unfinished": "unfinished",
    }
    plain = records["plain"]
    assert (plain["chunk_s"], plain["chunk_tokens"]) == ([3.0, 4.0, 5.0], [1, 5, 2])
    assert (plain["finish_reason"], plain["engine"], plain["prompt_tokens"]) == ("length", 1, 60)
    assert (plain["queued_s"], plain["scheduled_s"], plain["cached_tokens"]) == (1.0, 2.0, 48)
    assert (plain["num_running"], plain["prefill_tokens"]) == ([4, 4, 2], [240, 0, 0])
    assert len(plain["block_hashes"]) == 3
    stopped = records["stopped"]
    assert (stopped["finish_reason"], stopped["stop_reason"], stopped["chunk_tokens"]) == ("stop", "bb", [1, 5])
    assert stopped.get("kept_tokens") == (3 if version >= TRIMS_FROM else None)
    steps = [line for line in lines if line["k"] == "step"]
    assert [step["t"] for step in steps] == [3.0, 4.0, 5.0, 6.0]
    assert steps[0]["scheduler"]["spec_decoding_stats"]["num_accepted_tokens_per_pos"] == [0, 0, 0, 0]
