"""The fenced blocks of the documents: what each is, and so what a test does with it."""

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from devcluster import chart
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from tests.support.documented_commands import NOT_RUN, PAGES, Page
from tests.support.documents import DOCUMENTS, ROOT, relative

_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<language>\S*).*\n(?P<text>(?:.*\n)*?)(?P=indent)```$", re.MULTILINE)
_COMMAND: Final = re.compile(
    r"^(?:\$ |[A-Z_]+=\S+ )*"
    r"(?:\./just|\.venv/bin/\S+|python3?|specdecode|kubectl|helm|docker|curl|uv|pipx?|cosign|vllm)\s"
)
_GENERATED: Final = re.compile(r"\$ (?:\.venv/bin/)?(?:specdecode |python -m bench\.sizing\.accuracy)")
PAIR: Final = ROOT / "examples/llama-70b.yaml"
_EXAMPLES: Final = (PAIR, ROOT / "examples/capture-llama-70b.yaml", ROOT / "examples/training-tiny.yaml")
_FIELDS: Final = tuple(
    {field.alias or name for name, field in model.model_fields.items()}
    for model in (SpecDecodeDeploymentSpec, SpecDecodeCaptureSpec, SpecDecodeTrainingSpec)
)
SYNOPSES: Final = "docs/reference/cli.md"
"""Blocks without a language that begin with a command are its synopsis there; other tests hold them."""


class Check(StrEnum):
    """What a test does with a block."""

    RUN_OFFLINE = "its commands run in a folder, without a network"
    RUN_ON_API_SERVER = "its commands run against an API server"
    NOT_RUN = "nothing, for the reason that stands in the table"
    GENERATED = "it is what the command prints (./just docs)"
    SHOWN = "nothing: output, a formula, a synopsis"
    OUR_OBJECTS = "lint has nothing against it"
    FRAGMENT = "lint has nothing against an object with it"
    OTHER_OBJECTS = "an API server takes it"
    VALUES = "Helm takes it as values of the chart"
    KUSTOMIZATION = "kubectl makes objects of it"
    SCRAPE = "promtool takes it as a job's setting"
    JSON = "it is JSON"
    PROMQL = "promtool, with the page's other figures (test_prometheus.py)"


_LANGUAGES: Final = {"json": Check.JSON, "promql": Check.PROMQL}


@dataclass(frozen=True)
class Block:
    """A fenced block, without its indentation."""

    document: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def page(self) -> Page | None:
        """How commands of its document are run."""
        return PAGES.get(self.document)

    @property
    def not_run(self) -> str | None:
        """Why nothing runs it; None where something must."""
        found = [why for (document, start), why in NOT_RUN.items() if self._is(document, start)]
        return found[0] if found else None

    def _is(self, document: str, start: str) -> bool:
        return self.document == document and self.text.startswith(start)

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@cache
def blocks() -> tuple[Block, ...]:
    """All blocks of all documents, in their order."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(relative(path), line, match["language"], textwrap.dedent(match["text"])))
    return tuple(found)


def blocks_for(*checks: Check) -> list[Block]:
    """Return the blocks that are checked so."""
    return [block for block in blocks() if check_of(block) in checks]


def check_of(block: Block) -> Check | None:
    """Return what a test does with a block; None where nobody has said."""
    if block.not_run is not None:
        return Check.NOT_RUN
    if block.language in _LANGUAGES:
        return _LANGUAGES[block.language]
    if block.language == "yaml":
        return _check_of_yaml(block.text)
    if block.language in ("sh", "python") and block.page is not None:
        return Check.RUN_ON_API_SERVER if block.page.cluster else Check.RUN_OFFLINE
    if block.language == "console" and _GENERATED.match(block.text):
        return Check.GENERATED
    is_command = _COMMAND.match(block.text) and block.document != SYNOPSES
    return None if block.language or is_command else Check.SHOWN


def _check_of_yaml(text: str) -> Check | None:
    bodies = list(yaml.safe_load_all(text))
    kinds = [str(body.get("apiVersion", "")) for body in bodies]
    if all(kinds):
        ours = all(kind.startswith("specdecode.io/") for kind in kinds)
        return Check.OUR_OBJECTS if ours else Check.OTHER_OBJECTS
    (body,) = bodies
    keys = set(body)
    if keys == {"relabel_configs"}:
        return Check.SCRAPE
    if keys <= {"resources", "images", "patches"}:
        return Check.KUSTOMIZATION
    if keys <= _values():
        return Check.VALUES
    return Check.FRAGMENT if any(keys == {"spec"} or keys <= fields for fields in _FIELDS) else None


@cache
def _values() -> frozenset[str]:
    """Top-level values of the chart."""
    return frozenset(yaml.safe_load((chart.CHART / "values.yaml").read_text()))


@cache
def _example(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(path.read_text())
    return body


def objects_with(block: Block) -> Iterator[str]:
    """Objects of each of our kinds whose spec, or part of a spec, a block may show: an example, with it laid over."""
    body = yaml.safe_load(block.text)
    given = body["spec"] if set(body) == {"spec"} else body
    for example, fields in zip(_EXAMPLES, _FIELDS, strict=True):
        if set(given) <= fields:
            whole = _example(example)
            yield yaml.safe_dump({**whole, "spec": {**whole["spec"], **given}})


def json_of(block: Block) -> list[Any]:
    """Return what a block of JSON holds: one value, or one a line."""
    try:
        return [json.loads(block.text)]
    except ValueError:
        return [json.loads(line) for line in block.text.splitlines()]
