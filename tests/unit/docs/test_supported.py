"""What is said of Kubernetes is what tests run on, wherever it is said."""

import re

import pytest
import yaml

from bench.documents.support_matrix import oldest_kubernetes
from bench.documents.version_table import SERVED_METHODS
from devcluster.builds.binaries import KUBERNETES, NEWEST, OLDEST, USUAL
from specdecode_operator.cli.doctor import NEWEST_MINOR, OLDEST_MINOR
from specdecode_operator.enums import Method
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.engine.engine_versions import SERVED
from tests.support.documents import ROOT, table


@pytest.mark.parametrize("chart", ["specdecode-operator", "specdecode-crds"])
def test_the_charts_install_on_the_oldest_that_is_tested_and_newer_ones(chart: str) -> None:
    assert yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"
    assert oldest_kubernetes() == OLDEST


def test_doctor_warns_of_those_outside() -> None:
    assert (f"1.{OLDEST_MINOR}", f"1.{NEWEST_MINOR}") == (OLDEST, NEWEST)


@pytest.mark.parametrize("document", ["README.md", "docs/how-to/install.md"])
def test_who_installs_it_is_told(document: str) -> None:
    text = (ROOT / document).read_text()
    assert f"Kubernetes {OLDEST} or newer ([tested](" in text
    assert f"supported.md#tested-with) on {OLDEST}, {USUAL} and {NEWEST})" in text


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


def test_a_method_that_the_newest_vllm_removed_is_listed_with_its_last_version() -> None:
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


def test_who_asks_doctor_is_told() -> None:
    said = (ROOT / "docs/reference/cli.md").read_text()
    assert f"version of the API server: {OLDEST} or newer, and not newer than the newest [tested](" in said


def test_what_needs_an_api_server_runs_on_each_every_night() -> None:
    others = {*KUBERNETES} - {USUAL}
    assert {*re.findall(r'\(test-kubernetes "([\d.]+)"\)', (ROOT / "justfile").read_text())} == others
    job = yaml.safe_load((ROOT / ".github/workflows/long.yml").read_text())["jobs"]["kubernetes"]
    assert {*job["strategy"]["matrix"]["minor"]} == others
    assert "./just test-kubernetes ${{ matrix.minor }}" in yaml.safe_dump(job, width=1000)
