"""`./just bench-history` reports figures that became worse, and only those that can be compared."""

import json
from pathlib import Path

import pytest

from bench import history
from bench.figures import Bound, Figure, Row, Run, at_least, peer, write_run

GROUPS = "LeaderWorkerSet 0.8.0, same run"
NOISE = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01)


class Bench:
    """Nights of the benchmarks, each added to one history."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self._run, self._capsys = folder / "history.jsonl", folder / "run.json", capsys
        self._nights = 0

    def night(self, *figures: Figure, add: bool = True, cpu: str = "AMD EPYC") -> tuple[int, str]:
        """Return the exit code and the output of one night."""
        self._nights += 1
        self._run.unlink(missing_ok=True)
        machine = {"date": f"night {self._nights}", "cpu": cpu}
        write_run(self._run, Run(machine, [Row("operator.scale", figure) for figure in figures]))
        return self.compare(add=add)

    def compare(self, *, add: bool = True) -> tuple[int, str]:
        """Compare the last run."""
        code = history.main([str(self._run), str(self.file), *["--add"] * add])
        output = self._capsys.readouterr()
        return code, output.out + output.err

    @property
    def lines(self) -> list[str]:
        """Lines of the history."""
        return self.file.read_text().splitlines() if self.file.exists() else []


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


def create(ratio: float, groups_s: float = 10.0, source: str = GROUPS) -> Figure:
    return Figure("create, until all children are there", ratio * groups_s, "s", peer(groups_s, source))


def table(output: str) -> list[list[str]]:
    """Return the cells of the rows below the head."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("|")]
    return rows[2:]


def test_ratio_that_is_12_percent_worse_fails_and_5_percent_does_not(bench: Bench) -> None:
    for noise in NOISE:
        bench.night(create(0.8 * noise))

    assert bench.night(create(0.8 * 1.05), add=False)[0] == 0
    code, output = bench.night(create(0.8 * 1.12))

    assert code == 1
    ((part, name, old, new, worse, against),) = table(output)
    assert (part, name, against) == (
        "operator.scale",
        "create, until all children exist",
        "LeaderWorkerSet 0.8.0, same run",
    )
    assert (old, new, worse) == ("0.800 x", "0.896 x", "12%")
    assert len(bench.lines) == 8, "a run with a regression belongs to the history"


def test_slower_machine_raises_no_alarm(bench: Bench) -> None:
    for noise in NOISE:
        bench.night(create(0.8 * noise), Figure("CPU time for it", 3.0, "s"))

    code, output = bench.night(create(0.8, groups_s=25.0), Figure("CPU time for it", 7.5, "s"), cpu="Xeon")

    assert code == 0
    assert "0 of 1 figures" in output
    assert "(times and shares without a peer): 1" in output


def test_spread_of_earlier_nights_hides_a_small_difference_only(bench: Bench) -> None:
    for ratio in (0.7, 0.9, 0.8, 1.0, 0.75, 0.85, 0.8):
        bench.night(create(ratio))

    assert bench.night(create(0.95), add=False)[0] == 0, "19 % above the median, but not unusual"
    assert bench.night(create(1.6), add=False)[0] == 1


@pytest.mark.parametrize(
    ("unit", "against", "better", "worse"),
    [
        ("an object", None, 10.0, 14.0),
        ("bytes", None, 500.0, 640.0),
        ("of 26 logs", None, 0.0, 1.0),
        ("", at_least(1.0), 3.0, 2.0),
        ("1/s of CPU", peer(100.0, "AIConfigurator"), 300.0, 200.0),
        ("events by CPU s", peer(100.0, "ASGI"), 90.0, 60.0),
    ],
)
def test_each_kind_of_figure_is_compared_in_its_direction(
    bench: Bench, unit: str, against: Bound | None, better: float, worse: float
) -> None:
    def night(value: float) -> int:
        return bench.night(Figure("figure", value, unit, against), add=False)[0]

    for _ in range(3):
        bench.night(Figure("figure", better, unit, against))
    assert night(worse) == 1
    assert night(better) == 0
    for _ in range(3):
        bench.night(Figure("figure", worse, unit, against))
    assert night(better) == 0


def test_fewer_than_three_nights_are_not_enough_to_compare(bench: Bench) -> None:
    code, output = bench.night(create(0.5))
    assert code == 0
    assert "fewer than 3 earlier nights have a value: 1" in output
    assert "New" not in output, "in the first run, each figure is new"

    bench.night(create(0.5))
    assert bench.night(create(2.0), add=False)[0] == 0
    bench.night(create(0.5))
    assert bench.night(create(2.0), add=False)[0] == 1


def test_only_the_last_seven_nights_count(bench: Bench) -> None:
    for ratio in (*[1.0] * 7, *[0.5] * 7):
        bench.night(create(ratio))

    assert bench.night(create(1.0))[0] == 1


def test_new_missing_and_unmeasured_figures_are_named_and_do_not_fail(bench: Bench) -> None:
    for _ in range(3):
        bench.night(create(0.8), Figure("API calls", 12.0, "an object"))

    renamed = Figure("API requests", 20.0, "an object")
    code, output = bench.night(create(2.0, source="LeaderWorkerSet 0.9.0, same run"), renamed, Figure("failed", None))

    assert code == 0, "the ratio to another version of the peer is another figure"
    listed = {line.split(": ", 1)[0]: line for line in output.splitlines() if line.startswith("- ")}
    assert "API requests (an object)" in listed["- New"]
    assert "LeaderWorkerSet 0.9.0" in listed["- New"]
    assert "API calls (an object)" in listed["- Missing"]
    assert "LeaderWorkerSet 0.8.0" in listed["- Missing"]


def test_parts_that_were_not_measured_are_not_reported_as_missing(bench: Bench, tmp_path: Path) -> None:
    bench.night(create(0.8))
    other = tmp_path / "other.json"
    write_run(other, Run({}, [Row("capture.report", Figure("memory", 140.0, "MiB"))]))

    assert history.main([str(other), str(bench.file)]) == 0
    assert "Missing" not in bench.compare()[1]


def test_repeated_job_gives_the_same_result_and_adds_no_line(bench: Bench) -> None:
    for _ in range(3):
        bench.night(create(0.8))
    first = bench.night(create(1.0))

    assert bench.compare() == first
    assert len(bench.lines) == 4


@pytest.mark.parametrize("broken", ["truncated", "{}", "[1]", '{"runs": [{"figures": []}]}', '{"runs": 3}', ""])
def test_broken_line_of_the_history_gives_one_error_and_adds_nothing(bench: Bench, broken: str) -> None:
    for _ in range(3):
        bench.night(create(0.8))
    lines = bench.lines
    lines[1] = lines[1][:100] if broken == "truncated" else broken
    bench.file.write_text("\n".join(lines) + "\n")

    code, output = bench.night(create(2.0))

    assert code == 2
    assert output.count("\n") == 1
    assert f"{bench.file}: line 2: " in output
    assert bench.lines == lines


def test_history_that_is_not_text_gives_one_error(bench: Bench) -> None:
    bench.file.write_bytes(b"\xff")

    code, output = bench.night(create(1.0))

    assert (code, output.count("\n")) == (2, 1)
    assert f"{bench.file}: " in output
    assert bench.file.read_bytes() == b"\xff"


@pytest.mark.parametrize("text", [None, "not JSON", '{"runs": []}', "\udcff"])
def test_run_file_without_runs_gives_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "run.json"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))

    assert history.main([str(file), str(tmp_path / "history.jsonl"), "--add"]) == 2

    output = capsys.readouterr().err
    assert output.startswith(f"bench-history: {file}: ")
    assert output.count("\n") == 1
    assert not (tmp_path / "history.jsonl").exists()


def test_a_night_keeps_values_and_machines_of_all_its_runs(bench: Bench) -> None:
    bench.night(create(0.8), Figure("idle CPU", 1.5, "% of a core"))

    (line,) = bench.lines
    (run,) = json.loads(line)["runs"]
    assert run["machine"]["cpu"] == "AMD EPYC"
    assert [(row["name"], row["value"]) for row in run["figures"]][1] == ("idle CPU", 1.5)
