"""What the image is said to be made of, and how known vulnerabilities are told."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster import supply_chain
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.images import store
from devcluster.images.base import ensure_base
from devcluster.images.pip_settings import pip_volumes
from specdecode_operator.version import __version__

REQUIREMENTS = """# made by
kopf==1.44.7 \\
    --hash=sha256:00
    # via specdecode-operator
tzdata==2026.2 ; sys_platform == "win32" \\
    --hash=sha256:11
"""
DEBIAN = "libc6\t2.36-9+deb12u10\tamd64\npasswd\t1:4.13+dfsg1-1\tamd64\n"
SYSTEM = 'ID=debian\nVERSION_ID="12"\n'
PYTHON = [["Kopf", "1.44.7", "MIT"], ["specdecode_operator", "0.1.0", None]]


def exported() -> dict[str, Any]:
    components = [
        {"type": "library", "bom-ref": f"{name}-1", "name": name, "version": version, "purl": f"pkg:pypi/{name}"}
        for name, version in (("kopf", "1.44.7"), ("tzdata", "2026.2"))
    ]
    dependencies = [{"ref": "kopf-1", "dependsOn": ["tzdata-1"]}, {"ref": "tzdata-1"}]
    tools = {"tools": [{"name": "uv"}], "timestamp": "now"}
    return {"specVersion": "1.5", "metadata": tools, "components": components, "dependencies": dependencies}


def test_pins_are_those_of_the_file() -> None:
    assert supply_chain.pins(REQUIREMENTS) == ["kopf==1.44.7", 'tzdata==2026.2 ; sys_platform == "win32"']


def test_it_names_what_is_in_the_image_and_nothing_else() -> None:
    found = supply_chain.described(exported(), PYTHON, DEBIAN, SYSTEM)
    assert [each["purl"] for each in found["components"]] == [
        "pkg:pypi/kopf",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12",
        "pkg:deb/debian/passwd@1%3A4.13%2Bdfsg1-1?arch=amd64&distro=debian-12",
    ]
    assert found["components"][0]["licenses"] == [{"expression": "MIT"}]
    assert found["dependencies"] == [{"ref": "kopf-1", "dependsOn": []}]
    assert found["metadata"]["component"]["version"] == "0.1.0"


def test_it_is_the_same_for_the_same_image() -> None:
    one = supply_chain.described(exported(), PYTHON, DEBIAN, SYSTEM)
    assert "timestamp" not in json.dumps(one)
    assert supply_chain.described(exported(), PYTHON, DEBIAN, SYSTEM) == one
    other = supply_chain.described(exported(), PYTHON, DEBIAN.replace("u10", "u11"), SYSTEM)
    assert other["serialNumber"] != one["serialNumber"]


def test_an_image_with_what_nobody_pinned_has_none() -> None:
    with pytest.raises(
        ClusterError, match=r"the image has kopf 1\.44\.8, which requirements/runtime\.txt does not pin"
    ):
        supply_chain.described(exported(), [["kopf", "1.44.8", None]], DEBIAN, SYSTEM)


@pytest.mark.long
def test_the_image_is_described_whole(tmp_path: Path) -> None:
    supply_chain.write_sbom(tmp_path / "sbom.json")
    found = json.loads((tmp_path / "sbom.json").read_text())
    names = {each["name"] for each in found["components"]}
    assert {"kopf", "pydantic", "libc6", "ca-certificates"} <= names
    assert found["metadata"]["component"]["version"] == __version__
    assert len(found["components"]) == len({each["bom-ref"] for each in found["components"]})


@pytest.mark.long
def test_two_builds_are_the_same_image() -> None:
    base, digests = ensure_base(), []
    for number in (1, 2):
        reference = f"localhost/specdecode/reproduced:{number}"
        with pip_volumes() as volumes:
            store.build(REPOSITORY, REPOSITORY / "Containerfile", base, reference, volumes, anew=True)
        digests.append(store.digest(reference))
    assert digests[0] == digests[1]


class Vulnerabilities(http.server.BaseHTTPRequestHandler):
    """The database of vulnerabilities (OSV), which knows one of kopf."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
        known = [{"vulns": [{"id": "GHSA-test"}]} if each["package"]["name"] == "kopf" else {} for each in asked]
        self.answer({"results": known})

    def do_GET(self) -> None:
        self.answer({"id": "GHSA-test", "summary": "kopf obeys", "modified": "2026-01-01T00:00:00Z", "affected": []})

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def database() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Vulnerabilities) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.long
def test_a_known_vulnerability_fails_the_audit_and_is_named(database: str) -> None:
    command = [sys.executable, "-m", "devcluster.supply_chain", "audit", f"--service-url={database}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stderr
    assert "kopf" in answer.stdout + answer.stderr
    assert "GHSA-test" in answer.stdout + answer.stderr
    ignored = subprocess.run([*command, "--ignore=GHSA-test"], capture_output=True, text=True, check=False)
    assert ignored.returncode == 0, ignored.stderr
