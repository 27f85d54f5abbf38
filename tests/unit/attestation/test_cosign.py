"""Cosign itself, and ours: a key that it made signs here, and each verifies what the other signed."""

import json
import os
import re
import subprocess
from base64 import b64decode
from pathlib import Path

import pytest

from specdecode_operator.attestation.attest import Seen
from specdecode_operator.attestation.envelope import opened
from specdecode_operator.attestation.keys import PublicKey, SigningKey
from specdecode_operator.attestation.statement import read_statement
from tests.support.attestations import attest, key_pair, serving
from tests.support.documents import ROOT
from tests.support.kubectl import program

PAGE = ROOT / "docs/how-to/verify-a-rollout.md"
PASSWORD = "of the test"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a key pair of cosign's, in which its commands run."""
    cosign(tmp_path, "generate-key-pair")
    return tmp_path


def cosign(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "COSIGN_PASSWORD": PASSWORD}
    subprocess.run([program("cosign"), *arguments], cwd=folder, env=environment, check=True)


def verified(folder: Path, config_map: object) -> int:
    """Return how the commands of the page end, for a cluster that has this ConfigMap."""
    (folder / "kubectl").write_text("#!/bin/sh\ncat attestation.json\n")
    (folder / "kubectl").chmod(0o755)
    (folder / "attestation.json").write_text(json.dumps(config_map))
    found = re.search(
        r"run by tests/unit/attestation/test_cosign.py -->\n\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert found
    path = f"{folder}:{Path(program('cosign')).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", found[1]], cwd=folder, env={**os.environ, "PATH": path}, check=False
    ).returncode


@pytest.mark.long
def test_cosign_verifies_what_its_key_signed_here(folder: Path) -> None:
    key = SigningKey.read((folder / "cosign.key").read_bytes(), PASSWORD.encode())
    body, _, pod = serving()
    config_map = attest(body, key, Seen({}, [pod], [])).children[0]
    assert verified(folder, config_map) == 0
    assert verified(folder, attest(body, SigningKey.read(key_pair()[0])).children[0]) == 1, "another key"
    [(name, text)] = config_map["data"].items()
    envelope = json.loads(text)
    for field, changed in (("payload", envelope["payload"].replace("e", "f", 1)), ("payloadType", "text/plain")):
        forged = json.dumps({**envelope, field: changed})
        assert verified(folder, {**config_map, "data": {name: forged}}) == 1, field


@pytest.mark.long
def test_what_cosign_signed_is_verified_here(folder: Path) -> None:
    body, _, pod = serving()
    [text] = attest(body, SigningKey.read(key_pair()[0]), Seen({}, [pod], [])).children[0]["data"].values()
    (folder / "statement.json").write_bytes(b64decode(json.loads(text)["payload"]))
    offline = ("--use-signing-config=false", "--tlog-upload=false", "--yes")
    cosign(folder, "attest-blob", "--key=cosign.key", "--statement=statement.json", "--bundle=bundle.json", *offline)
    envelope = json.dumps(json.loads((folder / "bundle.json").read_text())["dsseEnvelope"])
    statement = read_statement(opened(envelope, PublicKey.read((folder / "cosign.pub").read_bytes())))
    assert statement.predicate.object.name == "llama"
