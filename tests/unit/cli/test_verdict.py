"""`specdecode verdict`: a line a block in, a line a block out, and no line that stops the batch."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specdecode_operator.cli import verdict
from specdecode_operator.cli.verdict import VerdictOutput
from tests.support.paired_blocks import Pair, pairs
from tests.unit.cli.conftest import Specdecode

OK, INVALID = 0, 2
GOOD = {"series": "a", "block": 1, "baseline": 812.3, "candidate": 901.0}


def lines(series: Any, blocks: list[Pair]) -> list[dict[str, Any]]:
    return [
        {"series": series, "block": number, "baseline": baseline, "candidate": candidate}
        for number, (baseline, candidate) in enumerate(blocks, start=1)
    ]


def verdicts(specdecode: Specdecode, *cases: dict[str, Any] | str, exit_code: int = OK) -> list[dict[str, Any]]:
    stdin = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in cases)
    result = specdecode("verdict", "--in", "-", "--out", "-", stdin=stdin)
    assert result.exit_code == exit_code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_block_gets_one_verdict_line(specdecode: Specdecode, tmp_path: Path) -> None:
    blocks, out = tmp_path / "pairs.jsonl", tmp_path / "verdicts.jsonl"
    given = lines("a", pairs(40, 0.1, 0.03, Random(1)))
    blocks.write_text("".join(json.dumps(each) + "\n" for each in given))
    result = specdecode("verdict", "--in", blocks, "--out", out)
    assert (result.exit_code, result.stdout) == (OK, "")
    assert "a: Pays after 40 blocks: ratio 1.1" in result.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["series"], each["block"], each["level"]) for each in answers] == [
        ("a", number, 0.95) for number in range(1, 41)
    ]
    assert answers[0]["verdict"] == "Inconclusive"
    assert (answers[0]["low"], answers[0]["high"]) == (None, None)
    assert answers[-1]["verdict"] == "Pays"
    assert 1 < answers[-1]["low"] < answers[-1]["ratio"] < answers[-1]["high"]


def test_series_in_one_input_are_independent(specdecode: Specdecode) -> None:
    series: list[str | int | None] = ["a", "1", 1, None]
    apart = [lines(name, pairs(20, 0.1 * index, 0.02, Random(index))) for index, name in enumerate(series)]
    together = [line for row in zip(*apart, strict=True) for line in row]
    answers = verdicts(specdecode, *together)
    for index, alone in enumerate(apart):
        assert answers[index :: len(series)] == verdicts(specdecode, *alone)


def test_series_may_be_unnamed_and_skip_block_numbers(specdecode: Specdecode) -> None:
    answers = verdicts(specdecode, *({"block": 3 * n, "baseline": 100, "candidate": 120 + n} for n in range(9)))
    assert [each["block"] for each in answers] == list(range(0, 27, 3))
    assert {each["series"] for each in answers} == {None}
    assert answers[-1]["verdict"] == "Pays"


BAD: list[tuple[dict[str, Any] | str, str]] = [
    ("no json", "is not valid JSON at column 1"),
    ("[1]", "must be an object with series, block, baseline, candidate"),
    ("null", "null: must be an object"),
    ('{"series": "a", "block": 2, "baseline": NaN, "candidate": 1}', "baseline: nan: set it to the arm's goodput"),
    ('{"series": "a", "block": 2, "baseline": 1, "candidate": Infinity}', "candidate: inf: set it to"),
    ('{"series": "a", "block": 2, "baseline": 1e999, "candidate": 1}', "the number 1e999 is too large"),
    ({**GOOD, "block": 2, "baseline": -1}, "baseline: -1: set it to the arm's goodput"),
    ({**GOOD, "block": 2, "baseline": 10**400}, "has 401 digits"),
    ({**GOOD, "block": 2, "candidate": "901.0"}, 'candidate: "901.0": set it to'),
    ({**GOOD, "block": 2, "candidate": True}, "candidate: true: set it to"),
    ({**GOOD, "block": 2, "candidate": None}, "candidate: null: set it to"),
    ({"series": "a", "block": 2, "baseline": 1}, "candidate: is missing: "),
    ({"series": "a", "baseline": 1, "candidate": 1}, "block: is missing: "),
    ({**GOOD, "block": 2, "candidat": 1}, "candidat: 1: unknown field: use series, block"),
    ({**GOOD, "block": "2"}, 'block: "2": set it to'),
    ({**GOOD, "block": 2.5}, "block: 2.5: set it to the block's number"),
    ({**GOOD, "block": 1e300}, "block: 1e+300: set it to the block's number"),
    ({**GOOD, "block": 2**53 + 1}, "block: 9007199254740993: set it to the block's number"),
    ({**GOOD, "block": -1}, "block: -1: set it to the block's number"),
    ({**GOOD, "block": 1}, "block: 1: must be larger than the previous block of the series, "),
    ({**GOOD, "block": 0}, "block: 0: must be larger than the previous block of the series, "),
    ({**GOOD, "block": 2, "series": ["a"]}, 'series: ["a"]: use a name of at most 200 characters'),
    ({**GOOD, "block": 2, "series": "a" * 201}, "use a name of at most 200 characters"),
    ('{"block": 1, "block": 2, "baseline": 1, "candidate": 1}', "the key block is there twice"),
    ("[" * 50_000, "is nested more than 100 deep"),
    ({**GOOD, "block": 2, "series": "x" * 10_000_000}, "has more than 64 KiB"),
]


def test_bad_line_gets_an_error_and_affects_no_other_line(specdecode: Specdecode) -> None:
    good = lines("a", pairs(len(BAD) + 1, 0.1, 0.02, Random(2)))
    mixed = [good[0], *(line for (bad, _), block in zip(BAD, good[1:], strict=True) for line in (bad, block))]
    # Blocks of the good ones grow, but bad ones name the second: where they are counted, the next would be refused.
    answers = verdicts(specdecode, *mixed, exit_code=INVALID)
    assert answers[::2] == verdicts(specdecode, *good)
    for number, ((bad, words), answer) in enumerate(zip(BAD, answers[1::2], strict=True), start=1):
        assert set(answer) == {"series", "block", "error"}, bad
        assert answer["error"].startswith(f"line {2 * number}: "), bad
        assert words in answer["error"], bad
        assert len(answer["error"]) < 400


def test_error_names_series_and_block(specdecode: Specdecode) -> None:
    (answer,) = verdicts(specdecode, {**GOOD, "baseline": -1}, exit_code=INVALID)
    assert (answer["series"], answer["block"]) == ("a", 1)
    (answer,) = verdicts(specdecode, {**GOOD, "series": {}, "block": "x"}, exit_code=INVALID)
    assert (answer["series"], answer["block"]) == (None, None)


def test_refused_block_may_be_sent_again(specdecode: Specdecode) -> None:
    answers = verdicts(specdecode, {**GOOD, "candidate": -1}, GOOD, exit_code=INVALID)
    assert answers[1]["verdict"] == "Inconclusive"


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MOST_SERIES", 1, "series: b: exceeds the maximum of 1 series: divide the input"),
        ("MOST_BLOCKS", 1, "block: 2: exceeds the maximum of 1 blocks per series: make blocks longer"),
        ("MOST_BLOCKS_IN_ALL", 2, "block: 2: exceeds the maximum of 2 blocks in all series: divide the input"),
    ],
)
def test_number_of_series_and_blocks_is_limited(
    specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, words: str
) -> None:
    monkeypatch.setattr(verdict, limit, value)
    found = verdicts(specdecode, GOOD, {**GOOD, "series": "b"}, {**GOOD, "block": 2}, exit_code=INVALID)
    (error,) = (each["error"] for each in found if "error" in each)
    assert error.endswith(f": {words}")


def test_summary_lists_only_the_first_20_series(specdecode: Specdecode) -> None:
    def told(series: int) -> list[str]:
        stdin = "".join(json.dumps({**GOOD, "series": n}) + "\n" for n in range(series))
        return specdecode("verdict", "--in", "-", "--out", "-", stdin=stdin).stderr.splitlines()

    many = told(30)
    assert many[0] == "0: Inconclusive after 1 block: ratio 1.109, no interval"
    assert many[-1] == "and 10 more series"
    assert many[:-1] == told(20)


@pytest.mark.parametrize("level", ["0.3", "1", "95", "nan"])
def test_invalid_level_is_refused(specdecode: Specdecode, level: str) -> None:
    result = specdecode("verdict", "--in", "-", "--out", "-", "--level", level, stdin="")
    assert result.exit_code == INVALID
    assert "--level" in result.stderr


def test_unusable_files_are_named(specdecode: Specdecode, tmp_path: Path) -> None:
    pairs_file = tmp_path / "pairs.jsonl"
    assert f"--in: {pairs_file}: " in specdecode("verdict", "--in", pairs_file, "--out", "-").stderr
    pairs_file.write_text(json.dumps(GOOD))
    result = specdecode("verdict", "--in", pairs_file, "--out", pairs_file)
    assert (result.exit_code, "is also the file of --in" in result.stderr) == (INVALID, True)
    assert specdecode("verdict", "--in", pairs_file, "--out", tmp_path / "no" / "v").exit_code == INVALID


LINE = b'{"series": "%s", "block": 1, "baseline": 1, "candidate": 2}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # Its beginning alone would be a block, and has no more characters than a line may have bytes.
        ((LINE % "é".encode()).ljust(verdict.MOST_LINE_BYTES + 1) + b"no block", "has more than 64 KiB"),
        # Both would read as one series.
        (LINE % b"\xff", "is not UTF-8 text"),
        (LINE % b"\xfe", "is not UTF-8 text"),
    ],
)
def test_line_that_is_too_long_or_not_utf8_is_an_error(
    specdecode: Specdecode, tmp_path: Path, line: bytes, words: str
) -> None:
    (tmp_path / "pairs.jsonl").write_bytes(line + b"\n")
    result = specdecode("verdict", "--in", tmp_path / "pairs.jsonl", "--out", "-")
    (answer,) = map(json.loads, result.stdout.splitlines())
    assert answer == {"series": None, "block": None, "error": answer["error"]}
    assert words in answer["error"]


def test_read_error_is_reported_for_the_input_file(specdecode: Specdecode, tmp_path: Path) -> None:
    result = specdecode("verdict", "--in", "/proc/self/mem", "--out", tmp_path / "verdicts.jsonl")
    assert (result.exit_code, "--in: /proc/self/mem: Input/output error" in result.stderr) == (INVALID, True)
    assert not list(tmp_path.iterdir())


def test_output_lines_match_the_schema(specdecode: Specdecode) -> None:
    for answer in verdicts(specdecode, *lines("a", [(1.0, 2.0)] * 9), "bad", exit_code=INVALID):
        assert VerdictOutput.model_validate(answer).model_dump(mode="json") == answer


def test_verdicts_are_printed_while_the_pipe_is_open() -> None:
    command = [sys.executable, "-m", "specdecode_operator", "verdict", "--in", "-", "--out", "-"]
    # Else no answer would wait in a buffer.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin
        assert process.stdout
        for number in (1, 2):
            process.stdin.write(json.dumps({**GOOD, "block": number}).encode() + b"\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0], "no answer while the pipe is open"
            assert json.loads(process.stdout.readline())["block"] == number
        process.stdin.close()
        assert process.wait(60) == OK
