"""What is wrong with a command line is told before a cluster is started."""

from pathlib import Path
from typing import NoReturn

import pytest

from hunt import __main__ as command


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> NoReturn:
        raise AssertionError("a cluster is started")

    monkeypatch.setattr(command, "stage", start)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("hunt --minutes -1", "argument --minutes: '-1': use a number above 0"),
        ("hunt --minutes 0", "argument --minutes: '0': use a number above 0"),
        ("soak --minutes nan", "argument --minutes: 'nan': use a number above 0"),
        ("soak --objects 0", "argument --objects: '0': use a whole number from 1 on"),
        ("hunt --fault 5", "argument --fault: 5: needs --seeded, add it"),
        ("hunt --seeded --fault 99", "argument --fault: '99': use the number of a seeded fault, from 0 to 29"),
        ("hunt --seeded --fault -1", "argument --fault: '-1': use the number of a seeded fault, from 0 to 29"),
        ("hunt --seeded --repeat finding.yaml", "--repeat: not allowed with argument --seeded"),
        ("hunt --repeat nofile.yaml", "argument --repeat: 'nofile.yaml': No such file or directory: name a file that"),
        ("hunt --repeat list.yaml", "argument --repeat: 'list.yaml': holds no finding: name a file that"),
        ("hunt --finding no/such.yaml", "argument --finding: 'no/such.yaml': there is no folder no: make it, or"),
        ("hunt --bogus", "unrecognized arguments: --bogus: use those of the usage above"),
        ("hunt --seed x", "argument --seed: 'x': use a whole number, such as 7"),
        ("hunt --name x/y", "argument --name: cluster name 'x/y': use lower case letters, digits and dashes, 40 at"),
        ("soak --name=", "argument --name: cluster name '': use lower case letters, digits and dashes, 40 at most"),
    ],
)
def test_a_wrong_one_is_told_with_the_usage_of_its_command(
    options: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("beats: [1]\n")
    Path("finding.yaml").write_text("beats: []\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(options.split())
    told = capsys.readouterr().err
    assert told.startswith(f"usage: ./just {options.partition(' ')[0]} [-h]")
    assert said in told
