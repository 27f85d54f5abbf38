"""Cosign and Fulcio themselves: a key that cosign made signs here, and each verifies what the other signed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from devcluster.cluster.settings import free_ports
from specdecode_operator.api.base import Body
from specdecode_operator.deployment.attestation.attest import Seen
from specdecode_operator.deployment.attestation.keys import PublicKey, SigningKey
from specdecode_operator.deployment.attestation.statement import opened, read_statement
from tests.support import plain_http
from tests.support.attestations import attest, key_pair, serving
from tests.support.documents import ROOT
from tests.support.kubectl import program
from tests.support.oidc_issuer import AUDIENCE, Issuer, oidc_issuer
from tests.support.waiting import eventually

PAGE = ROOT / "docs/operate/verify-a-rollout.md"
PASSWORD = "of the test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a key pair of cosign's, in which its commands run."""
    cosign(tmp_path, "generate-key-pair")
    return tmp_path


def cosign(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "COSIGN_PASSWORD": PASSWORD}
    subprocess.run([program("cosign"), *arguments], cwd=folder, env=environment, check=True)


def run(folder: Path, marked: str, config_map: object, more: str = "", **replaced: str) -> int:
    """Return how commands of the page end that are marked so, for a cluster that has this ConfigMap."""
    (folder / "kubectl").write_text("#!/bin/sh\ncat attestation.yaml\n")
    (folder / "kubectl").chmod(0o755)
    (folder / "attestation.yaml").write_text(json.dumps(config_map))
    (script,) = re.findall(rf"test_cosign.py{marked} -->\n\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for old, new in replaced.items():
        assert old in script
        script = script.replace(old, new)
    folders = (folder, Path(program("cosign")).parent, Path(sys.executable).parent, os.environ["PATH"])
    environment = {**os.environ, "PATH": ":".join(map(str, folders)), "COSIGN_PASSWORD": PASSWORD}
    command = ["bash", "-e", "-o", "pipefail", "-c", f"{script.strip()} {more}"]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def attested(folder: Path) -> Body:
    """Return an attestation signed with cosign's key, whose objects lie in the files that the page names."""
    body, workload, pod = serving()
    (folder / "object.yaml").write_text(json.dumps(body))
    (folder / "objects.yaml").write_text("\n---\n".join(map(json.dumps, (workload, pod))))
    key = SigningKey.read((folder / "cosign.key").read_bytes(), PASSWORD.encode())
    return attest(body, key, Seen({}, [pod], [])).children[0]


@pytest.mark.long
def test_cosign_verifies_an_attestation_signed_with_its_key(folder: Path) -> None:
    config_map = attested(folder)
    assert run(folder, "", config_map) == 0
    assert run(folder, "", attest(serving()[0], SigningKey.read(key_pair()[0])).children[0]) == 1, "another key"
    [(name, text)] = config_map["data"].items()
    envelope = json.loads(text)
    for field, changed in (("payload", envelope["payload"].replace("e", "f", 1)), ("payloadType", "text/plain")):
        forged = json.dumps({**envelope, field: changed})
        assert run(folder, "", {**config_map, "data": {name: forged}}) == 1, field


@pytest.mark.long
def test_attestation_signed_again_by_ci_with_a_key_is_verified(folder: Path) -> None:
    offline = "--key=cosign.key --use-signing-config=false --tlog-upload=false"
    assert run(folder, ": CI signs", attested(folder), offline) == 0
    envelope = json.dumps(json.loads((folder / "rollout.sigstore.json").read_text())["dsseEnvelope"])
    statement = read_statement(opened(envelope, PublicKey.read((folder / "cosign.pub").read_bytes())))
    assert statement.predicate.served


@pytest.mark.long
def test_keyless_ci_signature_is_verified_only_for_its_identity(folder: Path) -> None:
    with oidc_issuer() as issuer, fulcio(folder, issuer):
        (folder / "token").write_text(issuer.token())
        ours = "--signing-config=signing-config.json --trusted-root=trusted-root.json --identity-token=token"
        assert run(folder, ": CI signs", attested(folder), ours) == 0
    # Of a log of certificates and one of signatures there is none here.
    alone = "--trusted-root=trusted-root.json --insecure-ignore-tlog --insecure-ignore-sct"
    github = {"https://token.actions.githubusercontent.com": issuer.url}
    assert run(folder, ": a third party verifies", {}, alone, **github) == 0
    assert run(folder, ": a third party verifies", {}, alone, **github, attest="another") == 1, "another workflow"
    assert run(folder, ": a third party verifies", {}, alone) == 1, "another issuer"


@contextmanager
def fulcio(folder: Path, issuer: Issuer) -> Iterator[None]:
    """Run a Fulcio that believes an issuer, and write down who is to be asked and who is trusted."""
    port, grpc_port, metrics_port = free_ports(3)
    url, types = (
        f"http://127.0.0.1:{port}",
        {"issuer-url": issuer.url, "client-id": AUDIENCE, "type": "github-workflow"},
    )
    (folder / "fulcio.yaml").write_text(yaml.safe_dump({"oidc-issuers": {issuer.url: types}}))
    command = [program("fulcio"), "serve", "--ca=ephemeralca", "--ct-log-url=", "--config-path=fulcio.yaml"]
    command += ["--host=127.0.0.1", f"--port={port}", "--grpc-host=127.0.0.1", f"--grpc-port={grpc_port}"]
    command += [f"--metrics-port={metrics_port}", f"--legacy-unix-domain-socket=@fulcio-{os.getpid()}"]
    with (folder / "fulcio.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        eventually(lambda: (folder / "fulcio.pem").write_text(_root(url)), "Fulcio answers")
        nobody = ("--no-default-rekor", "--no-default-tsa", "--no-default-fulcio")
        root = f"--fulcio=url={url},certificate-chain=fulcio.pem"
        cosign(folder, "trusted-root", "create", *nobody, "--no-default-ctfe", root, "--out=trusted-root.json")
        ours = f"--fulcio=url={url},api-version=1,start-time=2024-01-01T00:00:00Z,operator=test"
        cosign(folder, "signing-config", "create", *nobody, "--no-default-oidc", ours, "--out=signing-config.json")
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def _root(url: str) -> str:
    try:
        [chain] = plain_http.get(f"{url}/api/v2/trustBundle", timeout=120).json()["chains"]
    except httpx.TransportError as error:
        raise AssertionError(error) from error
    return "\n".join(chain["certificates"])
