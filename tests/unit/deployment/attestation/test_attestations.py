"""What is signed of a rollout: nothing of it can be changed, and objects that are not as attested are told."""

import base64
import copy
import json
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.attestation.attest import MOST_ROLLOUTS, Seen
from specdecode_operator.deployment.attestation.keys import KeyFormatError, SigningKey
from specdecode_operator.deployment.attestation.statement import (
    Rollout,
    UnverifiedError,
    opened,
    pods_of,
    read_statement,
    sealed,
    signed_bytes,
)
from specdecode_operator.deployment.attestation.verify import compared
from specdecode_operator.deployment.desired_state import Launch, RolledBack
from specdecode_operator.deployment.rollout.rollback import Failure, LastGood, attempt_of
from tests.support.attestations import IMAGE_DIGEST, NOW, attest, cosign_key, entries, key_pair, serving, tampered
from tests.support.decisions import H200_NODE, decide
from tests.support.objects import pair_70b, parent

PRIVATE, PUBLIC = key_pair()
KEY = SigningKey.read(PRIVATE)


def served() -> tuple[str, Rollout]:
    body, _, pod = serving()
    [envelope] = entries(attest(body, KEY, Seen({}, [pod], []))).values()
    return envelope, read_statement(opened(envelope, KEY.public)).predicate


def refusal(envelope: str) -> str:
    """Return why an attestation does not hold; an empty text where it does."""
    try:
        read_statement(opened(envelope, KEY.public))
    except UnverifiedError as error:
        return str(error)
    return ""


def test_plan_is_attested_before_pods_and_engines_once_they_serve() -> None:
    body, _, pod = serving()
    before = attest(parent(pair_70b()), KEY)
    assert before.children[0]["metadata"]["name"] == "llama-attestation"
    [(name, envelope)] = entries(before).items()
    plan = read_statement(opened(envelope, KEY.public)).predicate
    assert plan.served is None
    assert plan.plan["verdict"] == "Fits"
    after = entries(attest(body, KEY, Seen({name: envelope}, [pod], [])))
    [rollout] = (read_statement(opened(each, KEY.public)).predicate for each in after.values())
    assert rollout.served is not None
    assert rollout.served.kv_cache.predicted_tokens - 160 == rollout.served.kv_cache.reported_tokens
    assert {each.digest for each in rollout.served.images} == {IMAGE_DIGEST}
    # What was seen once stands while engines are away, and nothing is signed anew without need.
    assert entries(attest(body, KEY, Seen(after, [], []), NOW + timedelta(days=1))) == after


def test_engines_of_an_earlier_generation_are_not_attested() -> None:
    body, _, pod = serving()
    body["metadata"]["generation"] += 1
    [envelope] = entries(attest(body, KEY, Seen({}, [pod], []))).values()
    assert read_statement(opened(envelope, KEY.public)).predicate.served is None


def test_newest_rollouts_are_kept_and_foreign_entries_dropped() -> None:
    kept: dict[str, str] = {"forged.intoto.json": sealed(b"{}", SigningKey.read(key_pair()[0])), "x": "text"}
    for generation in range(1, MOST_ROLLOUTS + 3):
        spec = pair_70b(serving={"maxModelLen": 4096 + 16 * generation})
        kept = entries(attest(parent(spec, generation=generation), KEY, Seen(kept, [], [])))
    found = [read_statement(opened(each, KEY.public)).predicate.object.generation for each in kept.values()]
    assert sorted(found, reverse=True) == [6, 5, 4, 3]


def test_last_good_rollout_stays_attested_after_failed_attempts() -> None:
    first = attest(parent(pair_70b()), KEY)
    assert first.workload is not None
    [name], kept = entries(first), entries(first)
    for generation in range(2, MOST_ROLLOUTS + 4):
        body = parent(pair_70b(serving={"maxModelLen": 4096 + 16 * generation}), generation=generation)
        kept = entries(attest(body, KEY, Seen(kept, [], []), last_good=LastGood.of(first.workload)))
        outcome = decide(body, nodes=(H200_NODE,))[0].outcome
        assert isinstance(outcome, Launch)
        failure = Failure(attempt_of(outcome.facts.spec, outcome.plan.chosen), "OutOfMemory", "too much")
        back = attest(body, KEY, Seen(kept, [], []), last_good=LastGood.of(first.workload, failure))
        kept = entries(back)
        assert name in kept
    assert isinstance(back.outcome, RolledBack)
    assert len(kept) == MOST_ROLLOUTS


def test_rollout_in_use_is_kept_among_thousands_of_foreign_entries() -> None:
    earlier = entries(attest(parent(pair_70b(serving={"maxModelLen": 4096})), KEY))
    body = parent(pair_70b(), generation=2)
    its = entries(attest(body, KEY))
    others = {f"{number:016x}.intoto.json": "{}" for number in range(3_000)}
    kept = entries(attest(body, KEY, Seen({**others, **earlier, **its}, [], []), NOW + timedelta(days=1)))
    assert kept == its, "as it was signed first; what is not in use and lost among them is forgotten"
    assert len(entries(attest(body, KEY, Seen({**earlier, **its}, [], [])))) == 2


def test_attestation_of_an_object_with_the_same_name_is_ignored() -> None:
    body, _, pod = serving()
    its = entries(attest(body, KEY, Seen({}, [pod], [])))
    namesake = parent(pair_70b())
    namesake["metadata"]["uid"] = "uid-2"
    [envelope] = entries(attest(namesake, KEY, Seen(its, [], []))).values()
    found = read_statement(opened(envelope, KEY.public)).predicate
    assert (found.object.uid, found.served) == ("uid-2", None)


def test_change_to_any_statement_field_fails_verification() -> None:
    envelope, _ = served()
    document = json.loads(envelope)
    statement = json.loads(base64.b64decode(document["payload"]))
    changes = dict(tampered(statement))
    assert len(changes) > 100
    for place, changed in changes.items():
        payload = base64.b64encode(json.dumps(changed).encode()).decode()
        assert "signature" in refusal(json.dumps({**document, "payload": payload})), place


def test_change_to_any_envelope_field_but_keyid_fails_verification() -> None:
    envelope, _ = served()
    # A key's name is a hint: without it the signature tells alone.
    for place, changed in tampered(json.loads(envelope)):
        if place == "-.signatures[0].keyid":
            assert opened(json.dumps(changed), KEY.public)
            continue
        assert refusal(json.dumps(changed)), place


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"payload": "", "payload": ""}', "[" * 100_000])
def test_malformed_envelope_is_refused(text: str) -> None:
    with pytest.raises(UnverifiedError, match="is not a DSSE envelope"):
        opened(text, KEY.public)


def test_signed_statement_with_changed_subjects_is_refused() -> None:
    statement = json.loads(opened(served()[0], KEY.public))
    for place, changed in tampered(statement["subject"]):
        text = json.dumps({**statement, "subject": changed})
        assert refusal(sealed(text.encode(), KEY)), place


def values_of(env: list[Body]) -> list[Body]:
    return [{"value": "", **each} if "valueFrom" not in each else each for each in env]


def test_change_to_any_attested_field_is_a_difference() -> None:
    _, rollout = served()
    body, workload, pod = serving()
    for each in (body, workload, pod):
        assert compared([rollout], each).differences == ()
    attested: list[tuple[Any, list[str | int]]] = [
        (body, ["spec"]),
        (body, ["status", "plan"]),
        (body, ["status", "observed", "kvCacheTokens"]),
        (body, ["status", "observed", "kvCacheResidualBytes"]),
        *((body, ["metadata", field]) for field in ("uid", "generation", "name", "namespace")),
    ]
    for of, path in ((workload, ["spec", "template", "spec"]), (pod, ["spec"])):
        fields = ("name", "image", "command", "args", "env")
        attested += [
            (of, [*path, kind, 0, field])
            for kind in ("containers", "initContainers")
            for field in fields
            if field in at(of, [*path, kind, 0])
        ]
    attested.append((pod, ["status", "containerStatuses", 0, "imageID"]))
    for of, path in attested:
        for place, changed in tampered(at(of, path)):
            if place.startswith("+["):
                continue  # no field of a variable
            other = copy.deepcopy(of)
            at(other, path[:-1])[path[-1]] = changed
            if path[-1] == "env" and values_of(changed) == values_of(at(of, path)):
                continue  # a variable without a value is empty
            assert compared([rollout], other).differences, (path, place)


def at(value: Any, path: list[str | int]) -> Any:
    for each in path:
        value = value[each]
    return value


def a_pod(volumes: Any = (), annotations: Any = None, **container: Any) -> Body:
    spec = {"containers": [{"name": "engine", "image": "i", **container}], "volumes": [*volumes]}
    return {"metadata": {"annotations": annotations or {}}, "spec": spec}


TOKEN_MOUNT: Body = {
    "name": "kube-api-access-x2k4",
    "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
    "readOnly": True,
}
TOKEN_VOLUME: Body = {
    "name": "kube-api-access-x2k4",
    "projected": {
        "defaultMode": 0o644,
        "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
            {
                "downwardAPI": {
                    "items": [
                        {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}, "path": "namespace"}
                    ]
                }
            },
        ],
    },
}
"""What an API server 1.34 writes into a pod whose account has a token."""


def test_only_the_service_account_token_volume_is_ignored() -> None:
    attested = pods_of(a_pod())
    assert attested == pods_of(a_pod([TOKEN_VOLUME], volumeMounts=[TOKEN_MOUNT]))
    sources = TOKEN_VOLUME["projected"]["sources"]
    others: list[Body] = [
        {"configMap": {"name": "mine"}},
        {"projected": {"sources": [*sources, {"secret": {"name": "more"}}]}},
        {"projected": {"sources": [sources[0], {"configMap": {"name": "mine"}}, sources[2]]}},
    ]
    for other in others:
        volume = {"name": TOKEN_VOLUME["name"], **other}
        assert attested != pods_of(a_pod([volume], volumeMounts=[TOKEN_MOUNT])), other
    assert attested != pods_of(a_pod([TOKEN_VOLUME], volumeMounts=[{**TOKEN_MOUNT, "mountPath": "/models"}]))


def test_volumes_mounts_and_probes_are_attested() -> None:
    field: Body = {"fieldPath": "metadata.annotations['specdecode.io/logging']"}
    rendered = [
        {"name": "cache", "emptyDir": {"sizeLimit": "1024Mi"}},
        {"name": "code", "configMap": {"name": "code", "optional": False}},
        {"name": "text", "downwardAPI": {"items": [{"path": "logging.json", "fieldRef": field}]}},
    ]
    live: list[Body] = [
        {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "code", "configMap": {"name": "code", "defaultMode": 0o644}},
        {"name": "text", "downwardAPI": {"defaultMode": 0o644, "items": [{**rendered[2]["downwardAPI"]["items"][0]}]}},
        TOKEN_VOLUME,
    ]
    live[2]["downwardAPI"]["items"][0]["fieldRef"] = {**field, "apiVersion": "v1"}
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    mounts: list[Body] = [{"name": each["name"], "mountPath": f"/{each['name']}"} for each in rendered]
    asked = a_pod(rendered, {"specdecode.io/logging": "{}"}, volumeMounts=mounts, livenessProbe=probe)
    as_live = a_pod(
        live, {"specdecode.io/logging": "{}", "more": "x"}, volumeMounts=[*mounts, TOKEN_MOUNT], livenessProbe=probe
    )
    attested = pods_of(asked)
    assert attested == pods_of(as_live)
    place = as_live["spec"]["containers"][0]
    assert attested != pods_of({**as_live, "metadata": {"annotations": {"specdecode.io/logging": "{run}"}}})
    others: list[Body] = [
        {**place, "livenessProbe": {**probe, "exec": {"command": ["sh"]}}},
        {**place, "lifecycle": {"postStart": {"exec": {"command": ["sh"]}}}},
        {**place, "workingDir": "/cache"},
        {**place, "volumeMounts": [*place["volumeMounts"], {"name": "code", "mountPath": "/usr/lib/python3"}]},
        {**place, "volumeMounts": [{**mounts[0], "subPath": "x"}, *mounts[1:]]},
        {**place, "volumeMounts": [mounts[0], {**mounts[1], "name": "cache"}, mounts[2]]},
    ]
    for each in others:
        assert attested != pods_of({**as_live, "spec": {**as_live["spec"], "containers": [each]}}), each
    live[1]["configMap"]["name"] = "mine"
    assert attested != pods_of(as_live)


def test_env_defaults_of_api_server_and_leader_worker_set_are_ignored() -> None:
    rendered = [
        {"name": "EMPTY", "value": ""},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ]
    live: list[dict[str, Any]] = [
        {"name": "LWS_LEADER_ADDRESS", "value": "a"},
        {"name": "EMPTY"},
        {"name": "IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ]
    pods = [pods_of(a_pod(env=env)) for env in (rendered, live)]
    assert pods[0] == pods[1]
    live[-1]["valueFrom"]["secretKeyRef"]["key"] = "another"
    assert pods_of(a_pod(env=live)) != pods[0]


BASE, CODE = {"name": "BASE", "value": "/good"}, {"name": "CODE", "value": "$(BASE)/lib"}
PLAIN, LED = {"name": "PLAIN", "value": "x"}, {"name": "LWS_LEADER_ADDRESS", "value": "a"}


@pytest.mark.parametrize(
    ("one", "other", "are_the_same"),
    [
        ([BASE, PLAIN], [PLAIN, BASE], True),
        ([BASE, CODE], [LED, BASE, CODE], True),
        ([BASE, CODE], [CODE, BASE], False),
        ([BASE, CODE], [{**BASE, "value": "/evil"}, CODE, BASE], False),
        ([BASE, PLAIN], [{**BASE, "value": "/evil"}, PLAIN, BASE], False),
    ],
)
def test_env_order_counts_only_where_variables_refer_to_others(
    one: list[Body], other: list[Body], are_the_same: bool
) -> None:
    assert (pods_of(a_pod(env=one)) == pods_of(a_pod(env=other))) == are_the_same


def test_stdin_tty_restart_policy_and_termination_path_are_attested() -> None:
    plain = pods_of(a_pod())
    written = {"terminationMessagePath": "/dev/termination-log", "stdin": False, "tty": False}
    assert pods_of(a_pod(**written)) == plain
    for field, value in (
        ("terminationMessagePath", "/usr/lib/python3/site.py"),
        ("stdin", True),
        ("stdinOnce", True),
        ("tty", True),
        ("restartPolicy", "Always"),
    ):
        assert pods_of(a_pod(**{field: value})) != plain, field


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_openssl_verifies_the_signature(tmp_path: Path) -> None:
    document = json.loads(served()[0])
    files = {
        "key": PUBLIC,
        "signature": base64.b64decode(document["signatures"][0]["sig"]),
        "message": signed_bytes(base64.b64decode(document["payload"]), document["payloadType"]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = ["openssl", "dgst", "-sha256", "-verify", "key", "-signature", "signature", "message"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == "Verified OK\n"


def test_private_key_written_by_cosign_is_read() -> None:
    for password in (b"secret", b""):
        assert SigningKey.read(cosign_key(PRIVATE, password), password).public.id == KEY.public.id
    assert SigningKey.read(cosign_key(PRIVATE, b"")).public.id == KEY.public.id


def test_unreadable_private_key_says_what_to_provide() -> None:
    plain = load_pem_private_key(PRIVATE, None)
    locked = plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    assert SigningKey.read(locked, b"secret").public.id == KEY.public.id
    ours, params = cosign_key(PRIVATE, b"secret"), {"N": 2**30, "r": 8, "p": 1}
    for pem, password, says in (
        (locked, None, "has a password: set --signing-key-password-file"),
        (locked, b"x", "cannot be decrypted with this password"),
        (PRIVATE, b"secret", "has no password"),
        (ours, None, "cannot be decrypted with this password"),
        (ours, b"x", "cannot be decrypted with this password"),
        (cosign_key(PRIVATE, b"secret", kdf={"name": "argon2"}), b"secret", "is encrypted with"),
        (cosign_key(PRIVATE, b"secret", kdf={"params": params}), b"secret", "needs more memory"),
        (cosign_key(PRIVATE, b"secret", kdf={"params": {**params, "N": -1}}), b"secret", "cannot be decrypted"),
        (cosign_key(PRIVATE, b"secret", cipher={"nonce": "AAAA"}), b"secret", "cannot be decrypted"),
        (ours.replace(b"\n", b"\nAAAA", 1), b"secret", "is not a complete key"),
        (b"", None, "is not a private key"),
        (PUBLIC, None, "is not a private key"),
    ):
        with pytest.raises(KeyFormatError, match=says):
            SigningKey.read(pem, password)
