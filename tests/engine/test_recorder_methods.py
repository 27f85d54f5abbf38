"""Every way to draft that vLLM has: what the recorder writes is what happened, and becomes files that hold."""

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from specdecode_operator.capture.files.formats import EngineCounters
from specdecode_operator.capture.files.segments import list_segments
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job.finish import Asked, Published, Run, finish
from specdecode_operator.capture.job.pod_files import Places
from tests.engine import suffix_package
from tests.engine.engine_process import Engine
from tests.engine.recorder_checks import (
    SPECULATION,
    assert_as_observed,
    assert_whole,
    chunks_of,
    lines_of,
    requests_by_name,
    speculation,
    speculation_of,
)
from tests.engine.recorder_clients import Answer, Question, ask_all, prompt
from tests.engine.recorder_server import Line, Server, serving
from tests.engine.shared_prefixes import assert_found, block_tokens, pairs
from tests.support.recordings import read_lines_of, write_lines
from tests.support.waiting import eventually

LEAVES_AFTER = 3
MAX_STOP_STRINGS = 4
"""vllm/envs.py VLLM_MAX_STOP_STRINGS."""

REFUSALS = {
    "ngram_gpu": "Found no NVIDIA driver on your system",
    "dspark": "Model Runner V1 does not support: dspark speculative decoding",
}
"""Methods that the CPU build of vLLM 0.32 does not start with, and what it says."""


@dataclass(frozen=True)
class Method:
    """A way to draft.

    Attributes
    ----------
    drafts
        Tokens that it proposes at most.
    head, target
        Which models of tiny_heads.py draft, and are drafted for.
    foresees
        Whether some of what it proposes is accepted for sure.
    more
        What else the speculative config says.
    """

    name: str
    drafts: int = 3
    head: str | None = None
    target: str = "target"
    foresees: bool = True
    more: Line = field(default_factory=dict)

    def __str__(self) -> str:
        """Return its name, and that of its head where that is another."""
        return self.name if self.head in (None, "draft", self.name) else f"{self.name}-{self.head}"

    def config(self, models: Path) -> Line:
        """Return the speculative config."""
        config: Line = {"method": self.name, "num_speculative_tokens": self.drafts} | self.more
        if self.name == "ngram_gpu":
            config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return config | ({"model": str(models / self.head)} if self.head else {})


IN_PARALLEL: Line = {"parallel_drafting": True}
METHODS = (
    Method("draft_model", head="draft"),
    Method("draft_model", head="pard", more=IN_PARALLEL),
    Method("eagle3", head="p-eagle", more=IN_PARALLEL),
    Method("eagle", head="eagle"),
    Method("eagle3", head="eagle3"),
    Method("medusa", head="medusa"),
    Method("mtp", target="mimo"),
    Method("dflash", head="dflash", foresees=False),
    Method("suffix", drafts=8),
    Method("ngram_gpu"),
    Method("dspark", head="dflash"),
)


@pytest.fixture
def packages(method: Method) -> list[Path]:
    """Return what a method needs beside vLLM; skips where that is not installed."""
    if method.name != "suffix":
        return []
    package = suffix_package.PACKAGE.find()
    if package is None:
        pytest.skip("arctic-inference is not there: `.venv/bin/python -m tests.engine.suffix_package` builds it")
    return [package]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_recording_of_each_method_matches_the_observer(
    engine: Engine, heads: Path, packages: list[Path], tmp_path: Path, method: Method
) -> None:
    places = Places(tmp_path / "volume", "team", "demo", "uid-1")
    with serving_or_skip(engine, heads, tmp_path / "engine", method, packages) as server:
        zero_monotonic_s, zero_wall_s = time.monotonic(), time.time()
        questions = ordinary_questions()
        answers = ask_all(server.url, questions, at_once=6)
        cut_short = questions_cut_short(answers["stream-0"])
        more = [*ordinary_questions("later"), *cut_short]
        answers |= ask_all(server.url, more, at_once=6)
        questions += more
        sharing = pairs(block_tokens(server))
        for alike in zip(*sharing.values(), strict=True):
            answers |= ask_all(server.url, list(alike), at_once=1)
            questions += alike
        assert {answer.status for answer in answers.values()} == {200}
        eventually(lambda: len(lines_of(server, "request")) == len(questions), "all requests are written")
        eventually(lambda: lines_of(server, "step")[-1]["scheduler"]["num_running_reqs"] == 0, "the engine is idle")
        counted = server.counters()
        server.close_recording()

    records = requests_by_name(server)
    assert_whole(server)
    assert_ends_as_asked(records, questions)
    assert_found(method.name, block_tokens(server), list(sharing), records)
    assert_as_observed(server, {name: records[name] for name in records if records[name]["ended_by"] == "engine"})
    for question in cut_short:
        # What the engine did after it was told to stop is nobody's answer.
        record = records[question.name]
        assert chunks_of(record) == server.observed()[record["id"]][: len(record["chunk_s"])]

    drafted = speculation(lines_of(server, "step"))
    assert drafted == speculation_of(counted)
    if method.foresees:
        assert drafted[f"{SPECULATION}accepted_tokens_total"] > 0
        assert max(size for record in records.values() for size in record["chunk_tokens"]) > 1

    shutil.copytree(server.segments_folder, places.segments)
    write_lines(places.client_file, client_lines(questions, answers, records, zero_monotonic_s))
    published = publish(places, counted, zero_monotonic_s, zero_wall_s)
    assert_published_as_observed(published, places.final, server, records)
    assert published.summary.speculation is not None
    assert published.summary.speculation.accepted_tokens == drafted[f"{SPECULATION}accepted_tokens_total"]


@contextmanager
def serving_or_skip(
    engine: Engine, models: Path, folder: Path, method: Method, packages: list[Path]
) -> Iterator[Server]:
    """Serve with a method; skip where vLLM does not start with it and says so in the words that are known."""
    target = folder / "models"
    target.mkdir(parents=True)
    (target / "target").symlink_to(models / method.target)
    with ExitStack() as running:
        try:
            server = running.enter_context(
                serving(engine, target, folder, speculation=method.config(models), packages=packages)
            )
        except RuntimeError:
            words = REFUSALS.get(method.name)
            if words and words in (folder / "vllm.log").read_text():
                pytest.skip(f"not on the CPU: {words}")
            raise
        yield server


def ordinary_questions(name: str = "stream") -> list[Question]:
    """Return questions whose answers come to their full length."""
    return [Question(f"{name}-{number}", prompt(40 + number, number), max_tokens=60) for number in range(10)]


def questions_cut_short(known: Answer) -> list[Question]:
    """Return questions that a string ends, and some whose clients go.

    Parameters
    ----------
    known
        Answer to the first ordinary question, whose commonest letters are the strings: words of it need not come again,
        as the model's bf16 lets the same question go another way in another batch.
    """
    letters = Counter(re.findall("[a-z]", known.text)).most_common(MAX_STOP_STRINGS)
    stops = {"stop": [letter for letter, _ in letters], "include_stop_str_in_output": True}
    stopped = [Question(f"stopped-{number}", prompt(40), max_tokens=600, more=stops) for number in range(2)]
    leavers = [
        Question(f"leaver-{number}", prompt(50, number), max_tokens=900, leaves_after=LEAVES_AFTER)
        for number in range(3)
    ]
    return [*stopped, *leavers]


def assert_ends_as_asked(records: dict[str, Line], questions: list[Question]) -> None:
    """Fail unless there is a record of every question, with the end that it was to have."""
    assert records.keys() == {question.name for question in questions}
    ends = {"stopped": ("stop_string", "stop"), "leaver": ("abort", "abort")}
    for question in questions:
        record = records[question.name]
        wanted = ends.get(question.name.rsplit("-", 1)[0], ("engine", "length"))
        assert (record["ended_by"], record["finish_reason"]) == wanted, question.name
        if wanted[0] == "engine":
            assert sum(record["chunk_tokens"]) == question.max_tokens


def client_lines(
    questions: list[Question], answers: dict[str, Answer], records: dict[str, Line], zero_s: float
) -> list[Line]:
    """Return what the load generator would have written of these questions, in the order of sending."""
    lines = [
        {
            "id": question.name,
            "phase": "only",
            "index": index,
            "sent_ms": 1000 * (records[question.name]["arrival_monotonic_s"] - zero_s),
            "outcome": "cancelled" if question.leaves_after else "completed",
            "http_status": answers[question.name].status,
            "prompt_tokens": len(question.prompt),
            "max_tokens": question.max_tokens,
            "chunks": answers[question.name].chunks,
        }
        for index, question in enumerate(questions)
    ]
    return sorted(lines, key=lambda line: line["sent_ms"])


def publish(places: Places, counted: Counter[str], zero_monotonic_s: float, zero_wall_s: float) -> Published:
    """Merge, validate and publish as a capture's Job does."""
    counters = EngineCounters(
        generation_tokens=counted["vllm:generation_tokens_total"],
        drafts=counted[f"{SPECULATION}drafts_total"],
        draft_tokens=counted[f"{SPECULATION}draft_tokens_total"],
        accepted_tokens=counted[f"{SPECULATION}accepted_tokens_total"],
    )
    segments = list_segments(places.segments)
    run = Run(zero_monotonic_s=zero_monotonic_s, zero_wall_s=zero_wall_s, segments=segments, counters=counters)
    return finish(places, Asked(), run)


def assert_published_as_observed(published: Published, folder: Path, server: Server, records: dict[str, Line]) -> None:
    """Fail unless all gates passed, and sizes and gaps of the trace are those that the engine itself saw."""
    accounting = published.manifest.accounting
    assert accounting is not None
    assert accounting.mismatches == 0
    assert [name for name, gate in published.manifest.gates.items() if not gate.passed] == []
    assert {"engine_counters", "largest_chunk", "clock", "per_position"} <= published.manifest.gates.keys()
    assert validate_capture(folder).problems == []
    traced = {line["request_id"]: line for line in read_lines_of(folder / "trace.jsonl")[1:]}
    assert traced.keys() == records.keys()
    for name, line in traced.items():
        stamps, sizes = zip(*server.observed()[records[name]["id"]][: len(line["itl_ms"]) + 1], strict=True)
        gaps = [1000 * (after - before) for before, after in pairwise(stamps)]
        assert line["itl_ms"] == pytest.approx(gaps, abs=2e-4), name
        assert line.get("itl_tokens", [1] * len(gaps)) == list(sizes[1:]), name
        assert line["output_tokens"] == sum(sizes), name
