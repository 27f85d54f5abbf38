"""The docs site in a browser that reaches nothing else: its search, its width, its colours."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.site.build import build, prepare
from bench.site.pages import Repository, pages
from tests.support import browser
from tests.support.devtools import Tab, tab
from tests.support.http_server import Quiet, serving

pytestmark = pytest.mark.long

NARROW_PX = 400
"""A telephone's."""

RESULTS = """
[...document.querySelectorAll('*')].filter(each => each.shadowRoot)
    .flatMap(each => [...each.shadowRoot.querySelectorAll('a')]).map(each => each.href).join('\\n')
"""


class Files(Quiet, SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    configuration = prepare(Repository(), tmp_path_factory.mktemp("site"))
    done = build(configuration)
    assert done.returncode == 0, done.stdout + done.stderr
    handler = partial(Files, directory=str(configuration.parent / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, serving(server):
        yield f"127.0.0.1:{server.server_port}"


@pytest.fixture
def page(site: str, tmp_path: Path) -> Iterator[Tab]:
    browser.provide()
    found = browser.find()
    assert found is not None
    with tab(found, tmp_path / "profile", reaches=site) as opened:
        yield opened
        elsewhere = {each for each in opened.asked if not each.startswith((f"http://{site}/", "data:", "blob:"))}
        assert elsewhere == set()
        assert opened.said == []


def test_a_reason_is_found_where_it_is_explained(page: Tab, site: str) -> None:
    page.open(f"http://{site}/index.html")
    page.wait_until("document.querySelector('.md-search__button') && true")
    page.ask("document.querySelector('.md-search__button').click()")
    page.wait_until("document.activeElement && document.activeElement !== document.body")
    page.type("NoMatchingNodes")
    found = page.wait_until(RESULTS).splitlines()[:2]
    pages_found = sorted(each.removeprefix(f"http://{site}/").partition("?")[0] for each in found)
    assert pages_found == ["how-to/troubleshoot.html", "reference/reasons.html"]
    assert any(each.endswith("#the-plan") for each in found)


@pytest.mark.parametrize("width", [1366, NARROW_PX])
def test_a_reason_of_a_condition_leads_to_its_line(page: Tab, site: str, width: int) -> None:
    page.open(f"http://{site}/how-to/troubleshoot.html", width=width)
    page.ask(
        "[...document.querySelectorAll('article td a')].find(each => each.innerText === 'NoMatchingNodes').click()"
    )
    line = "document.querySelector('tr:has(:target)')"
    page.wait_until(f"location.pathname === '/reference/reasons.html' && {line} && true")
    assert page.ask(f"{line}.innerText").startswith("NoMatchingNodes")
    header = "document.querySelector('.md-header').getBoundingClientRect().bottom"
    page.wait_until(
        f"{line}.getBoundingClientRect().top >= {header} && {line}.getBoundingClientRect().top < innerHeight"
    )


def test_no_page_is_wider_than_a_telephone(page: Tab, site: str) -> None:
    """Tables and code are scrolled by themselves."""
    for each in pages().values():
        page.open(f"http://{site}/{each.with_suffix('.html')}", width=NARROW_PX)
        assert page.ask("document.documentElement.scrollWidth") <= NARROW_PX, each


@pytest.mark.parametrize(("wanted", "scheme"), [("dark", "slate"), ("light", "default")])
def test_colours_are_those_that_the_reader_wants(page: Tab, site: str, wanted: str, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": wanted}])
    page.open(f"http://{site}/index.html")
    page.wait_until(f"document.body.dataset.mdColorScheme === '{scheme}'")
