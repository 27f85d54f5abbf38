"""The recorder around the classes of every vLLM that it is made for."""

import json
from pathlib import Path

from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.engine.contract_checks import Vllm
from tests.engine.engine_process import HERE

TRIMS_FROM = "0.32"
"""The first that cuts what follows a stop string."""


def test_recorder_records_with_the_classes_of_each_vllm_version(vllm: Vllm, models: Path, tmp_path: Path) -> None:
    version, plugins, segments = vllm.profile.version, tmp_path / "plugins", tmp_path / "segments"
    segments.mkdir()
    RECORDER.write(plugins)
    # As on PYTHONPATH: the plugin is found by its entry point.
    script, tokenizer = HERE / "recorder_on_classes.py", models / "target"
    vllm.cpu.begin(script, tmp_path / "copy", segments, tokenizer, packages=[plugins]).wait()
    (path,) = segments.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    header, closed = lines[0], lines[-1]
    assert header["vllm"].startswith(f"{version}.")
    assert header["recorder_tried"]
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

    live = json.loads((segments / "live.json").read_text())
    assert (live["problems"], live["errors"]) == ([], None)
    counted = {name: live["tally"][name] for name in ("finished", "generated_tokens")}
    assert counted == live["vllm"] == {"finished": 3, "generated_tokens": 3 + 4 + 20 + 2}
    assert (live["tally"]["admitted"], live["tally"]["sampled_out"], live["tally"]["older"]) == (4, 4, 1)
