"""What a capture's load is: the settings of its run, read and checked.

The operator writes them as one JSON document into the environment variable
`SETTINGS_VARIABLE` of the capture's Job. ``workload`` in it is the capture's
``spec.workload`` as the user wrote it, in camelCase; the rest is in snake_case.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.problems import Problem

SETTINGS_VARIABLE = "SPECDECODE_CAPTURE"
"""The environment variable that holds the settings."""

WARMUP_PHASE = "warmup"
"""What the requests before the first phase are counted under; no phase may be called so."""

_AtLeastOne = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[int, Meta(ge=0)]
_Percent = Annotated[int, Meta(ge=1, le=100)]
_PhaseName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]

_Settings = TypeVar("_Settings")


class InvalidSettingsError(ValueError):
    """A setting that no run can be made from."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _check_positive(settings: Struct, *names: str) -> None:
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if field.name in names and value is not None and not (value.is_finite() and value > 0):
            raise ValueError(f"{field.encode_name} is {value}: it must be a number above 0")


class DatasetFormat(StrEnum):
    """How the file with the prompts is made."""

    JSONL = "JSONL"
    GSM8K = "GSM8K"
    SHARE_GPT = "ShareGPT"


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A part of the workload, written by a user."""


class SyntheticPrompts(_Document, frozen=True, kw_only=True):
    """Prompts of random token ids, so of exact length.

    Attributes
    ----------
    prompt_tokens
        Length of a prompt; of the first turn's, where there are turns.
    output_tokens
        Length of every answer: the model's own end is ignored.
    shared_prefix_tokens
        How many of a prompt's first tokens all prompts have in common.
    """

    prompt_tokens: _AtLeastOne = 512
    output_tokens: _AtLeastOne = 128
    shared_prefix_tokens: _NotNegative = 0

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens > self.prompt_tokens:
            raise ValueError(
                f"sharedPrefixTokens {self.shared_prefix_tokens} is part of the prompt and promptTokens is "
                f"{self.prompt_tokens}: lower the one or raise the other"
            )


class DatasetPrompts(_Document, frozen=True, kw_only=True):
    """Prompts from a file of a ConfigMap or a volume.

    Attributes
    ----------
    path
        Path of the file, or of GSM8K's folder, inside the mounted source.
    prompt_field
        Where a JSONL line has its prompt.
    output_tokens
        Longest answer; the model may end it earlier.
    config_map, persistent_volume_claim
        Where the operator mounts the files from; nothing that the load generator acts on.
    """

    path: Annotated[str, Meta(min_length=1)]
    format: DatasetFormat
    prompt_field: Annotated[str, Meta(min_length=1)] = "prompt"
    output_tokens: _AtLeastOne = 128
    config_map: dict[str, Any] | None = None
    persistent_volume_claim: dict[str, Any] | None = None


class Prompts(_Document, frozen=True, kw_only=True):
    """Where prompts come from: exactly one of the two."""

    synthetic: SyntheticPrompts | None = None
    dataset: DatasetPrompts | None = None

    def __post_init__(self) -> None:
        if (self.synthetic is None) == (self.dataset is None):
            raise ValueError("exactly one of synthetic and dataset must be given")

    @property
    def output_tokens(self) -> int:
        """Longest answer that is asked for."""
        source = self.synthetic or self.dataset
        assert source is not None  # noqa: S101 - __post_init__ saw to it
        return source.output_tokens


class _Phase(_Document, frozen=True, kw_only=True, tag_field="pattern"):
    """What all phases have.

    Attributes
    ----------
    duration_seconds
        Requests begin for so long; those in flight then still end.
    requests
        Or: how many requests begin.
    """

    name: _PhaseName
    duration_seconds: Decimal | None = None
    requests: _AtLeastOne | None = None

    def __post_init__(self) -> None:
        if (self.duration_seconds is None) == (self.requests is None):
            raise ValueError("exactly one of durationSeconds and requests must be given")
        _check_positive(self, "duration_seconds")


class Closed(_Phase, frozen=True, kw_only=True):
    """A fixed number of clients; each sends its next request when its last one ended."""

    concurrency: _AtLeastOne


class Constant(_Phase, frozen=True, kw_only=True):
    """Requests at equal distances, whatever the engine does."""

    requests_per_second: Decimal

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "requests_per_second")


class Poisson(_Phase, frozen=True, kw_only=True):
    """Requests of many independent clients: exponential distances, from the seed."""

    requests_per_second: Decimal

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "requests_per_second")


class Burst(_Phase, frozen=True, kw_only=True):
    """Many requests at once, time and again."""

    burst_size: _AtLeastOne
    burst_interval_seconds: Decimal

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "burst_interval_seconds")


class Staircase(_Phase, frozen=True, kw_only=True):
    """Constant distances at a rate that rises.

    It starts at ``requestsPerSecond`` and rises by ``stepRequestsPerSecond`` every ``stepSeconds``.
    """

    requests_per_second: Decimal
    step_seconds: Decimal
    step_requests_per_second: Decimal

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "requests_per_second", "step_seconds", "step_requests_per_second")


class Multiturn(_Phase, frozen=True, kw_only=True):
    """A fixed number of conversations at a time; each turn's prompt holds all earlier turns and answers."""

    concurrency: _AtLeastOne
    turns: _AtLeastOne
    think_seconds: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.think_seconds.is_finite() and self.think_seconds >= 0):
            raise ValueError(f"thinkSeconds is {self.think_seconds}: it must be a number of seconds, 0 or more")


Phase = Closed | Constant | Poisson | Burst | Staircase | Multiturn
OpenPhase = Constant | Poisson | Burst | Staircase
"""Phases whose requests are sent at planned times, not when earlier ones ended."""


class TemperatureShare(_Document, frozen=True, kw_only=True):
    """How many of a hundred requests are sampled at a temperature."""

    temperature: Decimal
    share_percent: _Percent

    def __post_init__(self) -> None:
        if not (self.temperature.is_finite() and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}: it must be a number, 0 or more")


_DEFAULT_PHASES: tuple[Phase, ...] = (
    Closed(name="single", concurrency=1, duration_seconds=Decimal(60)),
    Closed(name="closed-16", concurrency=16, duration_seconds=Decimal(120)),
)


class Workload(_Document, frozen=True, kw_only=True):
    """The requests of a capture.

    Attributes
    ----------
    warmup_requests
        Sent before the first phase, and in no published file but the client's.
    timeout_seconds
        Longest that a request may take.
    """

    prompts: Prompts = Prompts(synthetic=SyntheticPrompts())
    phases: Annotated[tuple[Phase, ...], Meta(min_length=1, max_length=32)] = _DEFAULT_PHASES
    temperatures: Annotated[tuple[TemperatureShare, ...], Meta(min_length=1, max_length=16)] = (
        TemperatureShare(temperature=Decimal(0), share_percent=100),
    )
    warmup_requests: _NotNegative = 4
    timeout_seconds: Decimal = Decimal(600)

    def __post_init__(self) -> None:
        _check_positive(self, "timeout_seconds")
        names = [phase.name for phase in self.phases]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"phases {', '.join(twice)} have the same name: request ids are made of it, so rename one")
        if WARMUP_PHASE in names:
            raise ValueError(f"a phase has the name {WARMUP_PHASE}, which is that of the requests before: rename it")
        total = sum(share.share_percent for share in self.temperatures)
        if total != 100:  # noqa: PLR2004 - percent
            raise ValueError(f"the sharePercent of temperatures add up to {total}: make them 100")


class EngineAddress(Struct, frozen=True, kw_only=True):
    """The engine that is sent to.

    Attributes
    ----------
    url
        Plain HTTP: the engine is in the same pod.
    model
        The name that it serves the model under.
    api_key_variable
        The environment variable that holds its key, where it wants one.
    """

    url: Annotated[str, Meta(pattern=r"^http://[^/:\s]+:[0-9]+/?$")]
    model: str
    max_model_len: _AtLeastOne
    vocab_size: Annotated[int, Meta(ge=64)]
    api_key_variable: str | None = None


class RecordSettings(_Document, frozen=True, kw_only=True):
    """What the recorder keeps besides lengths and times."""

    token_ids: bool = False
    step_stats: bool = True


class RunSettings(Struct, frozen=True, kw_only=True):
    """All that a capture's Job is told.

    Attributes
    ----------
    capture_uid
        UID of the capture's object: another one of the same name has another.
    context
        Copied to the manifest as it is.
    """

    namespace: str
    capture: str
    capture_uid: str | None = None
    engine: EngineAddress
    workload: Workload
    seed: int
    root: str = "/capture"
    record: RecordSettings = RecordSettings()
    deadline_seconds: float | None = None
    context: dict[str, Any] = {}


def read_settings(text: str | bytes) -> RunSettings:
    """Return the settings of a run from the operator's JSON document.

    Raises
    ------
    InvalidSettingsError
        It is no JSON, or a setting is missing, of the wrong type or out of bounds.
    """
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidSettingsError(
            Problem(SETTINGS_VARIABLE, f"{len(text)} characters", f"not JSON: {error}; the operator writes it")
        ) from error
    return _convert(document, RunSettings, "settings")


def read_workload(document: Mapping[str, Any]) -> Workload:
    """Return the workload of a ``spec.workload``.

    Raises
    ------
    InvalidSettingsError
        A field is missing, unknown, of the wrong type or out of bounds.
    """
    return _convert(document, Workload, "spec.workload")


def _convert(document: Any, kind: type[_Settings], root: str) -> _Settings:
    document = _without_nulls(document)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        # msgspec ends its messages with the place, as in "... - at `$.phases[0].name`".
        message, _, place = str(error).partition(" - at `$")
        steps = re.findall(r"\.?([^.\[\]]+)|\[(\d+)\]", place.rstrip("`"))
        path = [int(number) if number else name for name, number in steps]
        field = root + place.rstrip("`")
        value = msgspec.json.encode(_at(document, path)).decode()
        raise InvalidSettingsError(Problem(field, _shortened(value), message)) from error


def _without_nulls(value: Any) -> Any:
    """Return the value without the fields that are null: for Kubernetes they are not given."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(part) for part in value]
    return value


def _at(document: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        document = document[step]
    return document


def _shortened(text: str) -> str:
    longest = 200
    return text if len(text) <= longest else text[:longest] + "..."
