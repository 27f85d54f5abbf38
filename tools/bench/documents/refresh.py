"""Writes the generated parts of the documents anew: what commands print, and the tables of the reference."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from typer.testing import CliRunner

from bench.documents import monitoring
from bench.documents.bench_table import bench_table
from bench.documents.chart_values import value_list, value_tables
from bench.documents.field_tables import capture_fields, deployment_fields, training_fields
from bench.documents.figure_table import figure_table
from bench.documents.launch_tables import argument_table, with_version_rows
from bench.documents.node_plans import node_plans
from bench.documents.option_tables import commands, exit_table, option_table
from bench.documents.reason_tables import reason_tables
from bench.documents.rights import TEMPLATE, rights_table, rights_template
from bench.documents.scale_table import scale_table
from bench.documents.support_matrix import support_matrix
from bench.documents.trace_example import trace_example
from bench.documents.version_table import method_table, version_table
from bench.site import architecture
from bench.sizing.accuracy import report
from specdecode_operator.cli.main import app
from specdecode_operator.cli.schema import Printed, schema_text
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, published_heads
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.weights import parameter_count

ROOT: Final = Path(__file__).parents[3]
CHARTS: Final = ("specdecode-operator", "specdecode-crds")
MODELS: Final = ROOT / "operator/sizing/data/models"
_BLOCK: Final = re.compile(r"^```console\n\$ (?P<command>.+)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)
_YAML: Final = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PART: Final = re.compile(r"^<!-- generated: (?P<name>.+) -->\n(?:.*\n)*?<!-- end -->$", re.MULTILINE)
_MODEL_ROWS: Final = re.compile(r"^(?:\| `.*\n)+", re.MULTILINE)
_HEAD_ROWS: Final = re.compile(r"^(?:\| [a-z]\w* \| `.*\n)+", re.MULTILINE)


def documents() -> list[Path]:
    """Return the documents that may have generated parts."""
    patterns = ("*.md", "docs/**/*.md", "examples/*.md", "charts/*/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def schema_file(command: Printed) -> Path:
    """Return where the schema of a command's output is published."""
    return ROOT / "docs/reference/schemas" / f"{command}.json"


def refreshed(document: Path) -> str:
    """Return a document with its generated parts as they are now; what is timed stays."""
    text = document.read_text()
    text = _BLOCK.sub(lambda block: _fresh_block(block, text), text)
    text = _PART.sub(lambda part: f"<!-- generated: {part['name']} -->\n\n{_PARTS[part['name']]()}\n<!-- end -->", text)
    if document.name == "models.md":
        text = _MODEL_ROWS.sub("".join(_model_rows()), text)
        text = _HEAD_ROWS.sub("".join(_head_rows()), text)
    if document.name == "launch.md":
        text = with_version_rows(text)
    return text


def _fresh_block(block: re.Match[str], text: str) -> str:
    command = block["command"]
    shown = _YAML.findall(text[: block.start()])
    output = _OUTPUTS[command]() if command in _OUTPUTS else _specdecode(command, shown[-1:]) or block["output"]
    return f"```console\n$ {command}\n{output}```"


def _specdecode(command: str, shown: list[str]) -> str | None:
    """What the command line prints, in the folder of the project; None for another program.

    A YAML file that is not in the project is the last one that the document shows above.
    """
    program, *arguments = command.split()
    if program not in ("specdecode", ".venv/bin/specdecode"):
        return None
    with TemporaryDirectory() as folder:
        for position, each in enumerate(arguments):
            if (ROOT / each).exists():
                arguments[position] = str(ROOT / each)
            elif each.endswith(".yaml"):
                arguments[position] = str(Path(folder) / each)
                Path(arguments[position]).write_text(shown[0])
        return CliRunner().invoke(app, arguments).stdout


def _accuracy() -> str:
    return "".join(f"{line}\n" for line in report())


_OUTPUTS: Final[dict[str, Callable[[], str]]] = {".venv/bin/python -m bench.sizing.accuracy": _accuracy}
_PARTS: Final[dict[str, Callable[[], str]]] = {
    "fields of SpecDecodeDeployment": deployment_fields,
    "fields of SpecDecodeCapture": capture_fields,
    "fields of SpecDecodeTraining": training_fields,
    "arguments of fields": argument_table,
    "engine-versions": version_table,
    "methods by version": method_table,
    "benchmarks": bench_table,
    "what an operator takes": scale_table,
    "reasons of SpecDecodeDeployment": partial(reason_tables, "SpecDecodeDeployment"),
    "figures": figure_table,
    "support matrix": support_matrix,
    "rights": rights_table,
    "reasons of SpecDecodeCapture": partial(reason_tables, "SpecDecodeCapture"),
    "reasons of SpecDecodeTraining": partial(reason_tables, "SpecDecodeTraining"),
    "exit codes": exit_table,
    "a request of a trace": trace_example,
    "a node of H100": partial(node_plans, "H100"),
    "a node of H200": partial(node_plans, "H200"),
    **{f"options of {name}": partial(option_table, name) for name in commands()},
    **{f"values of {name}": partial(value_tables, name) for name in CHARTS},
    **{f"list of values of {name}": partial(value_list, name) for name in CHARTS},
}


def _model_rows() -> Iterator[str]:
    entries = [entry for file in sorted(MODELS.glob("*.json")) for entry in json.loads(file.read_text())["models"]]
    for entry in sorted(entries, key=lambda entry: str(entry["id"])):
        found = find_entry(entry["id"])
        architecture = found.config["architectures"][0] if found else "-"
        stated = entry["quantization_source"]
        source = entry["source"] if stated == "config.json" else f"{entry['source']}; quantization: {stated}"
        sized = f"{_known(entry)} | {_billions(entry)}"
        yield f"| `{entry['id']}` | `{architecture}` | {sized} | {entry['quantization']} | {source} |\n"


def _head_rows() -> Iterator[str]:
    for head in published_heads():
        targets = ", ".join(f"`{target}`" for target in head.targets)
        yield f"| {head.method} | `{head.head}` | {targets} | `{head.shape}` | {head.source} |\n"


def _known(entry: dict[str, Any]) -> str:
    """Return how well sizing knows an entry; ``-`` for one that vLLM refuses."""
    try:
        geometry = find_geometry(entry["id"])
    except SizingError:
        return "-"
    return "-" if geometry is None else geometry.knowledge.value


def _billions(entry: dict[str, Any]) -> str:
    try:
        geometry = find_geometry(entry["id"])
    except SizingError:
        return "-"
    return "-" if geometry is None else f"{parameter_count(geometry) / 10**9:.2f}"


if __name__ == "__main__":
    for each in documents():
        fresh = refreshed(each)
        if fresh != each.read_text():
            each.write_text(fresh)
            sys.stdout.write(f"{each.relative_to(ROOT)} has changed\n")
    for command in Printed:
        schema_file(command).write_text(schema_text(command))
    TEMPLATE.write_text(rights_template())
    monitoring.write()
    architecture.write()
