"""The requests that a capture sends: prompts, phases, temperatures."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel, ConfigMapRef, FilePath, PersistentVolumeClaimRef
from specdecode_operator.api.patterns import PHASE_NAME, RATE, TEMPERATURE

TokenCount = Annotated[StrictInt, Field(ge=1, le=16_777_216)]
Seconds = Annotated[StrictInt, Field(ge=1, le=86_400)]
Rate = Annotated[str, StringConstraints(max_length=10, pattern=RATE)]
"""Requests a second as a decimal, from 0.001 up."""

Temperature = Annotated[str, StringConstraints(max_length=4, pattern=TEMPERATURE)]
PhaseName = Annotated[str, StringConstraints(max_length=40, pattern=PHASE_NAME)]
FieldName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Pattern(StrEnum):
    """When the requests of a phase are sent."""

    CLOSED = "Closed"
    CONSTANT = "Constant"
    POISSON = "Poisson"
    BURST = "Burst"
    STAIRCASE = "Staircase"
    MULTITURN = "Multiturn"
    RECORDED = "Recorded"


class DatasetFormat(StrEnum):
    """What a dataset looks like."""

    JSONL = "JSONL"
    GSM8K = "GSM8K"
    SHAREGPT = "ShareGPT"
    SPEED_BENCH = "SPEED-Bench"
    TRACE = "Trace"


class SyntheticPrompts(ApiModel):
    """Prompts made of random tokens, of an exact length."""

    prompt_tokens: TokenCount = 512
    """Tokens of each prompt."""

    output_tokens: TokenCount = 128
    """Tokens that each answer is asked for."""

    shared_prefix_tokens: StrictInt = Field(default=0, ge=0, le=16_777_216)
    """Tokens at the beginning that all prompts have in common."""


class Dataset(ApiModel):
    """Prompts from a file."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds the file."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the file; mounted read-only."""

    path: FilePath
    """The file inside the ConfigMap or the volume; for GSM8K also its Hugging Face folder, for Trace also that of a
    capture."""

    format: DatasetFormat
    """JSONL: one object a line. GSM8K: parquet. ShareGPT: a JSON list of conversations. SPEED-Bench: one of its files
    as its own script prepares them. Trace: the trace of an earlier capture, of which lengths of prompts and answers,
    common prefixes and moments are taken; the tokens are random."""

    prompt_field: FieldName = "prompt"
    """Field of a JSONL line that holds the prompt."""

    output_tokens: TokenCount = 128
    """Tokens that each answer is asked for; of a Trace, answers are as long as they were."""


class Prompts(ApiModel):
    """Where prompts come from: one of its fields."""

    synthetic: SyntheticPrompts | None = None
    """Random tokens."""

    dataset: Dataset | None = None
    """A file of prompts."""


class Phase(ApiModel):
    """A part of the load."""

    name: PhaseName
    """Name of the phase, in the ids of its requests and in the files."""

    pattern: Pattern
    """Closed: so many clients, each waiting for its answer. Constant, Poisson: a rate, even or random. Burst: so many
    at once, again and again. Staircase: a rate that climbs. Multiturn: sessions of several turns, each with all that
    was said before. Recorded: at the moments of a dataset of format Trace, over and over."""

    concurrency: StrictInt | None = Field(default=None, ge=1, le=4096)
    """Closed: clients. Multiturn: sessions at once."""

    requests_per_second: Rate | None = None
    """Constant, Poisson: the rate. Staircase: the rate of its first step. A decimal such as 4 or 0.5."""

    duration_seconds: Seconds | None = None
    """How long new requests are sent; those that run are waited for. Either this or requests."""

    requests: StrictInt | None = Field(default=None, ge=1, le=10_000_000)
    """How many requests are sent. Either this or durationSeconds."""

    burst_size: StrictInt | None = Field(default=None, ge=1, le=4096)
    """Burst: requests at once."""

    burst_interval_seconds: Seconds | None = None
    """Burst: time from one burst to the next."""

    step_seconds: Seconds | None = None
    """Staircase: how long a step lasts."""

    step_requests_per_second: Rate | None = None
    """Staircase: how much the rate grows with each step."""

    turns: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Multiturn: requests of one session."""

    think_seconds: StrictInt | None = Field(default=None, ge=0, le=3600)
    """Multiturn: pause between an answer and the next turn. Absent: none."""

    temperature: Temperature | None = None
    """Sampling temperature of all its requests. Absent: as workload.temperatures mixes them."""

    prompt_tokens: TokenCount | None = None
    """Tokens of each of its synthetic prompts, instead of prompts.synthetic.promptTokens."""

    output_tokens: TokenCount | None = None
    """Tokens that each of its answers is asked for, instead of outputTokens of the prompts."""

    path: FilePath | None = None
    """File that its prompts are from, instead of prompts.dataset.path; in the same ConfigMap or volume."""

    category: FieldName | None = None
    """Category of SPEED-Bench that its prompts are of, coding for example. Absent: all."""

    @property
    def asks(self) -> str | None:
        """What its requests ask otherwise than the workload says, in words; None where that is nothing."""
        said = {
            "temperature": self.temperature,
            "prompt tokens": self.prompt_tokens,
            "output tokens": self.output_tokens,
            "file": self.path,
            "category": self.category,
        }
        return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None) or None


class TemperatureShare(ApiModel):
    """A sampling temperature, and how many requests ask for it."""

    temperature: Temperature
    """The temperature as a decimal: 0.7. 0.0 is greedy."""

    share_percent: StrictInt = Field(ge=1, le=100)
    """Share of the requests in percent; all shares add up to 100."""


def _default_phases() -> list[Phase]:
    return [
        Phase(name="single", pattern=Pattern.CLOSED, concurrency=1, duration_seconds=60),
        Phase(name="closed-16", pattern=Pattern.CLOSED, concurrency=16, duration_seconds=120),
    ]


def _default_temperatures() -> list[TemperatureShare]:
    return [TemperatureShare(temperature="0.0", share_percent=100)]


class CaptureWorkload(ApiModel):
    """What the load generator sends to the engine."""

    prompts: Prompts = Prompts(synthetic=SyntheticPrompts())
    """Where prompts come from. Absent: synthetic, 512 tokens each, with answers of 128."""

    phases: list[Phase] = Field(default_factory=_default_phases, min_length=1, max_length=32)
    """What is sent when, one phase after the other. Absent: one client for 60 s, then 16 for 120 s."""

    temperatures: list[TemperatureShare] = Field(default_factory=_default_temperatures, min_length=1, max_length=16)
    """Sampling temperatures, mixed at random. Absent: 0.0 for all."""

    warmup_requests: StrictInt = Field(default=4, ge=0, le=10_000)
    """Requests before the first phase, which count for nothing."""

    timeout_seconds: StrictInt = Field(default=600, ge=1, le=86_400)
    """How long a request may take."""
