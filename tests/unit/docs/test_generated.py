"""What is generated is up to date, and figures are those of the code."""

import math
from pathlib import Path

import pytest

from bench.documents.bench_table import FILE
from bench.documents.refresh import refreshed, schema_file
from bench.documents.rights import TEMPLATE, rights_template
from bench.figures import number, read_runs
from bench.sizing.accuracy import mean_error, memory_rows, token_rows, worst_row
from specdecode_operator.cli.schema import Printed, schema_text
from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import parse_calibration
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.memory.budget import Pair, estimate
from tests.support.documents import DOCUMENTS, ROOT, fenced_blocks, relative, table
from tests.support.llama import ARTICLE_FIRST_START

PRODUCTS = {"H100": "NVIDIA-H100-80GB-HBM3", "H200": "NVIDIA-H200"}
GENERATED = {
    "docs/reference/benchmarks.md": "<!-- generated: benchmarks -->\n",
    "README.md": "```console\n$ .venv/bin/specdecode plan --model meta-llama/Llama-3.1-70B-Instruct",
    "docs/explanation/accuracy.md": "```console\n$ .venv/bin/python -m bench.sizing.accuracy\n",
    "docs/how-to/h100.md": "<!-- generated: a node of H100 -->\n",
    "docs/how-to/h200.md": "<!-- generated: a node of H200 -->\n",
    "docs/reference/capture-fields.md": "<!-- generated: fields of SpecDecodeCapture -->\n",
    "docs/reference/cli.md": "```console\n$ specdecode plan -f examples/llama-70b.yaml\n",
    "docs/reference/deployment-fields.md": "<!-- generated: fields of SpecDecodeDeployment -->\n",
    "docs/reference/rights.md": "<!-- generated: rights -->\n",
    "docs/reference/reasons.md": "<!-- generated: reasons of SpecDecodeDeployment -->\n",
    "docs/reference/trace-format.md": "<!-- generated: a request of a trace -->\n",
    "docs/scale.md": "<!-- generated: what an operator takes -->\n",
    "docs/reference/engine-versions.md": "<!-- generated: engine-versions -->\n",
    "docs/reference/supported.md": "<!-- generated: support matrix -->\n",
}
"""Where a generated part begins, so that none is lost from the first test."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_generated_parts_are_up_to_date(document: Path) -> None:
    assert document.read_text() == refreshed(document), f"{relative(document)} is stale: run ./just docs"


@pytest.mark.parametrize("command", Printed)
def test_schemas_are_up_to_date(command: Printed) -> None:
    file = schema_file(command)
    assert file.read_text() == schema_text(command), f"{relative(file)} is stale: run ./just docs"


def test_the_roles_of_the_chart_are_up_to_date() -> None:
    assert TEMPLATE.read_text() == rights_template(), (
        f"{relative(TEMPLATE)} is stale: run ./just docs, ./just manifests"
    )


@pytest.mark.parametrize("document", GENERATED)
def test_generated_parts_are_there(document: str) -> None:
    assert GENERATED[document] in (ROOT / document).read_text()


def test_the_refusal_in_the_readme_is_one() -> None:
    assert "smallest change first:" in (ROOT / "README.md").read_text().lower()


def test_documents_have_the_figures_of_bench() -> None:
    rows, tokens = memory_rows(), token_rows()
    worst = 100 * abs(worst_row(rows).error)
    within = f"{math.ceil(100 * worst) / 100:.2f} %"
    exact = sum(row.exact for row in tokens)
    supported = "docs/reference/supported.md"
    for document, figure in (
        ("README.md", f"within {within} of {len(rows)} public logs"),
        ("README.md", f"{benchmark('1,000 objects: memory at most, after a restart')} MB of memory"),
        ("README.md", f"{benchmark('1,000 objects: idle CPU')} % of one core"),
        ("README.md", f"takes over within {benchmark('replica killed, a change is acted on, worst')} s"),
        (supported, f"mean error {100 * mean_error(rows):.2f} %, worst {worst:.2f} %"),
        (supported, f"{exact} of {len(tokens)} exact to the log's rounding"),
    ):
        assert figure in " ".join((ROOT / document).read_text().split()), f"./just bench measured: {figure}"


def benchmark(name: str) -> str:
    """Return a figure of docs/reference/benchmarks.json as the tables show it."""
    (value,) = {row.figure.value for run in read_runs(FILE) for row in run.rows if row.figure.name == name}
    assert value is not None
    return number(value)


def test_the_calibration_file_in_the_documents_is_one() -> None:
    (example,) = fenced_blocks(ROOT / "docs/how-to/calibrate.md", "json")
    assert parse_calibration(example).entries


def llama_pair(target: str, draft: str) -> Pair:
    """The 70B pair with the settings that docs/explanation/sizing.md names."""
    geometry, draft_geometry = (find_geometry(f"meta-llama/Llama-3.1-{size}-Instruct") for size in ("70B", "8B"))
    assert geometry is not None
    if draft == "none":
        return Pair(geometry, Precision(target), None, None, "none", 0, ARTICLE_FIRST_START)
    return Pair(geometry, Precision(target), draft_geometry, Precision(draft), "draft_model", 5, ARTICLE_FIRST_START)


@pytest.mark.parametrize("row", table(ROOT / "docs/explanation/sizing.md", "GPU"), ids=" ".join)
def test_the_sizing_table_is_what_sizing_says(row: list[str]) -> None:
    product, target, draft, *figures = row
    device = find_device(PRODUCTS[product])
    assert device is not None
    budget = estimate(llama_pair(target, draft), device, 2)
    assert figures == [
        f"{budget.weights_bytes / GIB:.2f}",
        f"{budget.available_kv_bytes / GIB:.2f}",
        f"{budget.kv_cache_tokens:,}",
        f"{budget.max_concurrency:.1f}",
        budget.verdict.value,
    ]
