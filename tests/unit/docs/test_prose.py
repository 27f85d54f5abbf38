"""The check of the English of pages and messages."""

from pathlib import Path

from bench.documents.prose import matches, over_budget, prose, texts_in

GOOD = "# Page\n\n" + "The operator writes a plan before a pod starts. " * 60
BAD = GOOD + "Whatever is told beside it goes on by itself, too."


def test_page_over_its_budget_is_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/good.md").write_text(GOOD)
    assert list(over_budget(tmp_path)) == []
    (tmp_path / "docs/bad.md").write_text(BAD)
    (line,) = over_budget(tmp_path)
    assert line.startswith("docs/bad.md: 9.")


def test_docstrings_and_messages_of_a_package_are_counted(tmp_path: Path) -> None:
    module = tmp_path / "operator/stats/module.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        '"""Nobody is told what is there."""\n\nTEXT = f"{1}: mend what is there by itself, whatever it is"\n'
    )
    assert [line.partition(": ")[2].partition(":")[0] for line in over_budget(tmp_path)] == ["docstrings", "messages"]


def test_code_and_urls_are_not_checked() -> None:
    page = "```sh\necho anew\n```\n\nSee [the page](whatever.md) and `nobody`.<!-- anew -->"
    assert list(matches(prose(page))) == []


def test_short_strings_are_not_messages() -> None:
    assert texts_in('"""Docstring."""\nNAME = "three short words"\nTEXT = "a message of five words"\n') == (
        ["Docstring."],
        ["a message of five words"],
    )
