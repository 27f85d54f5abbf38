"""The table and the file of `./just bench`, unknown names, and parts that fail."""

import json
from pathlib import Path

import pytest

from bench import command
from bench.figures import Figure, Row, Run, at_least, at_most, growth, peer, read_runs, write_run
from tests.support.documents import ROOT

MACHINE = {"date": "2026-11-23 10:00 UTC"}
FOUND = {
    "sizing.speed": [Figure("estimates", 40_000.0, "1/s", at_least(50_000)), Figure("matrix", 12.5, "ms", at_most(20))],
    "capture.report": [Figure("memory", 130.0, "MiB", peer(106, "LeaderWorkerSet 0.8.0, same run"), "of one")],
}


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(part: str) -> list[Figure]:
        if part not in FOUND:
            raise OSError("no disk")
        return FOUND[part]

    monkeypatch.setattr(command, "measure", measure)


@pytest.mark.usefixtures("_measured")
def test_table_shows_each_figure_with_its_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "sizing.speed,capture.report"]) == 0

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        "sizing.speed estimates 40,000 1/s ≥ 50,000 1/s (our aim) NO",
        "sizing.speed matrix 12.5 ms ≤ 20.0 ms (our aim) yes",
        "capture.report memory 130 MiB peer 106 MiB (LeaderWorkerSet 0.8.0, same run) of one",
    ]


@pytest.mark.usefixtures("_measured")
def test_part_measured_again_replaces_only_its_own_rows(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_run(file, Run(MACHINE, [Row(part, Figure("old", 1)) for part in ("sizing.speed", "replay.speed")]))

    command.main(["--only", "sizing.speed", "--json", str(file)])

    old, new = read_runs(file)
    assert [row.figure.name for row in old.rows] == ["old"]
    assert [row.part for row in old.rows] == ["replay.speed"]
    assert [row.figure for row in new.rows] == FOUND["sizing.speed"]
    assert {"date", "commit", "cores", "cpu", "memory_gib", "kernel", "python", "load_at_start"} <= new.machine.keys()
    (_, run) = json.loads(file.read_text())["runs"]
    assert run["figures"][0]["command"] == "./just bench --only sizing.speed"


@pytest.mark.usefixtures("_measured")
def test_failed_part_is_reported_and_others_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "replay.speed,capture.report"]) == 1

    output = capsys.readouterr().out
    assert "not measured" in output
    assert "OSError: no disk" in output
    assert "130 MiB" in output


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("sizng", "'sizng' is neither an area nor a part: did you mean sizing?"),
        ("sizing,", "'' is neither an area nor a part: use some of sizing, "),
    ],
)
def test_unknown_part_name_is_reported_before_measuring(
    capsys: pytest.CaptureFixture[str], only: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", only])

    output = capsys.readouterr()
    assert f"--only: {said}" in output.err
    assert not output.out


def test_every_part_is_a_module_that_has_figures() -> None:
    for part in (*command.PARTS, *command.LONG_PARTS):
        module, function = command.SECOND_WAYS.get(part, (part, "figures"))
        file = ROOT / "tools/bench" / f"{module.replace('.', '/')}.py"
        assert f"\ndef {function}() -> Iterator[Figure]:" in file.read_text(), file


def test_growth_is_the_slope_of_the_logarithms() -> None:
    assert growth("reading", "s", {10: 2.0, 20: 8.0, 40: 32.0}).value == pytest.approx(2)
    assert growth("reading", "s", {10: 3.0, 20: 3.0, 40: 3.0}).value == pytest.approx(0)
