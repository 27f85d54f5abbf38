"""`specdecode attestation-webhook` does not begin with what it cannot use."""

from pathlib import Path

import pytest

from tests.support.attestations import key_pair
from tests.unit.cli.conftest import Specdecode

INVALID = 2


@pytest.mark.parametrize("container", ["istio-proxy", "=image", "istio-proxy="])
def test_allow_container_needs_name_and_image(specdecode: Specdecode, tmp_path: Path, container: str) -> None:
    (tmp_path / "cosign.pub").write_bytes(key_pair()[1])
    given = ("--key", tmp_path / "cosign.pub", "--certificate", tmp_path)
    result = specdecode("attestation-webhook", *given, f"--allow-container={container}")
    assert result.exit_code == INVALID
    assert f"{container}: write NAME=IMAGE" in " ".join(result.stderr.split())


def test_unusable_key_file_is_named(specdecode: Specdecode, tmp_path: Path) -> None:
    private, public = key_pair()
    (tmp_path / "key.pem").write_bytes(private)
    (tmp_path / "cosign.pub").write_bytes(public)
    for key, says in (("key.pem", "is a private key: use the public key"), ("none", "No such file")):
        keys = ("--key", tmp_path / "cosign.pub", "--key", tmp_path / key)
        result = specdecode("attestation-webhook", *keys, "--certificate", tmp_path)
        assert result.exit_code == INVALID
        assert says in result.stderr
        assert str(tmp_path / key) in result.stderr
