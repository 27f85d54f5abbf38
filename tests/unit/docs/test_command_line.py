"""docs/reference/cli.md describes the command line as it is."""

import re

import pytest

from bench.documents.option_tables import commands, option_table
from specdecode_operator.cli.options import ExitCode
from specdecode_operator.sizing.estimate_fields import CASE_SPELLINGS
from tests.support.documents import ROOT, sections, table

DOCUMENT = ROOT / "docs/reference/cli.md"


COMMANDS = commands()
EXPLAINED = sorted(set(COMMANDS) - {"crds"})


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_options_of_a_command_are_those_in_its_section(name: str) -> None:
    section = sections(DOCUMENT)[name]
    options = [set(each.opts) for each in COMMANDS[name].params if each.param_type_name == "option"]
    known = {spelling for option in options for spelling in option} | {"--help"}
    (usage, *_) = re.findall(r"^```\n(specdecode .*?)^```$", section, re.MULTILINE | re.DOTALL)
    spelling = r"(?<![\w-])--?[A-Za-z][a-z-]*"
    assert set(re.findall(spelling, usage)) <= known, f"specdecode {name} has no such option"
    (own, *_) = re.split(r"^### ", section, maxsplit=1, flags=re.MULTILINE)
    rows = [row for row in own.splitlines() if row.startswith("| `-")]
    tabled = {found for row in rows for found in re.findall(spelling, row.split("|")[1])}
    assert tabled <= known, f"the table of {name} has an option of another command"
    for option in options:
        assert option & set(re.findall(spelling, section)), f"cli.md lacks {'/'.join(sorted(option))} of {name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_table_of_its_options(name: str) -> None:
    """That they are up to date is asked of all generated parts."""
    assert f"<!-- generated: options of {name} -->" in sections(DOCUMENT)[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_table_has_each_option_once_with_its_help(name: str) -> None:
    rows = [row.split(" | ") for row in option_table(name).splitlines() if row.startswith("| `")]
    assert len(rows) == len(COMMANDS[name].params)
    assert all(len(row) == 4 for row in rows), "a bar in a cell would be a column"
    assert [row[0] for row in rows if row[3].strip(" |") == ""] == [], "options without a help"


def test_the_introduction_lists_the_commands_that_use_a_cluster() -> None:
    using = [
        f"`{name}`"
        for name, command in COMMANDS.items()
        if any("--context" in each.opts and "kubeconfig" in each.help for each in command.params)
    ]
    *others, last = sorted(using)
    listed = f"These commands use the cluster of your kubeconfig: {', '.join(others)} and {last}."
    assert listed in " ".join(DOCUMENT.read_text().split())


def test_exit_codes_are_the_documented_ones() -> None:
    documented = {int(row[0]) for row in table(DOCUMENT, "exit code") if row[0].isdigit()}
    assert documented == {code.value for code in ExitCode}


def test_the_keys_of_a_case_are_the_documented_ones() -> None:
    rows = table(DOCUMENT, "key")
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[0])} == set(CASE_SPELLINGS)
