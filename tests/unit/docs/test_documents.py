"""Generated parts of documents, and their links."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bench.documents.bench_table import FILE
from bench.documents.chart_values import chart_values
from bench.documents.option_tables import commands, option_table
from bench.documents.refresh import CHARTS, refreshed, schema_file
from bench.documents.rights import TEMPLATE, rights_template
from bench.documents.scale_table import objects_within
from bench.documents.support_matrix import oldest_kubernetes
from bench.documents.version_table import SERVED_METHODS
from bench.figures import number, read_runs
from bench.sizing.accuracy import mean_error, memory_rows, token_rows, worst_row
from devcluster.builds.binaries import KUBERNETES, NEWEST, OLDEST, USUAL
from specdecode_operator.cli.doctor import NEWEST_MINOR, OLDEST_MINOR
from specdecode_operator.cli.main import app
from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.schema import Printed, schema_text
from specdecode_operator.enums import Method, Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import parse_calibration
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.estimate_fields import CASE_SPELLINGS
from specdecode_operator.sizing.memory.budget import Pair, estimate
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.engine.engine_versions import SERVED
from tests.support.code_blocks import PAIR, Block, Check, blocks, blocks_for, check_of, json_of, objects_with
from tests.support.documented_commands import NOT_HERE, NOT_RUN, PAGES
from tests.support.documents import DOCUMENTS, ROOT, anchors, fenced_blocks, paths, prose, relative, sections, table
from tests.support.llama import ARTICLE_FIRST_START
from tests.support.page_run import run_page, same_output

PRODUCTS = {"H100": "NVIDIA-H100-80GB-HBM3", "H200": "NVIDIA-H200"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_generated_parts_are_up_to_date(document: Path) -> None:
    assert document.read_text() == refreshed(document), f"{relative(document)} is stale: run ./just docs"


@pytest.mark.parametrize("command", Printed)
def test_schemas_are_up_to_date(command: Printed) -> None:
    file = schema_file(command)
    assert file.read_text() == schema_text(command), f"{relative(file)} is stale: run ./just docs"


def test_chart_roles_are_up_to_date() -> None:
    assert TEMPLATE.read_text() == rights_template(), (
        f"{relative(TEMPLATE)} is stale: run ./just docs, ./just manifests"
    )


@pytest.mark.parametrize("chart", CHARTS)
def test_every_chart_value_has_a_description(chart: str) -> None:
    values = chart_values(chart)
    assert values
    assert [value.path for value in values if not value.description] == [], "write a comment above it in values.yaml"


def test_an_example_in_a_comment_is_not_part_of_the_description() -> None:
    (limits,) = (value for value in chart_values("specdecode-operator") if value.path == "limits")
    assert limits.type == "list of objects"
    assert limits.default == "[]"
    assert limits.description.endswith("all of them apply.")


def test_documents_state_the_benchmark_figures() -> None:
    rows, tokens = memory_rows(), token_rows()
    worst = 100 * abs(worst_row(rows).error)
    exact = sum(row.exact for row in tokens)
    supported, values = "docs/reference/supported.md", "charts/specdecode-operator/values.yaml"
    for document, figure in (
        ("README.md", f"off by {worst:.2f} % at worst in {len(rows)} public logs"),
        ("README.md", f"{benchmark('1,000 objects: memory at most, after a restart')} MB of memory"),
        ("README.md", f"{benchmark('1,000 objects: idle CPU')} % of one core"),
        ("README.md", f"takes over within {benchmark('replica killed, a change is acted on, worst')} s"),
        (values, f"The memory is sufficient for {objects_within(192):,} deployments"),
        (values, f"The memory is sufficient for {objects_within(512 / 1.5):,} deployments"),
        (supported, f"mean error {100 * mean_error(rows):.2f} %, worst {worst:.2f} %"),
        (supported, f"{exact} of {len(tokens)} exact to the log's rounding"),
    ):
        assert figure in " ".join((ROOT / document).read_text().split()), f"./just bench measured: {figure}"


def benchmark(name: str) -> str:
    """Return a figure of docs/design/benchmarks.json as the tables show it."""
    (value,) = {row.figure.value for run in read_runs(FILE) for row in run.rows if row.figure.name == name}
    assert value is not None
    return number(value)


def test_calibration_file_in_the_documents_is_valid() -> None:
    (example,) = fenced_blocks(ROOT / "docs/measure/calibrate.md", "json")
    assert parse_calibration(example).entries


def llama_pair(target: str, draft: str) -> Pair:
    """The 70B pair with the settings that docs/design/sizing.md names."""
    geometry, draft_geometry = (find_geometry(f"meta-llama/Llama-3.1-{size}-Instruct") for size in ("70B", "8B"))
    assert geometry is not None
    if draft not in set(Precision):
        return Pair(geometry, Precision(target), None, None, "none", 0, ARTICLE_FIRST_START)
    return Pair(geometry, Precision(target), draft_geometry, Precision(draft), "draft_model", 5, ARTICLE_FIRST_START)


@pytest.mark.parametrize("row", table(ROOT / "docs/design/sizing.md", "GPU"), ids=" ".join)
def test_sizing_table_matches_the_estimates(row: list[str]) -> None:
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


# Every document leads somewhere: links, anchors, recipes and paths that it names.

NAMING_RECIPES = [
    *DOCUMENTS,
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".ci/run",
]
ROOMS = ROOT / "operator/README.md"
CODE = [ROOT / "CONTRIBUTING.md", ROOT / "docs/design/code.md", ROOT / "docs/design/tests.md"]
NAMING_PATHS = {**dict.fromkeys(CODE, ROOT), ROOMS: ROOT / "operator"}
"""Documents about the code, and the folder that their paths begin at."""

WRITTEN = {"captures/NAME", "captures/demo"}
"""What a command makes."""


def recipes() -> set[str]:
    """Names of the public recipes of the justfile."""
    justfile = (ROOT / "justfile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*)(?: [^:=\n]*)?:(?!=)", justfile, re.MULTILINE)) - {"default"}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOMS], ids=relative)
def test_relative_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "code", prose(document))):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_tests_named_in_documents_exist(document: Path) -> None:
    for name, path in re.findall(r"\[`(test_\w+)`\]\(([^)\s]+\.py)\)", document.read_text()):
        test = document.parent / path
        exists = re.search(rf"^ *(async )?def {name}\(", test.read_text(), re.MULTILINE)
        assert name == test.stem or exists, f"{name} in {path}"


def test_every_document_is_linked_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
    assert {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")} - linked == {index}


@pytest.mark.parametrize("document", NAMING_RECIPES, ids=relative)
def test_recipes_named_in_documents_exist(document: Path) -> None:
    named = set(re.findall(r"\./just +([a-z][a-z-]*)", document.read_text()))
    assert named <= recipes(), f"in the justfile are {sorted(recipes())}"


def test_contributing_describes_every_recipe() -> None:
    described = set(re.findall(r"`\./just ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert recipes() <= described


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_project_paths_named_in_documents_exist(document: Path) -> None:
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir())
    named = re.findall(rf"`((?:{folders})/[\w./*-]*)`", document.read_text())
    assert {path for path in named if not any(ROOT.glob(path.rstrip("/")))} <= WRITTEN


@pytest.mark.parametrize("document", NAMING_PATHS, ids=relative)
def test_paths_named_in_code_documents_exist(document: Path) -> None:
    named = paths(document.read_text())
    assert named, "it names paths"
    assert {path for path in named if not any(NAMING_PATHS[document].glob(path.rstrip("/")))} == set()


def test_documents_named_in_code_and_charts_exist() -> None:
    """Messages and descriptions point to them. Sources name documents of other projects, in folders of theirs."""
    folders = "|".join(path.name for path in (ROOT / "docs").iterdir() if path.is_dir())
    endings = {".py", ".toml", ".yaml", ".txt", ".tpl", ".j2"}
    files = [path for folder in ("operator", "charts", "manifests") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in endings]
    named = {path for text in texts for path in re.findall(rf"(?<![\w/.-])docs/(?:(?:{folders})/)?[\w-]+\.md", text)}
    assert len(named) > 5
    assert {path for path in named if not (ROOT / path).exists()} == set()


# Every code block of the documents that can run is run or checked, and what is left out has a reason.

OFFLINE = sorted(page for page, how in PAGES.items() if not how.cluster)
ALLOWED = {"docs/serve/multi-node.md": ["--allow-pod-template=capabilities.IPC_LOCK"]}
"""What the page says that the operator must be told to allow."""


def test_every_code_block_has_a_check() -> None:
    unknown = [f"{block} ```{block.language}: {block.first_line}" for block in blocks() if check_of(block) is None]
    assert unknown == [], (
        "commands stand in `sh` blocks, with output in `console` ones; a page whose commands run has a line in PAGES "
        "of tests/support/documented_commands.py, and a block that cannot run one in NOT_RUN, with the reason"
    )


def test_tables_of_code_block_checks_have_no_unused_entries() -> None:
    run = blocks_for(Check.RUN_OFFLINE, Check.RUN_ON_API_SERVER)
    assert set(PAGES) == {block.document for block in run}
    for page, how in PAGES.items():
        texts = [block.text for block in run if block.document == page]
        for start in (*how.before, *how.exits):
            assert any(text.startswith(start) for text in texts), f"{page} has no block that begins so: {start}"
        for name in how.names:
            assert any(name in text for text in texts), f"{page}: {name}"
    for page, start in NOT_RUN:
        found = [block for block in blocks() if block.document == page and block.text.startswith(start)]
        assert found, f"{page} has no block that begins so: {start}"
    assert {name for name in NOT_HERE if not any(name in block.text for block in run)} == set()


@pytest.mark.parametrize("page", OFFLINE)
def test_documented_offline_commands_run(page: str, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path / "reader")
    if PAGES[page].shows_output:
        everything = "".join(printed.values())
        shown = [block for block in blocks_for(Check.SHOWN) if block.document == page]
        assert shown
        for block in shown:
            assert same_output(block.text, everything), f"{block}: that is not what comes out now"


@pytest.mark.parametrize("block", blocks_for(Check.OUR_OBJECTS, Check.FRAGMENT), ids=str)
def test_documented_objects_pass_lint(block: Block, tmp_path: Path) -> None:
    whole = check_of(block) is Check.OUR_OBJECTS
    said = [_lint(text, tmp_path / "shown.yaml", block) for text in ([block.text] if whole else objects_with(block))]
    assert None in said, "".join(filter(None, said))


def _lint(text: str, file: Path, block: Block) -> str | None:
    """What lint says against objects, beside the pair that captures are of; None where it says nothing."""
    file.write_text(text)
    own = any(body["metadata"]["name"] == "llama-70b" for body in yaml.safe_load_all(text))
    files = [f"--file={each}" for each in ([file] if own else [file, PAIR])]
    answer = CliRunner().invoke(app, ["lint", *files, *ALLOWED.get(block.document, ())])
    return answer.output if answer.exit_code else None


@pytest.mark.parametrize("block", blocks_for(Check.JSON), ids=str)
def test_json_blocks_are_valid(block: Block) -> None:
    assert json_of(block)


# docs/reference/cli.md describes the command line as it is.

DOCUMENT = ROOT / "docs/reference/cli.md"


COMMANDS = commands()
EXPLAINED = sorted(set(COMMANDS) - {"crds"})


@pytest.mark.parametrize("name", EXPLAINED)
def test_section_of_a_command_lists_exactly_its_options(name: str) -> None:
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
def test_every_command_has_an_options_table(name: str) -> None:
    """That they are up to date is asked of all generated parts."""
    assert f"<!-- generated: options of {name} -->" in sections(DOCUMENT)[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_options_table_has_each_option_once_with_help(name: str) -> None:
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


def test_documented_exit_codes_match_the_code() -> None:
    documented = {int(row[0]) for row in table(DOCUMENT, "exit code") if row[0].isdigit()}
    assert documented == {code.value for code in ExitCode}


def test_documented_batch_keys_match_the_code() -> None:
    rows = table(DOCUMENT, "key")
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[0])} == set(CASE_SPELLINGS)


# What is said of Kubernetes is what tests run on, wherever it is said.


@pytest.mark.parametrize("chart", ["specdecode-operator", "specdecode-crds"])
def test_charts_require_the_oldest_tested_kubernetes(chart: str) -> None:
    assert yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"
    assert oldest_kubernetes() == OLDEST


def test_doctor_uses_the_tested_kubernetes_range() -> None:
    assert (f"1.{OLDEST_MINOR}", f"1.{NEWEST_MINOR}") == (OLDEST, NEWEST)


@pytest.mark.parametrize("document", ["README.md", "docs/install/install.md"])
def test_install_documents_state_the_tested_kubernetes_versions(document: str) -> None:
    text = (ROOT / document).read_text()
    assert f"Kubernetes {OLDEST} or newer ([tested](" in text
    assert f"supported.md#tested-with) on {USUAL}, and without nodes on {OLDEST} and {NEWEST})" in text


def test_the_readme_lists_the_tested_versions_and_methods() -> None:
    rows = {row[0]: row for row in table(ROOT / "README.md", "Component")}
    assert rows["Kubernetes"][1] == ", ".join(sorted(KUBERNETES))
    assert rows["vLLM"][1].startswith(f"{SERVED},")
    named = {
        "draft models": "draft_model",
        "n-gram": "ngram",
        "n-gram on GPUs": "ngram_gpu",
        "suffix decoding": "suffix",
    }
    (methods,) = (row for name, row in rows.items() if name.startswith("[Methods]"))
    served, asked = (
        {named.get(each, each.lower().replace("-", "")) for each in cell.split(", ")} for cell in methods[1:3]
    )
    last = find_profile(KNOWN_VERSIONS[-1])
    assert served == {method for method in SERVED_METHODS if method not in last.ended_methods}
    assert asked == {*Method} - served - {Method.NONE} - {*last.ended_methods}


def test_the_support_page_lists_the_tested_versions() -> None:
    rows = {row[0]: row for row in table(ROOT / "SUPPORT.md", "component")}
    *others, newest = sorted(KUBERNETES)
    assert rows["Kubernetes"][1:] == [f"{OLDEST} and newer", f"{', '.join(others)} and {newest}"]
    assert rows["vLLM"][1] == f"{KNOWN_VERSIONS[0]} to {KNOWN_VERSIONS[-1]}"
    assert rows["vLLM"][2].startswith(f"{SERVED} serves")


def test_removed_method_is_listed_with_its_last_vllm_version() -> None:
    newest = find_profile(KNOWN_VERSIONS[-1])
    assert newest.ended_methods, "drop this test when no known version has a removed method"
    crd = yaml.safe_load((ROOT / "crds/specdecode.io_specdecodedeployments.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    description = spec["speculation"]["properties"]["method"]["description"]
    rows = {row[0]: row for row in table(ROOT / "docs/reference/supported.md", "method")}
    for method in Method:
        versions = [each for each in KNOWN_VERSIONS if method not in find_profile(each).ended_methods]
        assert rows[f"`{method}`"][1] == f"{versions[0]} to {versions[-1]}"
        removed = method in newest.ended_methods
        assert (f"{method} up to vLLM {versions[-1]}" in description) is removed


def test_doctor_documentation_states_the_oldest_kubernetes() -> None:
    said = (ROOT / "docs/reference/cli.md").read_text()
    assert f"version of the API server: {OLDEST} or newer, and not newer than the newest [tested](" in said


def test_nightly_job_covers_every_other_kubernetes_version() -> None:
    others = {*KUBERNETES} - {USUAL}
    assert {*re.findall(r'\(test-kubernetes "([\d.]+)"\)', (ROOT / "justfile").read_text())} == others
    job = yaml.safe_load((ROOT / ".github/workflows/long.yml").read_text())["jobs"]["kubernetes"]
    assert {*job["strategy"]["matrix"]["minor"]} == others
    assert "./just test-kubernetes ${{ matrix.minor }}" in yaml.safe_dump(job, width=1000)
