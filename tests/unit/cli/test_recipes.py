"""The commands of vllm-project/recipes that speculate: each is imported, and most reach a memory verdict offline."""

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from specdecode_operator.cli.options import ExitCode

COMMANDS = json.loads((Path(__file__).parent / "import_data/recipe-commands.json").read_text())["commands"]
VERDICTS = {ExitCode.OK, ExitCode.TIGHT, ExitCode.DOES_NOT_FIT}
LEAST_WITH_VERDICT = 54


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[tuple[int, int | None]]]:
    """Exit codes of import and of the plan of its object, by recipe; None where import printed no object."""
    folder, found = tmp_path_factory.mktemp("recipes"), defaultdict(list)
    for number, each in enumerate(COMMANDS):
        command = shlex.split(each["command"])
        imported = CliRunner().invoke(app, ["import", "--engine-version", "0.33", "--", *command])
        path, planned = folder / f"{number}.yaml", None
        if imported.stdout:
            path.write_text(imported.stdout)
            planned = CliRunner().invoke(app, ["plan", "-f", str(path)])
        for result in (imported, planned):
            assert result is None or isinstance(result.exception, SystemExit | None), each["command"]
        found[each["recipe"]].append((imported.exit_code, None if planned is None else planned.exit_code))
    return found


def test_there_are_all_commands_of_all_recipes_that_speculate() -> None:
    assert (len(COMMANDS), len({each["recipe"] for each in COMMANDS})) == (64, 56)


def test_every_command_becomes_an_object(answers: Mapping[str, list[tuple[int, int | None]]]) -> None:
    assert [recipe for recipe, codes in answers.items() if any(planned is None for _, planned in codes)] == []


def test_most_recipes_reach_a_memory_verdict_offline(answers: Mapping[str, list[tuple[int, int | None]]]) -> None:
    reached = {recipe for recipe, codes in answers.items() if any(planned in VERDICTS for _, planned in codes)}
    without = sorted(set(answers) - reached)
    assert len(reached) >= LEAST_WITH_VERDICT, without
