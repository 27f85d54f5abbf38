"""Every document leads somewhere: links, anchors, recipes and paths that it names."""

import re
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, ROOT, anchors, paths, prose, relative

NAMING_RECIPES = [
    *DOCUMENTS,
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".ci/run",
]
ROOMS = ROOT / "operator/README.md"
NAMING_PATHS = {ROOT / "CONTRIBUTING.md": ROOT, ROOMS: ROOT / "operator"}
"""Documents about the code, and the folder that their paths begin at."""

WRITTEN = {"captures/NAME", "captures/demo"}
"""What a command makes."""


def recipes() -> set[str]:
    """Names of the public recipes of the justfile."""
    justfile = (ROOT / "justfile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*)(?: [^:=\n]*)?:(?!=)", justfile, re.MULTILINE)) - {"default"}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOMS], ids=relative)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "code", prose(document))):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_tests_that_are_named_exist(document: Path) -> None:
    for name, path in re.findall(r"\[`(test_\w+)`\]\(([^)\s]+\.py)\)", document.read_text()):
        test = document.parent / path
        exists = re.search(rf"^ *(async )?def {name}\(", test.read_text(), re.MULTILINE)
        assert name == test.stem or exists, f"{name} in {path}"


def test_every_document_can_be_reached_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
    assert {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")} - linked == {index}


@pytest.mark.parametrize("document", NAMING_RECIPES, ids=relative)
def test_recipes_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"\./just +([a-z][a-z-]*)", document.read_text()))
    assert named <= recipes(), f"in the justfile are {sorted(recipes())}"


def test_contributors_find_every_recipe() -> None:
    described = set(re.findall(r"`\./just ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert recipes() <= described


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_paths_of_the_project_that_are_named_exist(document: Path) -> None:
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir())
    named = re.findall(rf"`((?:{folders})/[\w./*-]*)`", document.read_text())
    assert {path for path in named if not any(ROOT.glob(path.rstrip("/")))} <= WRITTEN


@pytest.mark.parametrize("document", NAMING_PATHS, ids=relative)
def test_documents_about_the_code_name_paths_that_exist(document: Path) -> None:
    named = paths(document.read_text())
    assert named, "it names paths"
    assert {path for path in named if not any(NAMING_PATHS[document].glob(path.rstrip("/")))} == set()


def test_documents_that_the_code_and_the_chart_name_exist() -> None:
    """Messages and descriptions point to them. Sources name documents of other projects, in folders of theirs."""
    folders = "|".join(path.name for path in (ROOT / "docs").iterdir() if path.is_dir())
    endings = {".py", ".toml", ".yaml", ".txt", ".tpl", ".j2"}
    files = [path for folder in ("operator", "charts", "manifests") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in endings]
    named = {path for text in texts for path in re.findall(rf"(?<![\w/.-])docs/(?:(?:{folders})/)?[\w-]+\.md", text)}
    assert len(named) > 5
    assert {path for path in named if not (ROOT / path).exists()} == set()
