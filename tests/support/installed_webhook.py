"""The chart's webhook as the API server calls it, with a certificate that the chart's Job makes with its own rights."""

import json
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import yaml

from devcluster.chart import template
from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.metrics import AdmissionCollector
from specdecode_operator.handlers.webhook import VALIDATE, answer, serve_admission
from specdecode_operator.handlers.webhook_certificate import CertificateFolder
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

NAMESPACE = "specdecode-system"
NAME = "specdecode-operator"
JOB = f"{NAME}-webhook-certificate"


class InstalledWebhook:
    """The chart's webhook, with a server on this machine in the place of the operator's pod."""

    def __init__(self, kubeconfig: Path, folder: Path, judged: str) -> None:
        self.admin, self.users = Kubectl(kubeconfig, NAMESPACE), Kubectl(kubeconfig, judged)
        self.folder, self.mounted = folder, folder / "mounted"
        self.objects = [*yaml.safe_load_all(template("--set=webhook.enabled=true"))]
        certificate = CertificateFolder(self.mounted)
        collector = AdmissionCollector(lambda: certificate.expires)
        answers = {VALIDATE: lambda review: answer(review, Terms())}
        self.port = serve_admission(0, certificate, answers, collector)

    def install(self) -> None:
        """Have the webhook called on this machine, for one namespace, with a certificate that the API server trusts."""
        self._apply()
        assert "written" in self.renew()
        # As long as the API server takes: this process may have little of a busy machine.
        self.webhook(failurePolicy="Fail", timeoutSeconds=30)

    def remove(self) -> None:
        """Have nobody ask it any more."""
        self.admin.must("delete", "validatingwebhookconfiguration", NAME)

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

    def _apply(self) -> None:
        wanted = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
        mine = [each for each in self.objects if each["kind"] in wanted and each["metadata"]["name"] == JOB]
        (configuration,) = (each for each in self.objects if each["kind"] == "ValidatingWebhookConfiguration")
        (webhook,) = configuration["webhooks"]
        webhook["clientConfig"]["service"]["port"] = self.port
        webhook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": self.users.namespace}}
        (service,) = (each for each in self.objects if each["metadata"]["name"] == f"{NAME}-webhook")
        ports = [{"name": "webhook", "port": self.port}]
        service["spec"] = {"type": "ExternalName", "externalName": "localhost", "ports": ports}
        for name in (NAMESPACE, self.users.namespace):
            self.admin("create", "namespace", name)
        self.admin.must("apply", "--filename=-", stdin=yaml.safe_dump_all([*mine, configuration, service]))
