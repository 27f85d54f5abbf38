"""An engine that replays a recording in place of running a model."""

from enum import StrEnum

from pydantic import Field, StrictInt

from specdecode_operator.api.base import ApiModel, ConfigMapRef, FilePath, PersistentVolumeClaimRef

_SHORT_S = 600
_LONG_S = 604_800


class ReplayMode(StrEnum):
    """What is made of a recording."""

    STEPS = "Steps"
    MODELLED = "Modelled"
    EMULATED = "Emulated"


class Matching(StrEnum):
    """How a request finds the record that it is answered with."""

    ARRIVAL = "Arrival"
    REQUEST_ID = "RequestId"
    PREFIX = "Prefix"


class Unmatched(StrEnum):
    """What a request gets for which no record is left."""

    REPEAT = "Repeat"
    REFUSE = "Refuse"
    MODELLED = "Modelled"


class RecordingSource(ApiModel):
    """Where a recording lies."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds it, for small ones: at most 1 MiB."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds it, such as that of a capture; mounted read-only."""

    path: FilePath
    """Folder of a capture, or a trace, inside the ConfigMap or the volume; step statistics are read from beside it. For
    mode Modelled also a model that `specdecode replay fit` made, for Emulated nothing else."""


class AcceptanceFrom(ApiModel):
    """An acceptance, and from when it holds."""

    from_seconds: StrictInt = Field(default=0, ge=0, le=_LONG_S)
    """Seconds since the engine's start."""

    percent: StrictInt = Field(ge=0, le=100)
    """Accepted share of the drafted tokens in percent."""


class ReplayFailures(ApiModel):
    """What goes wrong on purpose, to see what is done about it."""

    start_seconds: StrictInt = Field(default=0, ge=0, le=_SHORT_S)
    """How long a start takes before the engine listens, as loading a model would."""

    error_percent: StrictInt = Field(default=0, ge=0, le=100)
    """Share of requests that are answered with 500, in percent."""

    hang_after_seconds: StrictInt | None = Field(default=None, ge=0, le=_LONG_S)
    """Seconds from the start until no token comes any more, though /health answers. Absent: never."""

    crash_after_seconds: StrictInt | None = Field(default=None, ge=0, le=_LONG_S)
    """Seconds from each start until the process dies. Absent: never."""


class Replay(ApiModel):
    """A recording that is replayed in place of running a model: no GPU, no weights, and text that means nothing."""

    trace: RecordingSource
    """The recording."""

    mode: ReplayMode = ReplayMode.STEPS
    """Steps: each request gets the tokens of a recorded one, in its bursts and at its gaps, whatever the load.
    Modelled: tokens are drawn from all records, as the load is, with queues, preemption and the plan's KV cache.
    Emulated: vLLM itself serves, on CPU and without weights, and only its steps are drawn; engine.image names its
    image."""

    match: Matching = Matching.ARRIVAL
    """How a request finds its record: in the order of arrival; by the number at the end of its id; or by the longest
    common prefix, of records with block hashes."""

    unmatched: Unmatched = Unmatched.REPEAT
    """What comes when no record is left: the first again, an answer of 409, or tokens as in mode Modelled."""

    acceptance: list[AcceptanceFrom] = Field(
        default=[],
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["fromSeconds"]},
    )
    """Acceptance over time in place of the recorded one; the first holds from second 0."""

    time_scale_percent: StrictInt = Field(default=100, ge=1, le=10_000)
    """Factor of every time in percent: 50 is twice as fast."""

    load_factor: StrictInt = Field(default=1, ge=1, le=10_000)
    """Requests that each one stands for in the metrics of load: running, waiting, KV cache in use."""

    seed: StrictInt = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of everything that is drawn."""

    failures: ReplayFailures = ReplayFailures()
    """What goes wrong on purpose."""
