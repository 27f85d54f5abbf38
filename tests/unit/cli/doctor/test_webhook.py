"""What doctor says of the admission webhook."""

from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.cli.doctor import Grade, Unreadable, webhook_findings
from tests.support.certificates import DAY, made_certificate

NOW = datetime.now(UTC).replace(microsecond=0)


def bundle(*days: int) -> str:
    """A bundle of certificates that end in so many days."""
    return b64encode(b"".join(made_certificate(NOW + each * DAY)[0] for each in days)).decode()


def configuration(trusted: Any, policy: str | None = "Ignore") -> dict[str, Any]:
    webhook = {"name": "validate.specdecode.io", "failurePolicy": policy, "clientConfig": {"caBundle": trusted}}
    return {"metadata": {"name": "ours"}, "webhooks": [webhook]}


@pytest.mark.parametrize(
    ("trusted", "policy", "grade", "words"),
    [
        (bundle(80), "Fail", Grade.OK, "is trusted until"),
        (bundle(80, -1), "Fail", Grade.OK, "is trusted until"),
        (bundle(5), "Fail", Grade.WARN, "expires on"),
        (bundle(-1), "Ignore", Grade.WARN, "has expired on"),
        (bundle(-1), "Fail", Grade.FAIL, "objects cannot be stored"),
        (bundle(-1), None, Grade.FAIL, "objects cannot be stored"),
        (None, "Ignore", Grade.WARN, "trusts no certificate of webhook ours: objects pass unjudged"),
        ("no base64", "Fail", Grade.FAIL, "trusts no certificate"),
        (b64encode(b"no PEM").decode(), "Fail", Grade.FAIL, "trusts no certificate"),
        (7, "Fail", Grade.FAIL, "trusts no certificate"),
    ],
)
def test_what_the_api_server_trusts_is_judged(trusted: Any, policy: str | None, grade: Grade, words: str) -> None:
    (finding,) = webhook_findings([configuration(trusted, policy)], NOW)
    assert (finding.grade, finding.subject) == (grade, "admission")
    assert words in finding.what
    assert bool(finding.fix) == (grade is not Grade.OK)


def test_nothing_is_said_where_none_is_installed() -> None:
    assert webhook_findings([], NOW) == []


def test_what_may_not_be_read_is_said() -> None:
    (finding,) = webhook_findings(Unreadable("you may not list them"), NOW)
    assert finding.grade is Grade.WARN
