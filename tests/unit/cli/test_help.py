"""Help, completion and colours: what all commands share."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from specdecode_operator.cli.main import app
from tests.unit.cli.conftest import Specdecode

BIN = Path(sys.executable).parent


def commands(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    """All commands, those below others too."""
    for name, command in group.commands.items():
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)


ALL = [(), *commands(typer.main.get_command(app))]


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_help_is_short_and_names_no_type_of_python(specdecode: Specdecode, command: tuple[str, ...]) -> None:
    result = specdecode(*command, "-h")
    assert result.exit_code == 0
    assert result.stdout == specdecode(*command, "--help").stdout
    named = re.findall(r"<[\w ]+[\[>]|install-completion|show-completion", result.stdout)
    assert not named, "values are called what they are to people"
    assert "--help" in result.stdout


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_help_has_whole_names_in_80_columns(specdecode: Specdecode, command: tuple[str, ...]) -> None:
    text = specdecode(*command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    shown = [each for each in found.params if not each.hidden and not str(each.name).endswith("_completion")]
    names = [name for each in shown for name in (*each.opts, *each.secondary_opts)]
    assert not [name for name in names if name.startswith("--") and not re.search(rf"{name}\b", text)]


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_help_has_its_lines_for_80_columns(command: tuple[str, ...]) -> None:
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    # The library joins the lines of the first paragraph alone: others end where the docstring's end.
    _, *paragraphs = inspect.cleandoc(found.help or "").split("\n\n")
    lines = [line for each in paragraphs if "\n" in each for line in each.splitlines()[:-1]]
    assert not [line for line in lines if len(line) > 78]


def completed(script_of: str, *words: str) -> list[str]:
    """What bash would offer for the last of some words."""
    line = " ".join(words)
    script = f"""source <(specdecode completion {script_of})
        COMP_WORDS=({line} {"''" if not words[-1] else ""}); COMP_CWORD={len(words) - 1}
        _specdecode_completion specdecode; printf '%s\\n' "${{COMPREPLY[@]}}" """
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_options_and_values() -> None:
    assert completed("bash", "specdecode", "pl") == ["plan"]
    assert "--matrix" in completed("bash", "specdecode", "plan", "--ma")
    assert completed("bash", "specdecode", "plan", "-o", "js") == ["json"]
    assert completed("bash", "specdecode", "plan", "--gpu", "H2") == ["H20", "H200"]
    assert completed("bash", "specdecode", "plan", "--method", "eag") == ["eagle", "eagle3"]
    offered = completed("bash", "specdecode", "plan", "--model", "meta-llama/Llama-3.1-70")
    assert "meta-llama/Llama-3.1-70B-Instruct" in offered


@pytest.mark.parametrize(
    ("shell", "words"), [("zsh", "#compdef specdecode"), ("fish", "complete --command specdecode")]
)
def test_other_shells_have_scripts_of_their_own(specdecode: Specdecode, shell: str, words: str) -> None:
    result = specdecode("completion", shell)
    assert result.exit_code == 0
    assert words in result.stdout
    assert "_SPECDECODE_COMPLETE" in result.stdout


def test_a_shell_that_is_not_known_is_refused_with_those_that_are(specdecode: Specdecode) -> None:
    result = specdecode("completion", "csh")
    assert result.exit_code == 2
    assert all(shell in result.stderr for shell in ("bash", "zsh", "fish"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("replay", "serve", "t", "--mode", "model"),
            "'--mode': 'model' is not one of 'steps', 'modelled', 'emulated'.",
        ),
        (("replay", "serve", "t", "--port", "99999"), "'--port': 99999: must be less than or equal to 65535"),
        (("replay", "serve", "t", "--seed", "x"), "'--seed': x: must be a valid integer"),
        (("plan", "-o", "xml"), "'xml' is not one of 'table', 'json', 'yaml', 'markdown'."),
    ],
)
def test_a_value_that_cannot_be_is_told_in_plain_words(
    specdecode: Specdecode, arguments: tuple[str, ...], said: str
) -> None:
    result = specdecode(*arguments)
    assert result.exit_code == 2
    text = " ".join(result.stderr.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert said in text
    assert "Value error" not in text
