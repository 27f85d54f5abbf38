"""Parse the settings of the container `collect`, which records a live capture.

The operator writes them as one JSON document into the environment variable ``run_settings.SETTINGS_VARIABLE``. The
``record`` object is ``spec.record`` in camelCase, as the manifest repeats it. All other keys are in snake_case.
"""

from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from specdecode_operator.capture.load.run_settings import SETTINGS_VARIABLE, InvalidSettingsError
from specdecode_operator.problems import Problem
from specdecode_operator.redaction import clip

MOST_PODS: Final = 64  # that one collector records
PORT: Final = 8470  # of the collector
JOINING: Final = "joining"
"""Phase in the progress lines until the recorders are ordered to record."""

_POD_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class RecordSettings(_Settings):
    """``spec.record``: the optional parts of the recording."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")

    token_ids: bool = False
    prompt_token_ids: bool = False
    step_stats: bool = True


class LiveSettings(_Settings):
    """Who may connect, and how long to record. At least one of duration and requests is set."""

    port: Annotated[int, Field(ge=1, le=65535)] = PORT
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{32,128}$", repr=False)]
    pods: Annotated[list[Annotated[str, Field(pattern=_POD_NAME)]], Field(min_length=1, max_length=MOST_PODS)]
    join_seconds: Annotated[float, Field(gt=0, le=3600)] = 150.0
    duration_seconds: Annotated[float, Field(gt=0)] | None = None
    requests: Annotated[int, Field(ge=1)] | None = None  # recorded requests after which the window ends
    sample_percent: Annotated[int, Field(ge=1, le=100)] = 100
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0  # for the requests that run when the window ends

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.duration_seconds is None and self.requests is None:
            raise ValueError("duration_seconds or requests is required")
        if len(set(self.pods)) != len(self.pods):
            raise ValueError("pods has a duplicate name")
        return self


class CollectSettings(_Settings):
    """Settings of the container `collect`."""

    namespace: str
    capture: str
    capture_uid: str
    root: str = "/capture"
    live: LiveSettings
    record: RecordSettings = RecordSettings()
    slo: dict[str, int] = {}  # ``ttftMs``, ``tpotMs``, ``latencyMs``
    context: dict[str, Any] = {}  # copied to the manifest, as for a load
    # Longest window. A window of `requests` ends here with fewer of them, and the manifest records this.
    deadline_seconds: Annotated[float, Field(gt=0)] | None = None


def read_collect_settings(text: str | bytes) -> CollectSettings:
    """Parse the operator's JSON document.

    Raises
    ------
    InvalidSettingsError
        With the first field that is missing or invalid.
    """
    try:
        return CollectSettings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, (SETTINGS_VARIABLE, *first["loc"])))
        value = "hidden" if "token" in first["loc"] or first["loc"] == ("live",) else clip(str(first["input"]), 200)
        raise InvalidSettingsError(Problem(field, value, f"{first['msg']}; the operator writes it")) from error
