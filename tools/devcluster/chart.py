"""Renders the chart with Helm, and generates `manifests/` from it for users who do not use Helm.

`python -m devcluster.chart` writes one file of `manifests/` for each template that renders an object with the chart's
default values and the development image. It also writes what each values file of `examples/` renders differently, for
tests to compare.
"""

import difflib
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from devcluster.builds import binaries
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY

CHART = REPOSITORY / "charts" / "specdecode-operator"
CRDS = REPOSITORY / "charts" / "specdecode-crds"
EXAMPLES = CHART / "examples"
DEVELOPMENT = Path(__file__).with_name("development-values.yaml")
"""Values with the image of development clusters: the chart alone names no image and fails."""
MANIFESTS = REPOSITORY / "manifests"
GOLDEN = REPOSITORY / "tests" / "golden" / "chart"
NAMESPACE = "specdecode-system"
RELEASE = "specdecode-operator"
BY_HAND = frozenset({"kustomization.yaml", "namespace.yaml"})
"""Files of `manifests/` that the chart does not make: Helm makes the namespace itself (--create-namespace)."""

_HEADER = "# Made of charts/specdecode-operator/templates/{name}: ./just manifests\n"
_HELMS_OWN = re.compile(r"^ *(helm\.sh/chart: .*|app\.kubernetes\.io/managed-by: Helm)\n", re.MULTILINE)
_COPIES = ("dashboard.yaml", "prometheus-rule.yaml")
_SOURCE = re.compile(r"# Source: [^/]+/templates/(.+)\n")


def template(*options: str, release: str = RELEASE) -> str:
    """Return the output of `helm template`, with the development image unless the options name another."""
    helm = binaries.find("helm")["helm"]
    command = [helm, "template", release, CHART, f"--namespace={NAMESPACE}", f"--values={DEVELOPMENT}", *options]
    answer = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ClusterError(answer.stderr.strip())
    return answer.stdout


def manifests() -> dict[str, str]:
    """Return the generated files of `manifests/`: by name what stands in them."""
    files = _by_template(_HELMS_OWN.sub("", template()))
    return {name: _HEADER.format(name=name) + text for name, text in files.items()}


def of_examples() -> dict[str, str]:
    """Return what each values file of `examples/` changes in the output of the chart.

    A template that renders as in `manifests/` is named. One with few changed lines has their diff in a comment.
    Other templates are whole, except those that only copy from `files/`.
    """
    default = _by_template(_HELMS_OWN.sub("", template()))
    return {file.name: _changes(default, file) for file in sorted(EXAMPLES.glob("*.yaml"))}


def _changes(default: dict[str, str], values: Path) -> str:
    found = _by_template(_HELMS_OWN.sub("", template(f"--values={values}")))
    comments, documents = [], []
    for name, text in sorted(found.items()):
        changed = _diff(default.get(name, ""), text)
        if not changed:
            comments.append(f"# {name}: as in manifests/\n")
        elif len(changed) < text.count("\n") / 2:
            comments += [f"# {name}: as in manifests/ except\n", *(f"#   {line}\n" for line in changed)]
        elif name not in _COPIES:
            documents.append(f"# {name}\n{text}")
    return "".join(comments) + "---\n".join(documents)


def _diff(before: str, after: str) -> list[str]:
    return [*difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")][2:]


def _by_template(text: str) -> dict[str, str]:
    """Take apart what Helm prints: by file of `templates/` what it makes."""
    files: dict[str, list[str]] = defaultdict(list)
    for document in re.split(r"^---\n", text, flags=re.MULTILINE):
        if source := _SOURCE.match(document):
            files[source[1]].append(document[source.end() :].rstrip() + "\n")
    return {name: "---\n".join(documents) for name, documents in files.items()}


def write() -> None:
    """Write the generated files, and remove those of templates and examples that are gone."""
    _write(MANIFESTS, manifests())
    _write(GOLDEN, of_examples())


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    for file in folder.iterdir():
        if file.name not in BY_HAND | files.keys():
            file.unlink()


if __name__ == "__main__":
    write()
