"""Parse the run settings that a capture's Job passes, including TLS settings for the engine.

The operator writes them as one JSON document into the environment variable `SETTINGS_VARIABLE`. Its ``workload`` is
the capture's ``spec.workload`` in camelCase, as defined by the API (``api/capture.py``) and validated by the CRD's
rules. All other keys are in snake_case.
"""

import ssl
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from specdecode_operator.api.capture import CaptureWorkload
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.problems import Problem
from specdecode_operator.redaction import clip

SETTINGS_VARIABLE: Final = "SPECDECODE_CAPTURE"
# Environment variables with the pod's UID and the name of its node.
ATTEMPT_VARIABLE, NODE_VARIABLE = "SPECDECODE_ATTEMPT", "SPECDECODE_NODE"
WARMUP_PHASE: Final = "warmup"  # reserved phase name of the requests before the first phase

_Value = TypeVar("_Value")


def required(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the text of the settings and the attempt's UID from the container's environment."""
    text, attempt = environment.get(SETTINGS_VARIABLE), environment.get(ATTEMPT_VARIABLE)
    if not text or not attempt:
        missing = ATTEMPT_VARIABLE if text else SETTINGS_VARIABLE
        raise CaptureError(
            "InvalidSettings", f"{missing} is not set: this program only runs in the pod of a capture's Job"
        )
    return text, attempt


class InvalidSettingsError(ValueError):
    """A setting is missing or invalid."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class EngineAddress(_Settings):
    """Address of the engine in the same pod."""

    url: Annotated[str, Field(pattern=r"^https?://[^/:\s]+:[0-9]+/?$")]
    certificates: str | None = None  # folder of its certificates, if it serves TLS
    model: str  # served model name
    max_model_len: Annotated[int, Field(ge=1)]
    vocab_size: Annotated[int, Field(ge=64)]
    api_key_variable: str | None = None  # environment variable with its API key, if it requires one


class ArmSettings(_Settings):
    """One of several arms: an engine that is started for it, and stopped before the next one."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    engine: EngineAddress
    command: Annotated[list[str], Field(min_length=1, max_length=1024)]  # with Kubernetes' $$ unescaped
    env: dict[str, str] = {}  # added to the container's; each run adds the recorder's folder
    start_seconds: Annotated[float, Field(gt=0)] = 3600.0  # start-up timeout
    context: dict[str, Any] = {}  # copied to the manifest
    lossy: str | None = None  # why its settings may change the answers


class CheckSettings(_Settings):
    """Numbers of requests that compare the answers of arms: ``spec.checks``, in camelCase."""

    model_config = ConfigDict(alias_generator=to_camel)

    greedy_prompts: Annotated[int, Field(ge=0, le=64)] = 0
    structured_requests: Annotated[int, Field(ge=0, le=64)] = 0


class RunSettings(_Settings):
    """Settings of the load generator. Values that only the manifest needs are read in ``job/finish.py``."""

    namespace: str
    capture: str
    engine: EngineAddress
    workload: CaptureWorkload
    seed: int
    root: str = "/capture"
    deadline_seconds: float | None = None  # of each run's load
    # Without arms, the container's command starts the engine; with arms, the switcher in it does, for each run.
    arms: Annotated[list[ArmSettings], Field(max_length=8)] = []
    repetitions: Annotated[int, Field(ge=1, le=20)] = 1
    slo: dict[str, int] = {}  # ``ttftMs``, ``tpotMs``, ``latencyMs``
    checks: CheckSettings = CheckSettings()


def read_settings(text: str | bytes) -> RunSettings:
    """Parse the operator's JSON document."""
    try:
        return RunSettings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, (SETTINGS_VARIABLE, *first["loc"])))
        value = clip(str(first["input"]), 200)
        raise InvalidSettingsError(Problem(field, value, f"{first['msg']}; the operator writes it")) from error


def needed(value: _Value | None) -> _Value:
    """Return a field that the CRD's rules require of a phase with its pattern."""
    assert value is not None  # noqa: S101 - the operator has validated it
    return value


def exact(value: str | int | None) -> Fraction:
    """Return a required number of a phase exactly: a decimal such as 0.1 has no binary fraction."""
    assert value is not None  # noqa: S101 - as above
    return Fraction(value)


CERTIFICATE: Final = "tls.crt"
# Public keys of the Secret. Its maintainer, such as cert-manager, adds the authority's certificate.
AUTHORITY: Final = "ca.crt"
_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL (x509_vfy.h), which Python does not export


def tls_of(engine: EngineAddress) -> ssl.SSLContext | None:
    """Return a context that trusts only the engine's certificates; None for plain HTTP.

    The hostname is not checked: the engine is addressed by its pod's IP, which no certificate names. Expiry is not
    checked either, because it does not affect the measurement. A renewed certificate is trusted through its authority.
    """
    if engine.certificates is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    folder = Path(engine.certificates)
    try:
        context.load_verify_locations(folder / CERTIFICATE)
        if (folder / AUTHORITY).exists():
            context.load_verify_locations(folder / AUTHORITY)
    except OSError as error:
        wanted = f"has no certificates that can be read ({error}): put PEM into {CERTIFICATE}, and {AUTHORITY} if any"
        raise InvalidSettingsError(Problem("spec.serving.tlsSecret", "its Secret", wanted)) from error
    return context
