"""The chart's webhook behind a real API server, with a certificate that the chart's Job makes under its own rights."""

import json
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.chart import template
from devcluster.cluster.cluster import Cluster
from specdecode_operator.admission.certificate import CertificateFolder
from specdecode_operator.admission.judgement import Terms
from specdecode_operator.admission.metrics import AdmissionCollector
from specdecode_operator.admission.review import answer
from specdecode_operator.admission.server import VALIDATE, serve_admission
from tests.support.admission_cases import (
    ADMITTED,
    REFUSED,
    REFUSED_CAPTURE,
    TOO_LARGE,
    capture,
    deployment,
)
from tests.support.certificates import DAY, write_certificate
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

NAMESPACE = "specdecode-system"
JUDGED = "judged"
NAME = "specdecode-operator"
JOB = f"{NAME}-webhook-certificate"
BAD = deployment(next(iter(REFUSED.values()))[0], "bad")


class Installed:
    """The chart's webhook, with a server on this machine in the place of the operator's pod."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.admin, self.users = Kubectl(kubeconfig, NAMESPACE), Kubectl(kubeconfig, JUDGED)
        self.folder, self.mounted = folder, folder / "mounted"
        self.objects = [*yaml.safe_load_all(template("--set=webhook.enabled=true"))]
        certificate = CertificateFolder(self.mounted)
        collector = AdmissionCollector(lambda: certificate.expires)
        answers = {VALIDATE: lambda review: answer(review, Terms())}
        self.port = serve_admission(0, certificate, answers, collector)

    def install(self) -> None:
        """Apply what the chart makes for the webhook, so that it is called on this machine and for one namespace."""
        wanted = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
        mine = [each for each in self.objects if each["kind"] in wanted and each["metadata"]["name"] == JOB]
        (configuration,) = (each for each in self.objects if each["kind"] == "ValidatingWebhookConfiguration")
        (webhook,) = configuration["webhooks"]
        webhook["clientConfig"]["service"]["port"] = self.port
        webhook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": JUDGED}}
        (service,) = (each for each in self.objects if each["metadata"]["name"] == f"{NAME}-webhook")
        ports = [{"name": "webhook", "port": self.port}]
        service["spec"] = {"type": "ExternalName", "externalName": "localhost", "ports": ports}
        for name in (NAMESPACE, JUDGED):
            self.admin("create", "namespace", name)
        self.admin.must("apply", "--filename=-", stdin=yaml.safe_dump_all([*mine, configuration, service]))

    def renew(self) -> str:
        """Run what the chart's Job runs, with its rights and no others; have its Secret mounted."""
        account = f"system:serviceaccount:{NAMESPACE}:{JOB}"
        named = f"secrets/{JOB}"
        eventually(lambda: all(self.may(verb, named, account) for verb in ("create", "patch")), "it has its rights")
        token = self.admin.must("create", "token", JOB, f"--namespace={NAMESPACE}").strip()
        config = yaml.safe_load(self.admin.kubeconfig.read_text())
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(config))
        (job,) = (each for each in self.objects if each["kind"] == "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        (mount,) = container["volumeMounts"]
        args = [each.replace(mount["mountPath"], str(self.mounted)) for each in container["args"]]
        done = subprocess.run(
            [sys.executable, "-m", "specdecode_operator", *args],
            env={**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.mounted.mkdir(exist_ok=True)
        for name, content in self.admin.object("secret", JOB)["data"].items():
            (self.mounted / name).write_bytes(b64decode(content))
        return done.stdout

    def may(self, verb: str, resource: str, account: str) -> bool:
        return self.admin("auth", "can-i", verb, resource, f"--as={account}").stdout.strip() == "yes"

    def webhook(self, **changes: Any) -> None:
        """Change the webhook, as an administrator does."""
        patch = {"webhooks": [{"name": "validate.specdecode.io", **changes}]}
        named = ("validatingwebhookconfiguration", NAME)
        self.admin.must("patch", *named, "--type=strategic", f"--patch={json.dumps(patch)}")

    def dry_run(self, body: dict[str, Any]) -> tuple[bool, str]:
        """Ask the API server whether it would take an object."""
        done = self.users("apply", "--dry-run=server", "--filename=-", stdin=json.dumps(body))
        return done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(crds: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The webhook, called by the API server with a certificate that it trusts."""
    installed = Installed(crds.kubeconfig, tmp_path_factory.mktemp("webhook"))
    installed.install()
    assert "written" in installed.renew()
    installed.webhook(failurePolicy="Fail")
    # The API server takes a moment to know of a webhook and of whom it trusts.
    eventually(lambda: "HostPathNotAllowed" in installed.dry_run(BAD)[1], "the webhook is asked")
    yield installed
    installed.admin.must("delete", "validatingwebhookconfiguration", NAME)


def test_what_the_reconcile_would_refuse_is_never_stored(installed: Installed) -> None:
    for number, (spec, reason) in enumerate(REFUSED.values()):
        taken, said = installed.dry_run(deployment(spec, f"bad-{number}"))
        assert not taken
        assert f"[{reason}]" in said
    taken, said = installed.dry_run(capture(REFUSED_CAPTURE))
    assert not taken
    assert "spec.deadlineSeconds: 30: the phases of spec.workload take 600 s" in said
    assert installed.dry_run(deployment(ADMITTED)) == (True, "")


def test_what_fits_nowhere_is_a_warning_of_kubectl(installed: Installed) -> None:
    taken, said = installed.dry_run(deployment(TOO_LARGE))
    assert taken
    assert said.startswith("Warning: 1 x ")
    assert "does not fit" in said


def test_objects_from_before_can_be_labelled_and_deleted_but_not_made_worse(installed: Installed) -> None:
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


def test_a_certificate_is_kept_renewed_and_goes_with_the_webhook(installed: Installed) -> None:
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


def test_the_job_may_make_its_secret_and_read_none(installed: Installed) -> None:
    account = f"system:serviceaccount:{NAMESPACE}:{JOB}"
    assert not installed.may("get", f"secrets/{JOB}", account)
    assert not installed.may("list", "secrets", account)
    assert not installed.may("patch", "secrets/another", account)
    assert not installed.may("create", "secrets/another", account)
    assert not installed.may("patch", "validatingwebhookconfigurations/another", account)
    assert not installed.may("get", f"secrets/{JOB}", f"system:serviceaccount:{NAMESPACE}:{NAME}")


def test_with_an_expired_certificate_the_failure_policy_decides(installed: Installed) -> None:
    host = f"{NAME}-webhook.{NAMESPACE}.svc"
    ended = write_certificate(installed.mounted, datetime.now(UTC) - DAY, host)
    installed.webhook(clientConfig={"caBundle": b64encode(ended).decode()})
    eventually(lambda: "has expired" in installed.dry_run(deployment(ADMITTED))[1], "nobody trusts it")
    installed.webhook(failurePolicy="Ignore")
    eventually(lambda: installed.dry_run(BAD)[0], "objects pass unjudged")
    assert "written" in installed.renew()
    eventually(lambda: "HostPathNotAllowed" in installed.dry_run(BAD)[1], "they are judged again")
    installed.webhook(failurePolicy="Fail")
