"""The admission webhook: verdicts on objects and pods, HTTPS, certificates and hostile clients."""

import copy
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.attestation.attest import Seen
from specdecode_operator.deployment.attestation.keys import SigningKey
from specdecode_operator.deployment.attestation.pod_admission import Gate
from specdecode_operator.deployment.attestation.statement import MOST_BYTES
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, Weights
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.metrics import AdmissionCollector
from specdecode_operator.handlers.webhook import VALIDATE, NoReviewError, answer, answer_pod, serve_admission
from specdecode_operator.handlers.webhook_certificate import CertificateFolder
from tests.support.admission_cases import (
    ADMITTED,
    REFUSED,
    REFUSED_CAPTURE,
    TOO_LARGE,
    capture,
    deployment,
)
from tests.support.attestations import attest, key_pair, serving
from tests.support.certificates import DAY, write_certificate
from tests.support.objects import H100, HUB_TOKEN, TINY_CONFIG, pair_70b, parent

NAMES = list(REFUSED)
DEFAULTS = Terms()


def review(body: Body, before: Body | None = None, operation: str = "") -> Body:
    """Return what the API server sends."""
    request = {
        "uid": "u1",
        "operation": operation or ("UPDATE" if before else "CREATE"),
        "namespace": "team",
        "object": body,
        "oldObject": before,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def asked(body: Body, before: Body | None = None, terms: Terms = DEFAULTS, **more: str) -> Body:
    response: Body = answer(review(body, before, **more), terms)["response"]
    assert response["uid"] == "u1"
    return response


def linted(tmp_path: Path, body: Body, *options: str) -> list[Body]:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(body))
    result = CliRunner().invoke(app, ["lint", str(file), "--output=json", *options])
    found: list[Body] = json.loads(result.stdout)["findings"]
    return found


def test_valid_object_is_allowed_without_warnings() -> None:
    assert asked(deployment(ADMITTED)) == {"uid": "u1", "allowed": True}


@pytest.mark.parametrize("name", NAMES)
def test_lint_and_webhook_refuse_with_the_same_message(name: str, tmp_path: Path) -> None:
    spec, reason = REFUSED[name]
    errors = [each for each in linted(tmp_path, deployment(spec)) if each["level"] == "error"]
    assert {each["rule"] for each in errors} == {reason}
    message = "; ".join(each["message"] for each in errors)
    assert asked(deployment(spec))["status"]["message"] == f"{message} [{reason}]"


def test_spec_that_does_not_fit_is_a_warning_or_refused_by_setting(tmp_path: Path) -> None:
    response = asked(deployment(TOO_LARGE))
    (warning,) = response["warnings"]
    assert response["allowed"]
    assert "does not fit" in warning
    refused = asked(deployment(TOO_LARGE), terms=Terms(does_not_fit=False))
    assert not refused["allowed"]
    assert refused["status"]["message"].endswith("[DoesNotFit]")
    (found,) = linted(tmp_path, deployment(TOO_LARGE))
    assert (found["level"], found["rule"]) == ("warning", "DoesNotFit")
    assert found["message"].startswith(warning.removesuffix("…"))
    (found,) = linted(tmp_path, deployment(TOO_LARGE), "--refuse-does-not-fit")
    assert found["level"] == "error"


def test_ignore_plan_override_is_allowed_with_a_warning() -> None:
    spec = {**TOO_LARGE, "override": {"ignorePlan": True, "reason": "measured"}}
    response = asked(deployment(spec), terms=Terms(does_not_fit=False))
    assert response["allowed"]
    assert "measured" in response["warnings"][0]


def test_known_nodes_are_used_for_the_verdict() -> None:
    spec = pair_70b(parallelism={"tensor": 4}, models=HUB_TOKEN)
    assert "warnings" not in asked(deployment(spec))
    small = (NodeFacts("a", H100, 2),)
    assert "NodesTooFew" not in str(asked(deployment(spec)))
    (warning,) = asked(deployment(spec), terms=Terms(nodes=small))["warnings"]
    assert "4 GPUs per replica" in warning


def test_host_path_and_pod_template_grants_are_respected() -> None:
    terms = Terms(host_paths=("/mnt",), pod_template=frozenset({"hostNetwork"}))
    spec = pair_70b(
        models={"volume": {"hostPath": {"path": "/mnt/models"}}}, podTemplate={"spec": {"hostNetwork": True}}
    )
    # Models of a volume are read by a Job, once they are there.
    assert asked(deployment(spec), terms=terms)["allowed"]


def test_unknown_model_is_allowed_and_its_spec_still_checked() -> None:
    unknown = {"target": {"model": "acme/new"}}
    assert asked(deployment(unknown)) == {"uid": "u1", "allowed": True}
    bad = {**unknown, "engine": {"extraArgs": ["--tensor-parallel-size", "4"]}}
    assert not asked(deployment(bad))["allowed"]


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("Qwen/Qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instuct", "Qwen/Qwen2.5-7B-Instruct"),
        ("acme/Qwen3-8B", None),
    ],
)
def test_misspelt_hub_model_is_allowed_with_the_known_name(model: str, meant: str | None) -> None:
    target = {"model": model}
    response = asked(deployment({"target": target}))
    expected = [f"spec.target.model: {model}: is not in the catalogue; did you mean {meant}?"] if meant else None
    assert response["allowed"]
    assert response.get("warnings") == expected
    of_volume = {"target": target, "models": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}}
    assert "warnings" not in asked(deployment(of_volume))


def test_facts_files_are_used_for_the_verdict() -> None:
    weights = Weights(5_771_776, 39, True, {"BF16": 5_771_776}, {})
    terms = Terms(site_facts={"site/tiny": SiteFacts("tiny.json", "1", Checkpoint(TINY_CONFIG, weights))})
    spec = {"target": {"model": "site/tiny"}, "parallelism": {"tensor": 8}}
    assert asked(deployment(spec))["allowed"]
    response = asked(deployment(spec), terms=terms)
    assert not response["allowed"]
    assert "spec.parallelism.tensor" in response["status"]["message"]


def test_capture_with_load_longer_than_its_deadline_is_refused(tmp_path: Path) -> None:
    response = asked(capture(REFUSED_CAPTURE))
    assert not response["allowed"]
    (found,) = linted(tmp_path, capture(REFUSED_CAPTURE))
    assert response["status"]["message"] == f"{found['message']} [WorkloadTooLong]"
    good = {**REFUSED_CAPTURE, "deadlineSeconds": 3600}
    assert asked(capture(good))["allowed"]


def training(**changes: Any) -> Body:
    spec = {"deployment": "chat", "captures": ["evening"], "trainer": {"image": "localhost/trainer:1"}, **changes}
    return {"apiVersion": API_VERSION, "kind": "SpecDecodeTraining", "metadata": {"name": "head"}, "spec": spec}


def test_training_is_checked() -> None:
    assert asked(training())["allowed"]
    response = asked(training(trainer={"image": "i", "epochs": 0}))
    assert not response["allowed"]
    assert "spec.trainer.epochs" in response["status"]["message"]
    (warning,) = asked(training(), terms=Terms(storage_classes=CLASSES))["warnings"]
    assert warning.startswith("spec.storage.storageClassName: not set: ")


CLASSES = StorageClasses({"fast": "WaitForFirstConsumer"})


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        ({"storageClassName": "fats"}, "spec.storage.storageClassName: fats: "),
        ({}, "spec.storage.storageClassName: not set: "),
        ({"storageClassName": "fast"}, ""),
        ({"persistentVolumeClaim": {"claimName": "mine"}}, ""),
    ],
)
def test_missing_storage_class_is_a_warning(tmp_path: Path, storage: Body, told: str) -> None:
    body = capture({**REFUSED_CAPTURE, "deadlineSeconds": 3600, "storage": storage})
    assert "warnings" not in asked(body), "nothing is said of classes that are not known"
    response = asked(body, terms=Terms(storage_classes=CLASSES))
    assert response["allowed"]
    assert [each[: len(told)] for each in response.get("warnings", [])] == ([told] if told else [])
    classes = tmp_path / "classes.yaml"
    one = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"}}
    classes.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": [one]}))
    found = linted(tmp_path, body, f"--storage-classes={classes}")
    assert [each["rule"] for each in found] == (["StorageClassNotFound"] if told else [])


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (deployment(REFUSED[NAMES[0]][0]), {"labels": {"a": "b"}}),
        (deployment(ADMITTED), {"deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ],
    ids=["its spec stays", "it goes"],
)
def test_existing_invalid_object_can_be_labelled_and_removed(before: Body, changes: Body) -> None:
    body = deployment(REFUSED[NAMES[0]][0])
    body["metadata"] |= changes
    assert asked(body, before) == {"uid": "u1", "allowed": True}


def test_change_to_an_invalid_spec_is_refused() -> None:
    assert not asked(deployment(REFUSED[NAMES[0]][0]), deployment(ADMITTED))["allowed"]


@pytest.mark.parametrize("spec", [None, [], "x", {"target": []}, {"target": {"model": 7}}, {"target": {}}])
def test_malformed_spec_is_refused_with_its_field(spec: Any) -> None:
    response = asked(deployment(spec))
    assert not response["allowed"]
    assert "spec" in response["status"]["message"]


def test_long_warning_is_shortened_to_the_api_server_limit() -> None:
    target = {"model": "meta-llama/Llama-3.1-405B-Instruct"}
    spec = {"target": target, "models": HUB_TOKEN, "parallelism": {"tensor": 4}}
    (warning,) = asked(deployment({**spec, "accelerator": {"products": [H100]}}))["warnings"]
    assert (len(warning), warning[-1]) == (249, "…"), "at most 250, between two words"


def test_control_characters_are_escaped_and_warnings_limited() -> None:
    spec = deepcopy(TOO_LARGE)
    spec["engine"] = {"version": "0.99", "image": "example.org/vllm-openai:v0.30\n\x1b[31m" + "x" * 300}
    response = asked(deployment(spec))
    assert all(each.isprintable() and len(each) <= 250 for each in response["warnings"])
    flag = pair_70b(engine={"extraArgs": ["--port\nWarning: fine", "1"]})
    refused = asked(deployment(flag))
    texts = [*refused.get("warnings", []), refused.get("status", {}).get("message", "")]
    assert all(each.isprintable() for each in texts)


def test_message_of_many_refusals_is_limited() -> None:
    volumes = [{"name": f"v{number}", "hostPath": {"path": "/x"}} for number in range(2000)]
    message = asked(deployment(pair_70b(podTemplate={"spec": {"volumes": volumes}})))["status"]["message"]
    assert "; and 1,968 more [" in message
    assert len(message) < 10_000


REFUSAL = deployment(next(iter(REFUSED.values()))[0])


class Webhook:
    """A webhook on loopback, and what its client trusts."""

    def __init__(self, folder: Path, reply: Callable[[Any], Any] | None = None) -> None:
        self.folder = folder
        self.certificate = CertificateFolder(folder)
        self.registry = CollectorRegistry()
        collector = AdmissionCollector(lambda: self.certificate.expires)
        self.registry.register(collector)
        answers = {VALIDATE: reply or (lambda document: answer(document, Terms()))}
        self.port = serve_admission(0, self.certificate, answers, collector)

    def post(self, body: bytes | str, path: str = VALIDATE, trust: bytes | None = None) -> tuple[int, Any]:
        trusted = ssl.create_default_context(cadata=(trust or (self.folder / "tls.crt").read_bytes()).decode())
        client = http.client.HTTPSConnection("127.0.0.1", self.port, context=trusted, timeout=60)
        try:
            client.request("POST", path, body)
            response = client.getresponse()
            return response.status, json.loads(response.read())
        finally:
            client.close()

    def counted(self, outcome: str) -> float | None:
        name = "specdecode_admission_duration_seconds_count"
        return self.registry.get_sample_value(name, {"outcome": outcome})

    @property
    def expiry_s(self) -> float | None:
        return self.registry.get_sample_value("specdecode_admission_certificate_expiry_timestamp_seconds")


@pytest.fixture
def webhook(tmp_path: Path) -> Webhook:
    write_certificate(tmp_path / "certificate")
    return Webhook(tmp_path / "certificate")


def test_reviews_are_answered_and_counted(webhook: Webhook) -> None:
    for body, allowed in ((deployment(ADMITTED), True), (REFUSAL, False), (deployment(TOO_LARGE), True)):
        status, answered = webhook.post(json.dumps(review(body)))
        assert (status, answered["response"]["allowed"]) == (200, allowed)
    assert [webhook.counted(each) for each in ("allowed", "refused", "warned", "failed")] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"request": 1}', b'{"a": 1, "a": 2}', b"[" * 100_000],
    ids=["nothing", "half", "no text", "a list", "no request", "a key twice", "too deep"],
)
def test_malformed_review_is_refused_and_the_webhook_continues(webhook: Webhook, body: bytes) -> None:
    status, answered = webhook.post(body)
    assert (status, set(answered)) == (400, {"error"})
    assert webhook.counted("failed") == 1
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200


def test_internal_error_is_answered_with_http_500_without_details(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_document: Any) -> Any:
        raise RuntimeError("a slip")

    write_certificate(tmp_path)
    status, answered = Webhook(tmp_path, fails).post(b"{}")
    assert status == 500
    assert "a slip" not in answered["error"]
    assert "please report it" in caplog.text


def test_certificate_may_appear_later_and_be_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    webhook = Webhook(tmp_path / "later")
    assert webhook.expiry_s == 0
    assert "no object can be reviewed" in caplog.text
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", webhook.port), timeout=60) as plain:  # noqa: PT011
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
    write_certificate(tmp_path / "later")
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200
    ends = (datetime.now(UTC) + 5 * DAY).replace(microsecond=0)
    write_certificate(tmp_path / "later", ends)
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200
    assert webhook.expiry_s == ends.timestamp()


def test_unusable_certificate_keeps_the_previous_one(webhook: Webhook) -> None:
    before = (webhook.folder / "tls.crt").read_bytes()
    (webhook.folder / "tls.crt").write_text("no certificate")
    assert webhook.post(json.dumps(review(deployment(ADMITTED))), trust=before)[0] == 200
    (webhook.folder / "tls.key").unlink()
    assert webhook.post(json.dumps(review(deployment(ADMITTED))), trust=before)[0] == 200


def test_expired_certificate_is_logged_and_refused_by_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = datetime.now(UTC) - DAY
    write_certificate(tmp_path, ended)
    webhook = Webhook(tmp_path)
    assert " expired on " in caplog.text
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        webhook.post(b"{}")
    write_certificate(tmp_path)
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200


def announces(webhook: Webhook, length_bytes: int) -> ssl.SSLSocket:
    """A client that will send a review of that length, and has sent the first byte."""
    trusted = ssl.create_default_context(cadata=(webhook.folder / "tls.crt").read_text())
    plain = socket.create_connection(("127.0.0.1", webhook.port), timeout=60)
    client = trusted.wrap_socket(plain, server_hostname="localhost")
    client.sendall(f"POST {VALIDATE} HTTP/1.0\r\nContent-Length: {length_bytes}\r\n\r\n ".encode())
    return client


def is_hung_up_on(client: ssl.SSLSocket) -> bool:
    try:
        return client.recv(1) == b""
    except (ConnectionResetError, ssl.SSLEOFError):  # what it has sent was not read yet
        return True


def test_slow_large_requests_are_dropped_for_new_ones(webhook: Webhook) -> None:
    slow = [announces(webhook, 2**20) for _ in range(4)]
    large = json.dumps(review(deployment(ADMITTED))).ljust(2**20)
    assert webhook.post(large)[0] == 200
    assert is_hung_up_on(slow[0])
    for each in slow:
        each.close()


KEY = SigningKey.read(key_pair()[0])
OTHER = SigningKey.read(key_pair()[0])
GATE = Gate((KEY.public,))
SIDECAR = {"name": "istio-proxy", "image": "docker.io/istio/proxyv2:1"}


def config_map(body: Body | None = None, key: SigningKey = KEY, seen: Seen | None = None) -> Body:
    return copy.deepcopy(attest(body or parent(pair_70b()), key, seen).children[0])


def owned_by(config_map: Body, **changes: str) -> Body:
    """A ConfigMap whose owner the API server does not look for, so that it stays when that one is gone."""
    metadata = config_map["metadata"]
    owners = [{**each, **changes} for each in metadata["ownerReferences"]]
    return {**config_map, "metadata": {**metadata, "ownerReferences": owners}}


def judged(
    pod: Body, kept: Body | Exception | None, before: Body | None = None, gate: Gate = GATE, namespace: str = "default"
) -> str:
    """Return why a pod may not start; an empty text where it may."""

    def read(key: Key) -> Body | None:
        assert key == Key(namespace, "llama")
        if isinstance(kept, Exception):
            raise kept
        return kept

    request = {"uid": "u1", "namespace": namespace, "object": pod, "oldObject": before}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    response = answer_pod(review, gate, read)["response"]
    assert response["allowed"] == ("status" not in response)
    return str(response["status"]["message"]) if "status" in response else ""


def a_pod(**labels: str | None) -> Body:
    pod = serving()[2]
    del pod["status"]
    for name, value in labels.items():
        pod["metadata"]["labels"][f"specdecode.io/{name}"] = value
    return pod


CHANGES: dict[str, Callable[[Body], object]] = {
    "container engine: image: evil:1": lambda pod: engine(pod).update(image="evil:1"),
    "container engine: args": lambda pod: engine(pod).update(args=["--trust-remote-code"]),
    "container engine: command": lambda pod: engine(pod).update(command=["sh"]),
    "container engine: env (SHA-256)": lambda pod: engine(pod)["env"].append({"name": "LD_PRELOAD", "value": "/x"}),
    "container engine: commands of hooks and probes (SHA-256)": lambda pod: engine(pod).update(
        lifecycle={"postStart": {"exec": {"command": ["sh"]}}}
    ),
    "container engine: volumes and workingDir (SHA-256)": lambda pod: engine(pod).update(workingDir="/x"),
    "container engine: terminationMessagePath": lambda pod: engine(pod).update(terminationMessagePath="/x.py"),
    "container engine: stdin, stdinOnce, tty": lambda pod: engine(pod).update(stdin=True),
    "container engine: restartPolicy": lambda pod: engine(pod).update(restartPolicy="Always"),
    "enableServiceLinks": lambda pod: pod["spec"].update(enableServiceLinks=True),
    "container sniffer": lambda pod: pod["spec"]["containers"].append({"name": "sniffer", "image": "evil:1"}),
    "container debugger": lambda pod: pod["spec"].update(ephemeralContainers=[{"name": "debugger", "image": "sh"}]),
}


def engine(pod: Body) -> Body:
    found: Body = pod["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("says", CHANGES)
def test_altered_pod_is_refused_without_showing_attested_values(says: str) -> None:
    pod, before = a_pod(), a_pod()
    CHANGES[says](pod)
    for operation in (None, before):
        refusal = judged(pod, config_map(), operation)
        assert refusal == f"engine of default/llama: is not as attested in ConfigMap llama-attestation: {says}"


def test_sidecar_is_allowed_by_name_and_image() -> None:
    pod = a_pod()
    pod["spec"]["containers"].append({**SIDECAR})
    named = Gate((KEY.public,), frozenset({("istio-proxy", SIDECAR["image"])}))
    assert judged(pod, config_map(), gate=named) == ""
    assert "istio-proxy" in judged(pod, config_map())
    pod["spec"]["containers"][-1]["image"] = "evil:1"
    assert "istio-proxy" in judged(pod, config_map(), gate=named)


def test_pod_without_engine_label_is_refused_with_the_cause() -> None:
    stranger = a_pod()
    del stranger["metadata"]["labels"]["specdecode.io/deployment"]
    assert "the pod has no label specdecode.io/deployment" in judged(stranger, None)
    for label, words in (
        ("capture", "captures are not attested; label the namespace specdecode.io/attested-pods=engines"),
        ("training", "trainings are not attested; label the namespace specdecode.io/attested-pods=engines"),
        ("reads-model-for", "Jobs that read or download models are not attested; give each model with its config"),
    ):
        stranger["metadata"]["labels"][f"specdecode.io/{label}"] = "llama"
        assert words in judged(stranger, None)
        del stranger["metadata"]["labels"][f"specdecode.io/{label}"]


BORN = "of a pod cannot change after its creation"


@pytest.mark.parametrize("labels", [{}, {"computes-for": "llama"}, {"deployment": "other"}], ids=str)
def test_pod_cannot_become_or_stop_being_an_engine(labels: dict[str, str]) -> None:
    other = a_pod()
    del other["metadata"]["labels"]["specdecode.io/deployment"]
    other["metadata"]["labels"] |= {f"specdecode.io/{name}": value for name, value in labels.items()}
    for image in (engine(other)["image"], "evil:1"):
        engine(other)["image"] = image
        assert BORN in judged(a_pod(), config_map(), before=other)
        assert BORN in judged(other, config_map(), before=a_pod())


def test_unattested_pod_cannot_be_changed_into_an_attested_one() -> None:
    before = a_pod()
    engine(before)["image"] = "evil:1"
    refusal = judged(a_pod(), config_map(), before)
    assert "before the change, the pod is not as attested" in refusal
    assert "container engine: image: evil:1: delete the pod" in refusal


def test_pod_may_change_to_another_attested_rollout() -> None:
    first = config_map()
    changed = parent(pair_70b(engine={"image": "vllm/other:1"}), generation=2)
    second = config_map(changed, seen=Seen(first["data"], [], []))
    pod = a_pod()
    for each in (*pod["spec"]["initContainers"], engine(pod)):
        each["image"] = "vllm/other:1"
    assert judged(pod, second, before=a_pod()) == ""
    assert "before the change, the pod is not as attested" in judged(pod, config_map(changed), before=a_pod())


def test_only_attestations_of_this_key_and_object_are_valid() -> None:
    elsewhere, earlier = parent(pair_70b()), parent(pair_70b())
    elsewhere["metadata"]["namespace"] = "theirs"
    earlier["metadata"]["uid"] = "uid-0"
    kept = config_map()
    for attested, says in (
        (None, "ConfigMap llama-attestation does not exist"),
        (config_map(key=OTHER), "has no valid attestation: one was signed with another key"),
        ({**kept, "data": config_map(elsewhere)["data"]}, "one is of theirs/llama"),
        ({**kept, "data": config_map(earlier)["data"]}, "one is of an earlier object of this name"),
        (owned_by(kept, kind="Gone"), "one is of an earlier object of this name"),
        ({**kept, "data": {}}, "has no valid attestation"),
        ({**kept, "data": {f"{n}.intoto.json": "{}" for n in range(5)}}, "has 5 attestations"),
        ({**kept, "data": {"a.intoto.json": " " * MOST_BYTES + "{}"}}, "not a DSSE envelope"),
        ({**kept, "data": {"a.intoto.json": json.dumps({"payload": "\x1b[2J" * 900})}}, "not a DSSE envelope"),
        (ForbiddenError("no"), "let the webhook get ConfigMaps in namespace default"),
        (ClusterError("it does not answer"), "cannot be read: it does not answer"),
    ):
        refusal = judged(a_pod(), attested)
        assert says in refusal
        assert len(refusal) < 600
        assert refusal.isprintable()


@pytest.mark.parametrize("name", ["a/../../secrets", "..", "A", "", "x" * 300, 1, ["a"]], ids=str)
def test_invalid_deployment_label_is_refused_without_reading(name: Any) -> None:
    refusal = judged(a_pod(deployment=name), AssertionError("it was read"))
    assert "not a valid name of a SpecDecodeDeployment" in refusal
    assert len(refusal) < 400


@pytest.mark.parametrize("body", [None, {}, [], {"apiVersion": "v1", "kind": "Secret"}], ids=str)
def test_reviews_of_other_kinds_are_not_pod_reviews(body: Any) -> None:
    review = {"apiVersion": "admission.k8s.io/v1", "request": {"uid": "u1", "namespace": "default", "object": body}}
    with pytest.raises(NoReviewError):
        answer_pod(review, GATE, lambda _: None)


ODD: tuple[Any, ...] = ([[]], {"a": 1}, [{"name": []}], {"name": {}}, [{"valueFrom": [1]}], "x", 1.5, float("inf"))
ATTESTED = ("name", "image", "command", "args", "env", "volumeMounts", "workingDir")


def test_malformed_pod_fields_are_answered_and_refused_if_attested() -> None:
    kept, attested = config_map(), a_pod()
    del attested["apiVersion"], attested["kind"], attested["metadata"]["labels"]
    labels = a_pod()["metadata"]["labels"]
    for path in places(attested):
        for odd in ODD:
            pod = copy.deepcopy(attested)
            target: Any = pod
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = odd
            pod |= {"apiVersion": "v1", "kind": "Pod"}
            if isinstance(pod["metadata"], dict):
                pod["metadata"]["labels"] = labels
            before = {"metadata": {"labels": labels, "annotations": odd}, "spec": odd}
            refusal = judged(pod, kept, before)
            if path[:2] == ("spec", "containers") and len(path) > 3 and path[3] in ATTESTED:
                assert refusal, (path, odd)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where something stands in a value, by each step."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in steps:
        yield (*path, step)
        yield from places(each, (*path, step))
