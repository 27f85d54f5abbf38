"""The docs site: every page is in it, shows what the forge shows, leads somewhere, and loads nothing from elsewhere."""

import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from bench.site import architecture
from bench.site.build import build, prepare
from bench.site.navigation import named_pages, navigation
from bench.site.pages import ROOT, LinkError, Repository, pages, with_links
from tests.support.documents import table

FORGE = Repository("https://forge.example/team/specdecode-operator", "v1")
DOCUMENT = ROOT / "docs/how-to/install.md"
CONTENT = ("blockquote", "code", "h1", "h2", "h3", "h4", "li", "ol", "pre", "table", "td", "ul")
"""Elements by which a page is known to show what its document says."""

LOADING = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Page(HTMLParser):
    """A page of the site: what it loads, where it leads, which anchors it has, and what is in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.content: Counter[str] = Counter()
        self._in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.anchors |= {told[name] or "" for name in ("id", "name") if name in told}
        if address := told.get(LOADING.get(tag, "")):
            self.loads.append(address)
        if tag == "a" and told.get("href"):
            self.links.append(told["href"] or "")
        self._in_article |= tag == "article"
        if self._in_article and tag in CONTENT:
            self.content[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    configuration = prepare(FORGE, tmp_path_factory.mktemp("site"))
    done = build(configuration)
    assert done.returncode == 0, done.stdout + done.stderr
    return configuration.parent / "site"


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(named_pages(navigation())) == sorted(str(page) for page in pages().values())


def test_every_document_is_a_page_of_the_site(site: Path, built: dict[Path, Page]) -> None:
    assert {str(path.relative_to(site).with_suffix(".md")) for path in built} == {str(p) for p in pages().values()}


def test_pages_show_what_the_forge_shows(site: Path, built: dict[Path, Page]) -> None:
    """Python's Markdown reads lists, and what stands in them, otherwise than CommonMark does."""
    forge = MarkdownIt("commonmark").enable("table")
    for document, page in pages().items():
        shown = built[(site / page).with_suffix(".html")].content
        meant = Page(f"<article>{forge.render(document.read_text())}</article>").content
        assert shown == meant, document.relative_to(ROOT)


def test_nothing_is_loaded_from_elsewhere(built: dict[Path, Page]) -> None:
    assert {address for page in built.values() for address in page.loads if "//" in address} == set()
    assert {page for page in built if not built[page].loads} == set(), "pages without a style were not understood here"


def test_links_between_pages_lead_to_what_is_there(built: dict[Path, Page]) -> None:
    for path, page in built.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if "//" in target or target.startswith("mailto:"):
                continue
            linked = Path(os.path.normpath(path.parent / target)) if target not in ("", ".") else path
            assert linked.exists(), f"{path.name}: {link}"
            assert not anchor or linked not in built or anchor in built[linked].anchors, f"{path.name}: {link}"


def test_links_to_other_files_lead_to_the_repository(built: dict[Path, Page]) -> None:
    forge = [link for page in built.values() for link in page.links if link.startswith(f"{FORGE.url}/")]
    assert len(forge) > 50
    for link in forge:
        view, path = re.fullmatch(rf"{FORGE.url}/(blob|tree)/v1/([^#]+)(#.*)?", link).group(1, 2)  # type: ignore[union-attr]
        assert (ROOT / path).is_dir() if view == "tree" else (ROOT / path).is_file(), link


def test_the_page_for_those_that_are_gone_finds_its_style_at_any_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_URL", "https://team.forge.example/operator/")
    configuration = prepare(Repository(), tmp_path)
    assert build(configuration).returncode == 0
    loads = Page((configuration.parent / "site/404.html").read_text()).loads
    assert len(loads) > 3
    for each in loads:
        assert each.startswith("/operator/")
        assert (configuration.parent / "site" / each.removeprefix("/operator/")).is_file(), each


def test_a_broken_anchor_fails_the_build(tmp_path: Path) -> None:
    configuration = prepare(Repository(), tmp_path)
    page = configuration.parent / "pages/index.md"
    page.write_text(page.read_text() + "\n[gone](security.md#not-there)\n")
    done = build(configuration)
    assert done.returncode != 0
    assert "index.md" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("link", "with_forge", "without"),
    [
        ("[a](install.md#remove)", "[a](install.md#remove)", "[a](install.md#remove)"),
        ("[a](../README.md)", "[a](../contents.md)", "[a](../contents.md)"),
        ("[a](../../SECURITY.md#threat-model)", "[a](../security.md#threat-model)", "[a](../security.md#threat-model)"),
        ("[a](../../examples)", "[a](../examples.md)", "[a](../examples.md)"),
        ("[a\nb](../../crds)", f"[a\nb]({FORGE.url}/tree/v1/crds)", "a\nb"),
        ("[`x`](../../action.yml)", f"[`x`]({FORGE.url}/blob/v1/action.yml)", "`x`"),
        ("[a](https://docs.vllm.ai)", "[a](https://docs.vllm.ai)", "[a](https://docs.vllm.ai)"),
        ("`[a](../../crds)`", "`[a](../../crds)`", "`[a](../../crds)`"),
        ("```\n[a](../../crds)\n```", "```\n[a](../../crds)\n```", "```\n[a](../../crds)\n```"),
    ],
)
def test_links_of_a_page(link: str, with_forge: str, without: str) -> None:
    assert with_links(DOCUMENT, link, FORGE) == with_forge
    assert with_links(DOCUMENT, link, Repository()) == without


def test_a_link_that_leads_nowhere_is_named() -> None:
    with pytest.raises(LinkError, match=re.escape("docs/how-to/install.md: ../gone.md: leads to no file: correct it")):
        with_links(DOCUMENT, "[a](../gone.md)", FORGE)


def test_the_picture_of_the_architecture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text() == architecture.picture(), "it is stale: run ./just docs"


def test_the_numbers_in_the_picture_are_those_of_the_table() -> None:
    numbers = {str(call.number) for call in architecture.CALLS if call.number}
    assert [row[0] for row in table(architecture.PAGE, "number")] == sorted(numbers)
