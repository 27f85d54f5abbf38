"""`specdecode attestation verify`: what a third party finds out with a public key and files."""

import json
from pathlib import Path

import yaml

from specdecode_operator.deployment.attestation.attest import Seen
from specdecode_operator.deployment.attestation.keys import SigningKey
from tests.support.attestations import attest, entries, key_pair, serving
from tests.unit.cli.conftest import Specdecode, WriteObject

VERIFIED, NOT_VERIFIED, INVALID = 0, 1, 2


def attested(write: WriteObject, tmp_path: Path) -> tuple[Path, Path]:
    """Return the files of an attestation's ConfigMap and of its public key."""
    private, public = key_pair()
    body, _, pod = serving()
    (tmp_path / "cosign.pub").write_bytes(public)
    desired = attest(body, SigningKey.read(private), Seen({}, [pod], []))
    return write("attestation.yaml", desired.children[0]), tmp_path / "cosign.pub"


def test_unchanged_objects_are_verified(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    attestation, key = attested(write, tmp_path)
    result = specdecode("attestation", "verify", attestation, "--key", key, "-f", write("objects.yaml", *serving()))
    assert result.exit_code == VERIFIED, result.output
    assert "Pod default/llama-1 matches the attestation: containers, images by digest" in result.stdout
    assert result.stdout.endswith("verified\n")
    assert "not looked at" not in result.stdout


def test_objects_missing_in_the_files_are_listed(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    attestation, key = attested(write, tmp_path)
    result = specdecode("attestation", "verify", attestation, "--key", key)
    assert result.exit_code == VERIFIED, result.output
    assert "not checked, because no file contains it: SpecDecodeDeployment, Deployment, Pod" in result.stdout


def test_changed_image_is_not_verified(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    attestation, key = attested(write, tmp_path)
    pod = serving()[2]
    pod["spec"]["containers"][0]["image"] = "evil:1"
    result = specdecode("attestation", "verify", attestation, "--key", key, "-f", write("pod.yaml", pod))
    assert result.exit_code == NOT_VERIFIED
    assert "Pod default/llama-1: container engine: image: evil:1: " in result.stderr


def test_attestation_is_not_verified_with_another_key(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    attestation, key = attested(write, tmp_path)
    key.write_bytes(key_pair()[1])
    result = specdecode("attestation", "verify", attestation, "--key", key)
    assert result.exit_code == NOT_VERIFIED
    assert "was signed with another key" in result.stderr


def test_one_invalid_attestation_among_valid_ones_fails(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    attestation, key = attested(write, tmp_path)
    config_map = yaml.safe_load(attestation.read_text())
    config_map["data"]["forged.intoto.json"] = "{}"
    result = specdecode("attestation", "verify", write("mixed.yaml", config_map), "--key", key)
    assert result.exit_code == NOT_VERIFIED
    assert "forged.intoto.json: is not a DSSE envelope" in result.stderr


def test_attestations_of_several_objects_are_refused(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    private, public = key_pair()
    (tmp_path / "key").write_bytes(public)
    one, namesake = serving()[0], serving()[0]
    namesake["metadata"]["uid"] = "uid-2"
    both = write("both.yaml", *(attest(each, SigningKey.read(private)).children[0] for each in (one, namesake)))
    objects = write("objects.yaml", *serving())
    result = specdecode("attestation", "verify", both, "--key", tmp_path / "key", "-f", objects)
    assert result.exit_code == NOT_VERIFIED
    assert "about several objects" in result.stderr


def test_single_envelope_is_read_from_standard_input(specdecode: Specdecode, tmp_path: Path) -> None:
    private, public = key_pair()
    (tmp_path / "key").write_bytes(public)
    [envelope] = entries(attest(serving()[0], SigningKey.read(private))).values()
    result = specdecode("attestation", "verify", "-", "--key", tmp_path / "key", stdin=envelope)
    assert result.exit_code == VERIFIED, result.output
    assert "not attested: engines that served with this plan" in result.stdout
    cut = json.dumps({**json.loads(envelope), "signatures": []})
    assert specdecode("attestation", "verify", "-", "--key", tmp_path / "key", stdin=cut).exit_code == NOT_VERIFIED


def test_json_lists_differences_and_any_given_key_verifies(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    attestation, key = attested(write, tmp_path)
    other = tmp_path / "other.pub"
    other.write_bytes(key_pair()[1])
    body, workload, pod = serving()
    pod["spec"]["containers"][0]["image"] = "evil:1"
    given = ("--key", other, "--key", key, "-f", write("objects.yaml", body, pod), "-o", "json")
    result = specdecode("attestation", "verify", attestation, *given)
    assert result.exit_code == NOT_VERIFIED
    found = json.loads(result.stdout)
    assert not found["verified"]
    assert found["not_looked_at"] == ["Deployment"]
    [told] = found["attestations"]
    assert told["problem"] is None
    assert told["rollout"]["object"]["name"] == "llama"
    differences = {each["kind"]: each["differences"] for each in found["objects"]}
    image = workload["spec"]["template"]["spec"]["containers"][0]["image"]
    assert differences["SpecDecodeDeployment"] == []
    assert differences["Pod"] == [{"field": "container engine: image", "attested": image, "found": "evil:1"}]
    alone = json.loads(specdecode("attestation", "verify", attestation, "--key", other, "-o", "json").stdout)
    assert "was signed with another key" in alone["attestations"][0]["problem"]
    assert (alone["verified"], alone["attestations"][0]["rollout"]) == (False, None)


def test_envelope_in_a_sigstore_bundle_is_read(specdecode: Specdecode, tmp_path: Path) -> None:
    private, public = key_pair()
    (tmp_path / "key").write_bytes(public)
    [envelope] = entries(attest(serving()[0], SigningKey.read(private))).values()
    bundle = json.dumps({"mediaType": "x", "dsseEnvelope": json.loads(envelope)})
    assert specdecode("attestation", "verify", "-", "--key", tmp_path / "key", stdin=bundle).exit_code == VERIFIED


def test_unusable_files_say_why(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    attestation, key = attested(write, tmp_path)
    for arguments, says in (
        ((attestation, "--key", attestation), "is not a public key in PEM"),
        ((write("pod.yaml", serving()[2]), "--key", key), "contains no attestation"),
        ((tmp_path / "none.yaml", "--key", key), "No such file"),
    ):
        result = specdecode("attestation", "verify", *arguments)
        assert result.exit_code == INVALID
        assert says in result.stderr


def test_operator_refuses_a_signing_key_that_is_public(specdecode: Specdecode, tmp_path: Path) -> None:
    (tmp_path / "cosign.pub").write_bytes(key_pair()[1])
    result = specdecode("operator", "--signing-key", tmp_path / "cosign.pub")
    assert result.exit_code == INVALID
    assert "is not a private key in PEM: create one with cosign generate-key-pair" in result.stderr


def test_operator_refuses_a_former_key_that_is_private(specdecode: Specdecode, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(key_pair()[0])
    former = ("--former-key", tmp_path / "key.pem")
    result = specdecode("operator", "--signing-key", tmp_path / "key.pem", *former)
    assert result.exit_code == INVALID
    assert "--former-key: " in result.stderr
    assert "is a private key: use the public key" in result.stderr
    assert "--former-key: requires --signing-key" in " ".join(specdecode("operator", *former).stderr.split())
