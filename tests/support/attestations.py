"""A rollout that is attested, its objects as a cluster has them, and every way to change one value of something."""

import copy
import json
from base64 import b64encode, encodebytes
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from nacl.secret import SecretBox

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.attestation.attest import Seen, attested
from specdecode_operator.deployment.attestation.keys import SigningKey
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import H200_NODE, decide
from tests.support.objects import pair_70b, parent

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IMAGE_DIGEST = f"sha256:{'a1' * 32}"


def key_pair() -> tuple[bytes, bytes]:
    """Return a private key and its public one, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def cosign_key(private: bytes, password: bytes, **parts: dict[str, Any]) -> bytes:
    """Return a private key as cosign writes it, with some fields of its parts changed."""
    key = load_pem_private_key(private, None)
    salt, nonce, cost = b"s" * 32, b"n" * SecretBox.NONCE_SIZE, {"N": 1024, "r": 8, "p": 1}
    derived = Scrypt(salt, SecretBox.KEY_SIZE, cost["N"], cost["r"], cost["p"]).derive(password)
    plain = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    written: dict[str, Any] = {
        "kdf": {"name": "scrypt", "params": cost, "salt": b64encode(salt).decode()},
        "cipher": {"name": "nacl/secretbox", "nonce": b64encode(nonce).decode()},
        "ciphertext": b64encode(SecretBox(derived).encrypt(plain, nonce).ciphertext).decode(),
    }
    for part, fields in parts.items():
        written[part] |= fields
    text, kind = encodebytes(json.dumps(written).encode()), b"ENCRYPTED SIGSTORE PRIVATE KEY-----"
    return b"-----BEGIN " + kind + b"\n" + text + b"-----END " + kind + b"\n"


def attest(body: Body, key: SigningKey, seen: Seen | None = None, now: datetime = NOW, **cluster: Any) -> DesiredState:
    """Return what should exist for an object, with its attestation."""
    desired = decide(body, nodes=(H200_NODE,), **cluster)[0]
    return attested(parse_deployment(body), desired, seen or Seen({}, [], []), key, now)


def entries(desired: DesiredState) -> dict[str, str]:
    """Return the attestations of a desired state."""
    found = (each for each in desired.children if each["metadata"]["name"].endswith("-attestation"))
    return next((each["data"] for each in found), {})


def serving() -> tuple[Body, Body, Body]:
    """Return an object whose engine serves, its Deployment and its pod, as the API server has them."""
    body = parent(pair_70b())
    desired, status, _ = decide(body, nodes=(H200_NODE,))
    workload = copy.deepcopy(desired.workload)
    assert workload is not None
    assert status.plan is not None
    tokens = status.plan.kv_cache_tokens - 160
    body |= {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment"}
    body["status"] = {
        "plan": status.plan.model_dump(mode="json", by_alias=True, exclude_none=True),
        "observed": {
            "engines": 1,
            "engineVersion": "0.33.0",
            "kvCacheTokens": tokens,
            "kvCacheResidualBytes": 160 * status.plan.kv_bytes_per_token,
        },
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
    }
    template = workload["spec"]["template"]
    template["spec"] |= {"schedulerName": "default-scheduler", "tolerations": [{"operator": "Exists"}]}
    metadata = {**template["metadata"], "namespace": "default", "name": "llama-1"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"])}
    fields = {"containerStatuses": "containers", "initContainerStatuses": "initContainers"}
    pod["status"] = {
        status: [
            {"name": each["name"], "image": each["image"], "imageID": f"docker.io/x/y@{IMAGE_DIGEST}"}
            for each in template["spec"].get(field) or []
        ]
        for status, field in fields.items()
    }
    return body, workload, pod


def tampered(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Return a value with one thing in it changed, added or left out, each with its place."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield f"-{place}.{name}", {other: value[other] for other in value if other != name}
            for where, changed in tampered(each, f"{place}.{name}"):
                yield where, {**value, name: changed}
        yield f"+{place}", {**value, "added": "x"}
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield f"-{place}[{index}]", [*value[:index], *value[index + 1 :]]
            for where, changed in tampered(each, f"{place}[{index}]"):
                yield where, [*value[:index], changed, *value[index + 1 :]]
    else:
        yield place, value + 1 if isinstance(value, int) and not isinstance(value, bool) else f"{value}x"
