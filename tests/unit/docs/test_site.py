"""The docs site."""

import html
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import websocket
from markdown_it import MarkdownIt
from PIL import Image, ImageChops, ImageStat

from bench.site import architecture
from bench.site.build import build, prepare
from bench.site.navigation import named_pages, navigation
from bench.site.pages import ROOT, LinkError, Repository, pages, with_links
from bench.site.screenshots import (
    LARGEST_BYTES,
    PICTURES,
    SCREENSHOTS,
    TERMINALS,
    Screenshot,
    ScreenshotError,
    Terminal,
    draw,
    make,
)
from devcluster import demo_autoscale
from tests.support import browser
from tests.support.documents import DOCUMENTS, relative, table
from tests.support.http_server import Quiet, serving
from tests.support.waiting import eventually

_TIMEOUT_S = 60
_ATTEMPTS = 5
_INTERRUPTED = "net::ERR_NETWORK_CHANGED"
"""Chromium gives up what it loads when an interface of the machine comes or goes, as tests with clusters have them."""


@dataclass
class Tab:
    """The one tab of a browser."""

    connection: Any
    asked: list[str] = field(default_factory=list)  # what pages wanted to load
    said: list[str] = field(default_factory=list)  # errors in the console
    _calls: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one command; what happens until then is noted."""
        self._calls += 1
        self.connection.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv())
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.said.append(message["params"]["entry"]["text"])

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_until(self, expression: str) -> Any:
        """Return the value of an expression once it is one."""
        return eventually(lambda: self.ask(expression), expression, _TIMEOUT_S)

    def open(self, address: str, *, width: int = 1366) -> None:
        """Load a page and all that it loads."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        self._load(address)
        for _ in range(_ATTEMPTS):
            if not any(_INTERRUPTED in each for each in self.said):
                break
            self.said = [each for each in self.said if _INTERRUPTED not in each]
            self._load("about:blank")
            self._load(address)

    def _load(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait_until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)


@contextmanager
def tab(browser: str, profile: Path, *, reaches: str) -> Iterator[Tab]:
    """Open a browser that reaches one address, HOST:PORT, and nothing else."""
    told = profile / "DevToolsActivePort"
    command = [
        *(
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
        ),
        *("--proxy-server=127.0.0.1:9", f"--proxy-bypass-list={reaches}", f"--user-data-dir={profile}", "about:blank"),
    ]
    # A session of its own: Debian's browser is a script, which would end without what it started.
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        port = eventually(lambda: told.exists() and told.read_text().partition("\n")[0], "DevTools", _TIMEOUT_S)
        yield _connected(f"127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _connected(address: str) -> Tab:
    with urllib.request.urlopen(f"http://{address}/json", timeout=_TIMEOUT_S) as answer:
        (target,) = (each for each in json.load(answer) if each["type"] == "page")
    opened = Tab(websocket.create_connection(target["webSocketDebuggerUrl"], timeout=_TIMEOUT_S))
    for domain in ("Network", "Page", "Log", "Runtime"):
        opened.call(f"{domain}.enable")
    return opened


# The docs site.

FORGE = Repository("https://forge.example/team/specdecode-operator", "v1")
DOCUMENT = ROOT / "docs/install/install.md"
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


def test_pages_render_like_on_the_forge(site: Path, built: dict[Path, Page]) -> None:
    """Python's Markdown reads lists, and what stands in them, otherwise than CommonMark does."""
    forge = MarkdownIt("commonmark").enable("table")
    for document, page in pages().items():
        shown = built[(site / page).with_suffix(".html")].content
        meant = Page(f"<article>{forge.render(document.read_text())}</article>").content
        assert shown == meant, document.relative_to(ROOT)


def test_pages_load_nothing_from_other_hosts(built: dict[Path, Page]) -> None:
    assert {address for page in built.values() for address in page.loads if "//" in address} == set()
    assert {page for page in built if not built[page].loads} == set(), "pages without a style were not understood here"


def test_links_between_pages_resolve(built: dict[Path, Page]) -> None:
    for path, page in built.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if "//" in target or target.startswith("mailto:"):
                continue
            linked = Path(os.path.normpath(path.parent / target)) if target not in ("", ".") else path
            assert linked.exists(), f"{path.name}: {link}"
            assert not anchor or linked not in built or anchor in built[linked].anchors, f"{path.name}: {link}"


def test_links_to_other_files_point_to_the_repository(built: dict[Path, Page]) -> None:
    forge = [link for page in built.values() for link in page.links if link.startswith(f"{FORGE.url}/")]
    assert len(forge) > 50
    for link in forge:
        view, path = re.fullmatch(rf"{FORGE.url}/(blob|tree)/v1/([^#]+)(#.*)?", link).group(1, 2)  # type: ignore[union-attr]
        assert (ROOT / path).is_dir() if view == "tree" else (ROOT / path).is_file(), link


def test_not_found_page_finds_its_styles_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (
            "[a](../../SECURITY.md#verify-a-release)",
            "[a](../security.md#verify-a-release)",
            "[a](../security.md#verify-a-release)",
        ),
        ("[a](../../examples)", "[a](../examples.md)", "[a](../examples.md)"),
        ("[a\nb](../../crds)", f"[a\nb]({FORGE.url}/tree/v1/crds)", "a\nb"),
        ("[`x`](../../action.yml)", f"[`x`]({FORGE.url}/blob/v1/action.yml)", "`x`"),
        ("[a](https://docs.vllm.ai)", "[a](https://docs.vllm.ai)", "[a](https://docs.vllm.ai)"),
        ("`[a](../../crds)`", "`[a](../../crds)`", "`[a](../../crds)`"),
        ("```\n[a](../../crds)\n```", "```\n[a](../../crds)\n```", "```\n[a](../../crds)\n```"),
    ],
)
def test_page_links_are_rewritten_for_the_site(link: str, with_forge: str, without: str) -> None:
    assert with_links(DOCUMENT, link, FORGE) == with_forge
    assert with_links(DOCUMENT, link, Repository()) == without


def test_broken_link_is_named() -> None:
    with pytest.raises(LinkError, match=re.escape("docs/install/install.md: ../gone.md: leads to no file: correct it")):
        with_links(DOCUMENT, "[a](../gone.md)", FORGE)


def test_architecture_picture_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text() == architecture.picture(), "it is stale: run ./just docs"


def test_numbers_in_the_architecture_picture_match_the_table() -> None:
    numbers = {str(call.number) for call in architecture.CALLS if call.number}
    assert [row[0] for row in table(architecture.PAGE, "number")] == sorted(numbers)


# The docs site in a browser that reaches nothing else: its search, its width, its colours.


NARROW_PX = 400
"""A telephone's."""

RESULTS = """
[...document.querySelectorAll('*')].filter(each => each.shadowRoot)
    .flatMap(each => [...each.shadowRoot.querySelectorAll('a')]).map(each => each.href).join('\\n')
"""


class Files(Quiet, SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    configuration = prepare(Repository(), tmp_path_factory.mktemp("site"))
    done = build(configuration)
    assert done.returncode == 0, done.stdout + done.stderr
    handler = partial(Files, directory=str(configuration.parent / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, serving(server):
        yield f"127.0.0.1:{server.server_port}"


@pytest.fixture
def page(address: str, tmp_path: Path) -> Iterator[Tab]:
    browser.provide()
    found = browser.find()
    assert found is not None
    with tab(found, tmp_path / "profile", reaches=address) as opened:
        yield opened
        elsewhere = {each for each in opened.asked if not each.startswith((f"http://{address}/", "data:", "blob:"))}
        assert elsewhere == set()
        assert opened.said == []


@pytest.mark.long
def test_search_finds_the_pages_that_explain_a_reason(page: Tab, address: str) -> None:
    page.open(f"http://{address}/index.html")
    page.wait_until("document.querySelector('.md-search__button') && true")
    page.ask("document.querySelector('.md-search__button').click()")
    page.wait_until("document.activeElement && document.activeElement !== document.body")
    page.type("NoMatchingNodes")
    found = page.wait_until(RESULTS).splitlines()[:3]
    pages_found = sorted(each.removeprefix(f"http://{address}/").partition("?")[0] for each in found)
    assert pages_found == ["get-started/quickstart-gpus.html", "operate/troubleshoot.html", "reference/reasons.html"]
    assert any(each.endswith("#the-plan") for each in found)


@pytest.mark.long
@pytest.mark.parametrize("width", [1366, NARROW_PX])
def test_reason_link_scrolls_to_its_table_row(page: Tab, address: str, width: int) -> None:
    page.open(f"http://{address}/operate/troubleshoot.html", width=width)
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


@pytest.mark.long
def test_pages_fit_a_phone_screen(page: Tab, address: str) -> None:
    """Tables and code are scrolled by themselves."""
    for each in pages().values():
        page.open(f"http://{address}/{each.with_suffix('.html')}", width=NARROW_PX)
        assert page.ask("document.documentElement.scrollWidth") <= NARROW_PX, each


@pytest.mark.long
@pytest.mark.parametrize(("wanted", "scheme"), [("dark", "slate"), ("light", "default")])
def test_colour_scheme_follows_the_preference_of_the_reader(page: Tab, address: str, wanted: str, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": wanted}])
    page.open(f"http://{address}/index.html")
    page.wait_until(f"document.body.dataset.mdColorScheme === '{scheme}'")


# The pictures in the documents are those that the commands beside them make.

ALIKE = 6
"""Mean difference of a pixel, of 255: fonts differ between machines, figures do not."""


def test_every_picture_is_generated() -> None:
    drawn_by_demos = {demo_autoscale.PICTURE.name}
    assert {path.name for path in PICTURES.iterdir()} - drawn_by_demos == {
        each.name for each in (*SCREENSHOTS, *TERMINALS)
    }
    others = {path for path in ROOT.glob("docs/**/*.*") if path.suffix in (".png", ".jpg", ".gif", ".webp")}
    assert {relative(path) for path in others if path.parent != PICTURES} == set()


@pytest.mark.parametrize("screenshot", SCREENSHOTS, ids=lambda each: each.name)
def test_screenshot_is_small_and_shown_beside_its_command(screenshot: Screenshot) -> None:
    assert (PICTURES / screenshot.name).stat().st_size < LARGEST_BYTES
    assert screenshot.sources
    assert [relative(path) for path in screenshot.sources if not path.exists()] == []
    shown = [path for path in DOCUMENTS if f"pictures/{screenshot.name})" in path.read_text()]
    assert shown, "no document shows it"
    for document in shown:
        _, *after = re.split(rf"pictures/{re.escape(screenshot.name)}\)", document.read_text())
        assert all(f"`{screenshot.command}`" in text[:400] for text in after), relative(document)


@pytest.mark.parametrize("terminal", TERMINALS, ids=lambda each: each.name)
def test_terminal_picture_follows_its_commands_and_loads_no_urls(terminal: Terminal) -> None:
    picture = (PICTURES / terminal.name).read_text()
    assert len(picture) < LARGEST_BYTES
    assert "url(http" not in picture
    drawn = html.unescape(" ".join(re.findall(r">([^<>]+)</text>", picture))).replace("\xa0", " ")
    assert [command for command in terminal.commands if f"$ {command}" not in drawn] == []
    shown = [path.read_text() for path in DOCUMENTS if f"pictures/{terminal.name})" in path.read_text()]
    assert shown, "no document shows it"
    for text in shown:
        before = text[: text.index(f"pictures/{terminal.name})")]
        assert [command for command in terminal.commands if command not in before] == []


def test_terminal_picture_with_a_failing_command_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ScreenshotError, match="gone"):
        draw(Terminal("gone.svg", ("ls /gone",)), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_command_without_a_screenshot_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ScreenshotError, match=r"plan -f examples/gone.yaml wrote nothing: .*gone\.yaml"):
        make(Screenshot("gone.png", "specdecode plan -f examples/gone.yaml", "--plot=gone.png"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("screenshot", SCREENSHOTS, ids=lambda each: each.name)
def test_screenshot_matches_the_output_of_its_command(screenshot: Screenshot, tmp_path: Path) -> None:
    with Image.open(make(screenshot, tmp_path)) as made, Image.open(PICTURES / screenshot.name) as kept:
        assert made.size == kept.size, "./just screenshots"
        difference = ImageChops.difference(made.convert("L"), kept.convert("L"))
    (mean,) = ImageStat.Stat(difference).mean
    assert mean < ALIKE, "./just screenshots"
