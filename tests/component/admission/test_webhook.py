"""The chart's webhook behind a real API server, with a certificate that the chart's Job makes under its own rights."""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from devcluster.cluster.cluster import Cluster
from tests.support.admission_cases import (
    ADMITTED,
    REFUSED,
    REFUSED_CAPTURE,
    TOO_LARGE,
    capture,
    deployment,
)
from tests.support.certificates import DAY, write_certificate
from tests.support.installed_webhook import JOB, NAME, NAMESPACE, InstalledWebhook
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

UNANSWERED = (
    'apiserver_admission_webhook_rejection_count{error_type="calling_webhook_error"',
    ',name="validate.specdecode.io"',
)
BAD = deployment(next(iter(REFUSED.values()))[0], "bad")


@pytest.fixture(scope="module")
def installed(crds: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledWebhook]:
    """The webhook, called by the API server with a certificate that it trusts."""
    installed = InstalledWebhook(crds.kubeconfig, tmp_path_factory.mktemp("webhook"), "judged")
    installed.install()
    eventually(lambda: "HostPathNotAllowed" in installed.dry_run(BAD)[1], "the webhook is asked")
    yield installed
    installed.remove()


def test_specs_that_the_reconcile_refuses_are_rejected(installed: InstalledWebhook) -> None:
    for number, (spec, reason) in enumerate(REFUSED.values()):
        taken, said = installed.dry_run(deployment(spec, f"bad-{number}"))
        assert not taken
        assert f"[{reason}]" in said
    taken, said = installed.dry_run(capture(REFUSED_CAPTURE))
    assert not taken
    assert "spec.deadlineSeconds: 30: is less than the 600 s that the phases of spec.workload take" in said
    assert installed.dry_run(deployment(ADMITTED)) == (True, "")


def test_spec_that_does_not_fit_is_a_kubectl_warning(installed: InstalledWebhook) -> None:
    taken, said = installed.dry_run(deployment(TOO_LARGE))
    assert taken
    assert said.startswith("Warning: 1 x ")
    assert "does not fit" in said


def test_invalid_stored_objects_can_be_labelled_and_deleted_only(installed: InstalledWebhook) -> None:
    users = installed.users
    installed.webhook(failurePolicy="Ignore", rules=[])
    eventually(lambda: installed.dry_run(BAD)[0], "the webhook is asked for nothing")
    users.must("apply", "--filename=-", stdin=json.dumps(BAD))
    (configuration,) = (each for each in installed.objects if each["kind"] == "ValidatingWebhookConfiguration")
    installed.webhook(failurePolicy="Fail", rules=configuration["webhooks"][0]["rules"])
    other = {**BAD, "metadata": {"name": "other"}}
    eventually(lambda: not installed.dry_run(other)[0], "the webhook is asked again")
    users.must("label", "sdd", "bad", "team=serving")
    worse = json.dumps({"spec": {"replicas": 2}})
    assert "HostPathNotAllowed" in users("patch", "sdd", "bad", "--type=merge", f"--patch={worse}").stderr
    users.must("delete", "sdd", "bad", "--wait=false")


def test_certificate_is_kept_renewed_and_owned_by_the_webhook(installed: InstalledWebhook) -> None:
    before = (installed.mounted / "tls.crt").read_bytes()
    assert "kept" in installed.renew()
    assert (installed.mounted / "tls.crt").read_bytes() == before
    (installed.mounted / "tls.key").unlink()
    assert "written" in installed.renew()
    after = (installed.mounted / "tls.crt").read_bytes()
    (webhook,) = installed.admin.object("validatingwebhookconfiguration", NAME)["webhooks"]
    assert b64decode(webhook["clientConfig"]["caBundle"]) == after + before
    eventually(lambda: "HostPathNotAllowed" in installed.dry_run(BAD)[1], "the new one is trusted")
    secret = installed.admin.object("secret", JOB)
    assert [each["kind"] for each in secret["metadata"]["ownerReferences"]] == ["ValidatingWebhookConfiguration"]


def test_certificate_job_cannot_read_secrets_or_write_other_objects(installed: InstalledWebhook) -> None:
    account = f"system:serviceaccount:{NAMESPACE}:{JOB}"
    assert not installed.may("get", f"secrets/{JOB}", account)
    assert not installed.may("list", "secrets", account)
    assert not installed.may("patch", "secrets/another", account)
    assert not installed.may("create", "secrets/another", account)
    assert not installed.may("patch", "validatingwebhookconfigurations/another", account)
    assert not installed.may("get", f"secrets/{JOB}", f"system:serviceaccount:{NAMESPACE}:{NAME}")


def test_failure_policy_applies_with_an_expired_certificate(installed: InstalledWebhook, crds: Cluster) -> None:
    host = f"{NAME}-webhook.{NAMESPACE}.svc"
    ended = write_certificate(installed.mounted, datetime.now(UTC) - DAY, host)
    installed.webhook(clientConfig={"caBundle": b64encode(ended).decode()})
    eventually(lambda: "has expired" in installed.dry_run(deployment(ADMITTED))[1], "nobody trusts it")
    installed.webhook(failurePolicy="Ignore")
    eventually(lambda: installed.dry_run(BAD)[0], "objects pass unjudged")
    said = Kubectl(crds.kubeconfig).must("get", "--raw=/metrics")
    for series in (*UNANSWERED, 'apiserver_admission_webhook_fail_open_count{name="validate.specdecode.io"'):
        assert series in said, "by which the alert SpecDecodeReviewsFail tells of it"
    assert "written" in installed.renew()
    eventually(lambda: "HostPathNotAllowed" in installed.dry_run(BAD)[1], "they are judged again")
    installed.webhook(failurePolicy="Fail")
