"""Parse the run settings that a capture's Job passes, including TLS settings for the engine.

The operator writes them as one JSON document into the environment variable `SETTINGS_VARIABLE`. Its ``workload`` is
the capture's ``spec.workload`` in camelCase, as defined by the API (``api/capture.py``) and validated by the CRD's
rules. All other keys are in snake_case.
"""

import ssl
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from specdecode_operator.api.capture import CaptureWorkload
from specdecode_operator.problems import Problem
from specdecode_operator.redaction import clip

SETTINGS_VARIABLE: Final = "SPECDECODE_CAPTURE"
"""The environment variable that holds the settings."""

ATTEMPT_VARIABLE, NODE_VARIABLE = "SPECDECODE_ATTEMPT", "SPECDECODE_NODE"
"""Those that hold the pod's UID and the name of its node."""

WARMUP_PHASE: Final = "warmup"
"""What the requests before the first phase are counted under; no phase may be called so."""

_SHOWN_CHARACTERS: Final = 200

_Value = TypeVar("_Value")


class InvalidSettingsError(ValueError):
    """A setting that no run can be made from."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class EngineAddress(_Settings):
    """The engine that is sent to: it is in the same pod."""

    url: Annotated[str, Field(pattern=r"^https?://[^/:\s]+:[0-9]+/?$")]
    certificates: str | None = None  # the folder of those that it serves with, where it serves TLS
    model: str  # the name that it is served under
    max_model_len: Annotated[int, Field(ge=1)]
    vocab_size: Annotated[int, Field(ge=64)]
    api_key_variable: str | None = None  # the environment variable that holds its key, where it wants one


class ArmSettings(_Settings):
    """One arm of a capture with several: an engine that is started for it, and stopped before the next one."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    engine: EngineAddress
    command: Annotated[list[str], Field(min_length=1, max_length=1024)]  # as it is run, without Kubernetes' $(NAME)
    env: dict[str, str] = {}  # beside what the container has; the recorder's folder is added for each run
    start_seconds: Annotated[float, Field(gt=0)] = 3600.0  # how long the engine may take to be ready
    context: dict[str, Any] = {}  # what the manifest repeats
    lossy: str | None = None  # why it may answer otherwise by its settings


class CheckSettings(_Settings):
    """How many requests are sent to see whether arms answer alike: ``spec.checks``, in camelCase as ``workload`` is."""

    model_config = ConfigDict(alias_generator=to_camel)

    greedy_prompts: Annotated[int, Field(ge=0, le=64)] = 0
    structured_requests: Annotated[int, Field(ge=0, le=64)] = 0


class RunSettings(_Settings):
    """The settings of the load generator. What only the manifest repeats is read in ``job/finish.py``."""

    namespace: str
    capture: str
    engine: EngineAddress
    workload: CaptureWorkload
    seed: int
    root: str = "/capture"
    deadline_seconds: float | None = None  # of the load of each run
    # Without arms the engine is started by its container; with arms by the switcher in it, one run after the other.
    arms: Annotated[list[ArmSettings], Field(max_length=8)] = []
    repetitions: Annotated[int, Field(ge=1, le=20)] = 1
    slo: dict[str, int] = {}  # ``ttftMs``, ``tpotMs``, ``latencyMs``
    checks: CheckSettings = CheckSettings()


def read_settings(text: str | bytes) -> RunSettings:
    """Return the settings of a run from the operator's JSON document.

    Raises
    ------
    InvalidSettingsError
        It is no JSON, or a setting is missing, of the wrong type or out of bounds.
    """
    try:
        return RunSettings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, (SETTINGS_VARIABLE, *first["loc"])))
        value = clip(str(first["input"]), _SHOWN_CHARACTERS)
        raise InvalidSettingsError(Problem(field, value, f"{first['msg']}; the operator writes it")) from error


def needed(value: _Value | None) -> _Value:
    """Return a field that the CRD's rules demand of a phase with its pattern."""
    assert value is not None  # noqa: S101 - so the operator has checked
    return value


def exact(value: str | int | None) -> Fraction:
    """Return a number that a phase must have, a decimal such as 0.1 without the error of binary fractions."""
    assert value is not None  # noqa: S101 - as above
    return Fraction(value)


CERTIFICATE: Final = "tls.crt"
AUTHORITY: Final = "ca.crt"
"""Keys of the Secret that hold no secret. Who maintains it, such as cert-manager, adds the authority's."""

_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL (x509_vfy.h), which Python has no name for."""


def tls_of(engine: EngineAddress) -> ssl.SSLContext | None:
    """Return what believes the certificates that the engine was given, and no others; None for plain HTTP.

    It is asked at its own pod's address, which no certificate names. One that has expired meets the engine's clients,
    and says nothing of what is measured; one that is renewed in the meantime is believed if its authority is known.

    Raises
    ------
    InvalidSettingsError
        There are no certificates.
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
