"""What the documents say holds: links, recipes, examples, reasons and the sizing table."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bench.accuracy import mean_error, memory_rows, token_rows, worst_row
from bench.documents import refreshed
from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.deployment import KIND, SpecDecodeDeploymentSpec
from specdecode_operator.cli.main import app
from specdecode_operator.cli.plan.command import ExitCode
from specdecode_operator.deployment.spec.validation import valid_facts
from specdecode_operator.estimate.estimate import CASE_KEYS
from specdecode_operator.sizing.base.devices import find_device
from specdecode_operator.sizing.base.units import GIB
from specdecode_operator.sizing.families.catalogue import find_geometry
from specdecode_operator.sizing.memory.budget import Pair, estimate
from specdecode_operator.sizing.model.precision import Precision
from specdecode_operator.sizing.pair.calibration import parse_calibration
from tests.support.llama import ARTICLE_LIMITS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/**/*.md", "examples/*.md") for path in ROOT.glob(pattern))
NAMING_RECIPES = [
    *DOCUMENTS,
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".ci/run",
]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PRODUCTS = {"H100": "NVIDIA-H100-80GB-HBM3", "H200": "NVIDIA-H200"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fenced_blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(document: Path, first_column: str) -> list[list[str]]:
    """Rows of the table whose header begins with this column."""
    lines = iter(document.read_text().splitlines())
    assert any(line.startswith(f"| {first_column} |") for line in lines), f"no table {first_column}"
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def recipes() -> set[str]:
    """Names of the public recipes of the justfile."""
    justfile = (ROOT / "justfile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*)(?: [^:=\n]*)?:(?!=)", justfile, re.MULTILINE)) - {"default"}


def deployments(text: str) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all(text):
        if document and document.get("kind") == KIND:
            yield document


def check_deployment(body: dict[str, Any]) -> None:
    """Its fields are those of the models, and its spec holds together."""
    assert body["apiVersion"] == API_VERSION
    assert set(body) == {"apiVersion", "kind", "metadata", "spec"}
    valid_facts(SpecDecodeDeploymentSpec.model_validate(body["spec"]))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("document", NAMING_RECIPES, ids=relative)
def test_recipes_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"\./just +([a-z][a-z-]*)", document.read_text()))
    assert named <= recipes(), f"in the justfile are {sorted(recipes())}"


def test_contributors_find_every_recipe() -> None:
    described = set(re.findall(r"`\./just ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert recipes() <= described


def test_deployments_in_the_readme_hold_together() -> None:
    found = [body for block in fenced_blocks(ROOT / "README.md", "yaml") for body in deployments(block)]
    assert found, "the README shows a deployment"
    for body in found:
        check_deployment(body)


def test_the_calibration_file_in_the_documents_is_one() -> None:
    (example,) = fenced_blocks(ROOT / "docs/how-to/calibrate.md", "json")
    assert parse_calibration(example).entries


def test_every_yaml_block_in_the_documents_parses() -> None:
    for document in DOCUMENTS:
        for block in fenced_blocks(document, "yaml"):
            assert list(yaml.safe_load_all(block))


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_examples_hold_together(example: Path) -> None:
    text = example.read_text()
    assert all(body.get("kind") for body in yaml.safe_load_all(text))
    for body in deployments(text):
        assert body["metadata"]["name"] in example.stem, "named like its file"
        check_deployment(body)


def test_the_readme_shows_the_example_as_it_is() -> None:
    (shown,) = (body for block in fenced_blocks(ROOT / "README.md", "yaml") for body in deployments(block))
    assert shown == yaml.safe_load((ROOT / "examples/llama-70b.yaml").read_text())


def test_the_list_of_examples_is_complete() -> None:
    listed = {re.findall(r"\((.+?)\)", row[0])[0] for row in table(ROOT / "examples/README.md", "file")}
    assert listed == {path.name for path in EXAMPLES}


def test_reasons_in_troubleshooting_are_ones_that_the_operator_gives() -> None:
    folders = ("deployment", "capture/control", "handlers", "cluster")
    code = "\n".join(path.read_text() for folder in folders for path in (ROOT / "operator" / folder).rglob("*.py"))
    code += (ROOT / "operator/sizing/memory/budget.py").read_text() + (ROOT / "operator/problems.py").read_text()
    for row in table(ROOT / "README.md", "reason"):
        for reason in re.findall(r"`(\w+)`", row[0]):
            assert f'"{reason}"' in code, reason


def test_every_trouble_is_in_troubleshooting() -> None:
    explained = {reason for row in table(ROOT / "README.md", "reason") for reason in re.findall(r"`(\w+)`", row[0])}
    reasons_of: dict[str, Callable[[str], list[str]]] = {
        "deployment/pods/rollout.py": lambda code: re.findall(r'Blocked\("(\w+)"', code),
        "deployment/pods/engine_errors.py": lambda code: re.findall(r'EngineError\(\s*"(\w+)"', code),
        "deployment/pods/readiness.py": lambda code: re.findall(
            r'(?:(?:working|stalled)\(|^ROLLED_BACK = )"(\w+)"', code, re.MULTILINE
        ),
        "deployment/models/reading.py": lambda code: re.findall(
            r'(?:Blocked\(|^    )"([A-Z]\w+)"[,:]', code, re.MULTILINE
        ),
        "deployment/models/download.py": lambda code: re.findall(
            r'(?:Blocked\(|working\(|^    )"([A-Z]\w+)"[,:]', code, re.MULTILINE
        ),
        "deployment/spec/model_storage.py": lambda code: re.findall(r'reason="(\w+)"', code),
        "handlers/inventory.py": lambda code: re.findall(r'"([A-Z][a-z]\w+)"', code),
        "handlers/launcher.py": lambda code: re.findall(r'"([A-Z][a-z]\w+)"', code),
        "handlers/writes.py": lambda code: re.findall(r'(?:working|stalled)\("(\w+)"', code),
    }
    for path, reasons in reasons_of.items():
        found = set(reasons((ROOT / "operator" / path).read_text()))
        assert found, path
        assert found <= explained


def test_every_reason_of_a_capture_is_explained() -> None:
    explained = {
        reason for row in table(ROOT / "docs/how-to/captures.md", "reason") for reason in re.findall(r"`(\w+)`", row[0])
    }
    code = "\n".join(path.read_text() for path in (ROOT / "operator/capture/control").glob("*.py"))
    given = set(re.findall(r'(?:Blocked\(|_pending\(|CapturePhase\.[A-Z_]+, )"(\w+)"', code))
    assert {"DeploymentNotFound", "WaitingForVolume", "WaitingForDeployment"} <= given
    on_the_way = {"Starting", "Loading", "Finishing", "Captured", "InternalError"}
    assert given - on_the_way <= explained
    for reason in explained - given:
        assert f'"{reason}"' in code or reason in {"ChildNameConflict", "Evicted"}, reason


def llama_pair(target: str, draft: str) -> Pair:
    """The 70B pair with the settings that docs/explanation/sizing.md names."""
    geometry, draft_geometry = (find_geometry(f"meta-llama/Llama-3.1-{size}-Instruct") for size in ("70B", "8B"))
    assert geometry is not None
    if draft == "none":
        return Pair(geometry, Precision(target), None, None, "none", 0, ARTICLE_LIMITS)
    return Pair(geometry, Precision(target), draft_geometry, Precision(draft), "draft_model", 5, ARTICLE_LIMITS)


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_what_commands_print_is_what_they_print_now(document: Path) -> None:
    assert document.read_text() == refreshed(document), f"{relative(document)} is stale: run ./just docs"


def test_the_figures_of_accuracy_are_generated() -> None:
    """So that the test above sees them."""
    assert "```console\n$ .venv/bin/python bench/accuracy.py\n" in (ROOT / "docs/explanation/accuracy.md").read_text()
    assert "```console\n$ specdecode plan -f examples/llama-70b.yaml\n" in (ROOT / "docs/reference/cli.md").read_text()


def test_the_readme_has_the_figures_of_bench() -> None:
    rows, tokens = memory_rows(), token_rows()
    exact = sum(row.exact for row in tokens)
    figures = [
        f"mean error {100 * mean_error(rows):.2f} %, worst {100 * abs(worst_row(rows).error):.2f} %",
        f"{exact} of {len(tokens)} exact to the log's rounding",
    ]
    for figure in figures:
        assert figure in (ROOT / "README.md").read_text(), f"./just bench says: {figure}"


def sections(document: Path) -> dict[str, str]:
    """Text of each section by its heading."""
    _, *parts = re.split(r"^## (.+)$", document.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    """Commands that people see, by their whole name; those of a group one by one."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands") and not command.hidden:
            found |= commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            found[f"{prefix}{name}"] = command
    return found


COMMANDS = commands(typer.main.get_command(app))
EXPLAINED = sorted(set(COMMANDS) - {"crds"})


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_options_of_a_command_are_those_in_its_section(name: str) -> None:
    section = sections(ROOT / "docs/reference/cli.md")[name]
    options = [set(each.opts) for each in COMMANDS[name].params if each.param_type_name == "option"]
    known = {spelling for option in options for spelling in option} | {"--help"}
    (usage, *_) = re.findall(r"^```\n(specdecode .*?)^```$", section, re.MULTILINE | re.DOTALL)
    spelling = r"(?<![\w-])--?[a-z][a-z-]*"
    assert set(re.findall(spelling, usage)) <= known, f"specdecode {name} has no such option"
    for option in options:
        assert option & set(re.findall(spelling, section)), f"cli.md lacks {'/'.join(sorted(option))} of {name}"


def test_exit_codes_are_the_documented_ones() -> None:
    documented = {int(row[0]) for row in table(ROOT / "docs/reference/cli.md", "exit code") if row[0].isdigit()}
    assert documented == {code.value for code in ExitCode}


def test_the_keys_of_a_case_are_the_documented_ones() -> None:
    rows = table(ROOT / "docs/reference/cli.md", "key")
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[0])} == set(CASE_KEYS)
