"""Folders that others may have written: refused with a sentence, or said in a note."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.comparison.client_requests import MOST_REQUESTS, Numbers
from specdecode_operator.capture.comparison.compare_arms import compare_capture
from specdecode_operator.capture.files.formats import CaptureError
from tests.support.compared_captures import MadeCapture, of_equal_arms, renew, rewrite

Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return MadeCapture(requests=32).make(tmp_path)


def client_lines(folder: Path, change: Callable[[dict[str, Any]], Any], arm: str = "drafted") -> None:
    """Change every line of an arm's client.jsonl, and have its manifest know."""
    for place in sorted((folder / arm).iterdir()):
        path = place / "client.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(change(line) or line)}\n" for line in lines))
        renew(place)


def manifest(change: Callable[[dict[str, Any]], Any], arm: str = "drafted") -> Change:
    return lambda folder: rewrite(folder / arm / "1" / "manifest.json", change)


def everywhere(change: Callable[[dict[str, Any]], Any]) -> Change:
    def in_all(folder: Path) -> None:
        for path in folder.rglob("manifest.json"):
            rewrite(path, change)

    return in_all


def rewrite_steps(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "drafted" / "1" / "step-stats.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(change(line))}\n" for line in lines))


def torn(folder: Path) -> None:
    path = folder / "drafted" / "2" / "client.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def shorter(folder: Path) -> None:
    path = folder / "drafted" / "2" / "trace.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def cut_gzip(folder: Path) -> None:
    path = folder / "drafted" / "2" / "client.jsonl"
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_name("client.jsonl.gz").write_bytes(packed[: len(packed) // 2])


def line_of(text: bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / "drafted" / "1" / "client.jsonl"
        path.write_bytes(text + b"\n")
        renew(path.parent)

    return change


def client(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: client_lines(folder, change)


def removed(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.with_name(f"{folder.name}-elsewhere"))

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "no baseline": (removed("plain"), "plain: is not there: others are compared with it"),
    "one arm": (removed("drafted"), "only arm plain is there"),
    "another workload": (manifest(lambda each: each | {"workload": {}}), "workloads differ: workload of arm drafted"),
    "another seed": (manifest(lambda each: each | {"seed": 9}), "workloads differ: seed of arm drafted"),
    "another capture": (manifest(lambda each: each | {"capture": "b"}), "workloads differ: capture"),
    "other prompts": (
        client(lambda each: each | {"prompt_tokens": each["prompt_tokens"] + 1}),
        "workloads differ: request 0 of phase closed-4 in arm drafted, repetition 1",
    ),
    "other lengths": (client(lambda each: each | {"max_tokens": 7}), "workloads differ: request 0 of phase closed-4"),
    "an arm in the folder of another": (
        lambda folder: (folder / "plain").rename(folder / "x") and (folder / "drafted").rename(folder / "plain"),
        "plain/1: holds repetition 1 of arm drafted: give the folder back its name",
    ),
    "a repetition in the folder of another": (
        manifest(lambda each: each | {"repetition": 2}),
        "drafted/1: holds repetition 2 of arm drafted",
    ),
    "no experiment": (everywhere(lambda each: each | {"experiment": None}), "holds no capture with arms"),
    "two experiments": (
        manifest(lambda each: each | {"experiment": each["experiment"] | {"repetitions": 5}}),
        "its arms are not of one capture",
    ),
    "a name that leads elsewhere": (
        everywhere(lambda each: each | {"experiment": each["experiment"] | {"arms": ["plain", "../../etc"]}}),
        "experiment.arms: ../../etc: is no name of an arm",
    ),
    "an arm twice": (
        everywhere(lambda each: each | {"experiment": each["experiment"] | {"arms": ["plain", "plain"]}}),
        "each stands there once, the baseline first",
    ),
    "a thousand arms": (
        everywhere(lambda each: each | {"experiment": each["experiment"] | {"arms": ["a"] * 1000}}),
        "manifest.json: cannot be read: Expected `array` of length <= 8",
    ),
    "a workload that is none": (
        everywhere(lambda each: each | {"workload": {"phases": [{"name": 5}]}}),
        "manifest.json: workload.phases.0",
    ),
    "a torn line": (torn, "arm drafted, repetition 2: client.jsonl, line 32 cannot be read"),
    "a file that is shorter": (shorter, "arm drafted, repetition 2: trace.jsonl has 32 lines instead of 33"),
    "half a gzip": (cut_gzip, "arm drafted, repetition 2: client.jsonl is cut off or damaged"),
    "no client.jsonl": (removed("drafted/1/client.jsonl"), "repetition 1: client.jsonl is not there"),
    "no steps though they were recorded": (removed("drafted/1/step-stats.jsonl"), "step-stats.jsonl is not there"),
    "a line that is deep": (line_of(b"[" * 100_000), "client.jsonl, line 1 cannot be read"),
    "no UTF-8": (line_of(b'{"phase": "\xff"}'), "client.jsonl, line 1 cannot be read"),
    "an index that would fill the memory": (client(lambda each: each | {"index": MOST_REQUESTS}), "line 1 cannot be"),
    "engines that would fill the memory": (
        lambda folder: rewrite_steps(folder, lambda each: each | {"engine": 4096}),
        "repetition 1: step-stats.jsonl, line 1 cannot be read",
    ),
    "a negative latency": (client(lambda each: each | {"latency_ms": -1}), "line 1 cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_what_is_wrong(folder: Path, name: str) -> None:
    change, message = REFUSED[name]
    change(folder)
    with pytest.raises(CaptureError) as refused:
        compare_capture(folder)
    assert message in refused.value.message
    assert refused.value.reason == "NotComparable"
    assert refused.value.message.isprintable()


def test_phases_that_nobody_asked_for_fill_no_memory(tmp_path: Path) -> None:
    MadeCapture(requests=100).make(tmp_path)
    client_lines(tmp_path, lambda each: each | {"phase": f"p{each['index']}"})
    with pytest.raises(CaptureError, match="more than 64 phases"):
        compare_capture(tmp_path)


def test_indices_of_many_phases_fill_no_memory(tmp_path: Path) -> None:
    MadeCapture(requests=32).make(tmp_path)
    client_lines(tmp_path, lambda each: each | {"phase": f"p{each['index']}", "index": MOST_REQUESTS // 4})
    with pytest.raises(CaptureError, match=r"client\.jsonl has indices beyond 5,000,000 in all"):
        compare_capture(tmp_path)


@pytest.mark.parametrize("text", [b"", b"nonsense", b"[]", b"{}", b"\xff\xfe"])
def test_a_manifest_that_is_none_is_refused(folder: Path, text: bytes) -> None:
    (folder / "drafted" / "1" / "manifest.json").write_bytes(text)
    with pytest.raises(CaptureError, match=r"drafted/1/manifest\.json: cannot be read"):
        compare_capture(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot be read: No such file or directory"):
        compare_capture(tmp_path / "none")


def test_an_empty_folder_holds_no_arms(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="holds no capture with arms"):
        compare_capture(tmp_path)


class TestNothingAnswered:
    def test_of_one_arm_is_no_verdict_and_said(self, folder: Path) -> None:
        client_lines(
            folder,
            lambda each: (
                {key: each[key] for key in ("id", "phase", "index", "sent_ms", "finished_ms")}
                | {"outcome": "http_rejected", "http_status": 400}
            ),
        )
        arm = compare_capture(folder).arm("drafted")
        assert arm.verdict == "Inconclusive"
        assert "no request of it was answered in arm drafted" in arm.message
        assert arm.loads[0].requests == {"sent": 64, "http_rejected": 64}

    def test_without_any_request_is_no_verdict(self, folder: Path) -> None:
        for place in folder.glob("*/*"):
            (place / "client.jsonl").write_bytes(b"")
            renew(place)
        arm = compare_capture(folder).arm("drafted")
        assert (arm.verdict, arm.loads[0].goodput) == ("Inconclusive", None)

    def test_a_phase_that_one_arm_never_reached_is_left_out(self, tmp_path: Path) -> None:
        MadeCapture(arrivals="closed:4,closed:8", requests=32).make(tmp_path)
        client_lines(tmp_path, lambda each: {"phase": "closed-4", "index": 0, "outcome": "not_sent"})
        loads = compare_capture(tmp_path).arm("drafted").loads
        assert [each.not_compared is not None for each in loads] == [True, True]


def test_counters_that_fall_are_no_steps_of_an_engine(folder: Path) -> None:
    """A step says what happened in it, so that a reset takes nothing away; a stamp that goes back is left out."""
    path = folder / "drafted" / "1" / "step-stats.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    whole = compare_capture(folder).arm("drafted")
    lines[50]["ts_ms"] = 0.0
    lines[60]["scheduler"]["prefix_cache_stats"]["reset"] = True
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    again = compare_capture(folder).arm("drafted")
    assert again.drafting is not None
    assert whole.drafting is not None
    assert again.drafting.acceptance == whole.drafting.acceptance
    assert again.loads[0].decode_step_ms == pytest.approx(whole.loads[0].decode_step_ms, rel=0.02)


def test_a_block_that_took_next_to_no_time_is_left_out(folder: Path) -> None:
    for arm in ("plain", "drafted"):
        client_lines(folder, lambda each: each | {"sent_ms": 0.0, "finished_ms": 5e-324}, arm)
    assert compare_capture(folder).arm("drafted").loads[0].goodput in {None, 0.0}


def test_a_draft_of_more_tokens_than_any_is_no_error(folder: Path) -> None:
    def longer(each: dict[str, Any]) -> dict[str, Any]:
        speculative = each["config"]["speculative"] | {"num_speculative_tokens": 10**19}
        return each | {"config": each["config"] | {"speculative": speculative}}

    manifest(longer)(folder)
    drafting = compare_capture(folder).arm("drafted").drafting
    assert drafting is not None
    assert drafting.memory_bound_speed_up is None


def test_quantiles_of_many_numbers_are_of_some_of_them_evenly() -> None:
    numbers = Numbers()
    for number in range(450_000):
        numbers.add(number)
    assert len(numbers.kept) <= 100_000
    middle = sorted(numbers.kept)[len(numbers.kept) // 2]
    assert middle == pytest.approx(225_000, rel=0.01)


class TestNotes:
    def test_equal_commands_are_an_a_a_test(self, tmp_path: Path) -> None:
        notes = compare_capture(of_equal_arms(requests=16).make(tmp_path)).notes
        assert any(each.startswith("arm other starts the same engine as the baseline: an A/A test") for each in notes)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"gpu_uuids": ["GPU-2"]}, 'GPUs is ["GPU-2"], in the baseline ["GPU-1"]'),
            ({"vllm": "0.32.0"}, "vLLM is 0.32.0, in the baseline 0.33.0"),
            ({"node": "other"}, "node is other, in the baseline node"),
            ({"config": {"async_scheduling": False}}, "async scheduling is off, in the baseline on"),
            (
                {"context": {"command": ["vllm", "--compilation-config", '{"mode": 0}']}},
                'graph mode is {"mode": 0}, in the baseline not known',
            ),
        ],
    )
    def test_say_what_else_differs(self, folder: Path, change: dict[str, Any], words: str) -> None:
        manifest(lambda each: each | change)(folder)
        assert any(words in each for each in compare_capture(folder).notes)

    def test_random_prompts_are_said(self, folder: Path) -> None:
        everywhere(
            lambda each: each | {"workload": each["workload"] | {"prompts": {"synthetic": {"promptTokens": 8}}}}
        )(folder)
        assert any("prompts are random tokens" in each for each in compare_capture(folder).notes)

    def test_escapes_of_others_do_nothing(self, folder: Path) -> None:
        manifest(lambda each: each | {"model": "\x1b[2Jtiny"})(folder)
        assert all(each.isprintable() for each in compare_capture(folder).notes)


def test_a_retry_that_left_other_folders_is_no_repetition(folder: Path) -> None:
    (folder / "drafted" / "2.part-123").mkdir()
    (folder / "drafted" / "0").mkdir()
    (folder / ".hidden").mkdir()
    assert replace(MadeCapture()).repetitions == len(compare_capture(folder).arm("drafted").repetitions)
