"""Clients that others wrote, against a replay: they see what was recorded, to the token."""

import json
from pathlib import Path

import pytest

from specdecode_operator.replay.recording.read import read_recording
from specdecode_operator.replay.recording.recording import RecordedRequest
from tests.engine.engine_process import Engine
from tests.support.replay_process import replaying
from tests.support.synthetic import Truth

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


def test_the_openai_library_sees_the_recorded_tokens(engine: Engine, trace: Path) -> None:
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
