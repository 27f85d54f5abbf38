"""What the operator's image is made of, and whether anything of it is known to be vulnerable.

`python -m devcluster.supply_chain sbom|audit`. Both lean on uv, which knows our pins as those of a script: its lock is
made of them, and of nothing newer.
"""

import argparse
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.images import store
from devcluster.images.operator_image import REFERENCE, build_operator_image

SBOM: Final = REPOSITORY / "dist" / "specdecode-operator.cdx.json"
AUDITED: Final = ("runtime", "build", "dev", "tools", "docs")
"""Of requirements/: what is in the image, what makes it, and what runs on machines of those who work on it."""

_PROJECT: Final = "specdecode-operator"
_PIN: Final = re.compile(r"^[A-Za-z0-9].*?(?= \\$|$)", re.MULTILINE)
_NORMAL: Final = re.compile(r"[-_.]+")
_PYTHON: Final = """
import importlib.metadata as m, json
told = [d.metadata for d in m.distributions()]
print(json.dumps([[d["Name"], d["Version"], d["License-Expression"]] for d in told]))
"""
_DEBIAN: Final = ("dpkg-query", "--show", "--showformat=${Package}\t${Version}\t${Architecture}\n")

Document = dict[str, Any]


def pins(requirements: str) -> list[str]:
    """Return the pinned packages of a file of requirements, with what they hold for."""
    return [match[0].strip() for match in _PIN.finditer(requirements)]


def as_script(pinned: Sequence[str]) -> str:
    """Return a script that needs these packages and does nothing (PEP 723)."""
    lines = ["/// script", 'requires-python = ">=3.11"', "dependencies = ["]
    return "\n".join(f"# {line}" for line in [*lines, *(f"  {json.dumps(pin)}," for pin in pinned), "]", "///"]) + "\n"


def audit(options: Sequence[str]) -> int:
    """Ask for known vulnerabilities of all that is pinned; return the exit status: 1 where there is one."""
    worst = 0
    for name in AUDITED:
        print(f"requirements/{name}.txt:", flush=True)
        worst = max(worst, _uv("audit", name, *options).returncode)
    return worst


def described(exported: Document, python: Sequence[Sequence[str | None]], debian: str, system: str) -> Document:
    """Return the bill of materials (CycloneDX) of an image.

    Parameters
    ----------
    exported
        What uv says of all pinned packages.
    python
        Name, version and licence of the Python packages in the image.
    debian
        Lines of name, version and architecture of its Debian packages.
    system
        Its /etc/os-release.

    Raises
    ------
    ClusterError
        A Python package in the image is not pinned in that version.
    """
    versions = {_normal(str(name)): str(number) for name, number, _ in python}
    components = _python_components(exported, python)
    distribution = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', system, re.MULTILINE))
    components += [_debian_component(line, distribution) for line in debian.splitlines()]
    kept = {each["bom-ref"] for each in components}
    root = {"type": "container", "bom-ref": _PROJECT, "name": _PROJECT, "version": versions[_PROJECT]}
    content = {
        "components": sorted(components, key=lambda each: each["bom-ref"]),
        "dependencies": [
            each | {"dependsOn": [ref for ref in each.get("dependsOn", []) if ref in kept]}
            for each in exported.get("dependencies", [])
            if each["ref"] in kept
        ],
    }
    # The same for the same image: no time, and no number by chance.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([root, content], sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": exported["specVersion"], "version": 1}
    metadata = {"tools": exported["metadata"]["tools"], "component": root}
    return head | {"serialNumber": f"urn:uuid:{serial}", "metadata": metadata} | content


def write_sbom(file: Path = SBOM, image: str = REFERENCE) -> None:
    """Write the bill of materials of an image of the operator; that of development is built where it is not there."""
    if image == REFERENCE:
        build_operator_image()
    exported = _uv("export", "runtime", "--quiet", "--format=cyclonedx1.5", captured=True)
    if exported.returncode:
        raise ClusterError(f"uv export failed: {exported.stderr.strip()}")
    python = json.loads(store.run_in(image, ["/opt/specdecode/bin/python", "-c", _PYTHON], {}))
    debian = store.run_in(image, _DEBIAN, {})
    system = store.run_in(image, ["cat", "/etc/os-release"], {})
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(described(json.loads(exported.stdout), python, debian, system), indent=1) + "\n")
    print(file)


def _normal(name: str) -> str:
    return _NORMAL.sub("-", name).lower()


def _python_components(exported: Document, python: Sequence[Sequence[str | None]]) -> list[Document]:
    pinned = {(_normal(each["name"]), each["version"]): each for each in exported["components"]}
    components = []
    for name, number, licence in python:
        if (normal := _normal(str(name))) == _PROJECT:
            continue
        if (found := pinned.get((normal, number))) is None:
            wanted = "which requirements/runtime.txt does not pin: build it anew"
            raise ClusterError(f"the image has {name} {number}, {wanted}")
        components.append(found | ({"licenses": [{"expression": licence}]} if licence else {}))
    return components


def _debian_component(line: str, distribution: dict[str, str]) -> Document:
    name, version, architecture = line.split("\t")
    place = distribution.get("ID", "debian")
    of = f"arch={architecture}&distro={place}-{distribution.get('VERSION_ID', '')}"
    purl = f"pkg:deb/{place}/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?{of}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _uv(command: str, name: str, *options: str, captured: bool = False) -> subprocess.CompletedProcess[str]:
    """Run uv on what requirements/NAME.txt pins."""
    with TemporaryDirectory(prefix="specdecode-pins-") as folder:
        script = Path(folder) / f"{name}.py"
        script.write_text(as_script(pins((REPOSITORY / "requirements" / f"{name}.txt").read_text())))
        line = [str(REPOSITORY / "just"), "--uv", command, *options, f"--script={script}"]
        return subprocess.run(line, capture_output=captured, text=True, check=False)


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.supply_chain", description=__doc__)
    parser.add_argument("command", choices=("sbom", "audit"))
    given, options = parser.parse_known_args()
    try:
        if given.command == "audit":
            return audit(options)
        write_sbom()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
