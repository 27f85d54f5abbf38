"""The status of a SpecDecodeTraining: phase, rows, head, and the verdict on it."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from specdecode_operator.api.base import BOUNDED, ApiModel, Timestamp
from specdecode_operator.api.capture_status import TokensPerStep
from specdecode_operator.api.deployment_status import Conditions, Sentence, Word


class TrainingPhase(StrEnum):
    """Current step of a training."""

    PENDING = "Pending"
    EXPORTING = "Exporting"
    GENERATING_HIDDEN_STATES = "GeneratingHiddenStates"
    TRAINING = "Training"
    VALIDATING = "Validating"
    JUDGING = "Judging"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"


class RowCounts(ApiModel):
    """Counts of exported rows."""

    training: int
    """Number of rows to train on."""

    holdout: int
    """Number of held-out prompts."""

    duplicates: int
    """Number of requests that were omitted because another request has the same prompt and answer."""

    tokens: int
    """Total number of tokens in the rows to train on."""

    left_out: list[Sentence] | None = Field(default=None, max_length=8)
    """Counts of other omitted requests, each with the reason."""


class TrainedHead(ApiModel):
    """Published head."""

    path: Annotated[str, StringConstraints(max_length=1024)]
    """Folder of the head in the claim: NAMESPACE/NAME/head."""

    sha256: Word
    """SHA-256 checksum of model.safetensors."""

    bytes: int
    """Size of model.safetensors in bytes."""

    config: Annotated[dict[str, Any], Field(max_length=512), BOUNDED]
    """Contents of the head's config.json."""

    validation_loss: Word | None = None
    """Loss of the best checkpoint on the validation rows, as a decimal."""

    accuracy_percent: list[int] | None = Field(default=None, max_length=32)
    """Share of validation tokens that the head predicts correctly, in percent, by draft position."""


class JudgedArm(ApiModel):
    """Engine of the measurement."""

    name: Word
    """Name of the engine: none, ngram, current or trained."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent. Not set without drafts."""

    goodput: Word | None = None
    """Tokens per second in requests that meet the SLO, as a decimal."""


class TrainingVerdict(ApiModel):
    """Comparison of the new head with the deployment's current draft on the held-out prompts."""

    capture: Annotated[str, StringConstraints(max_length=253)]
    """Name of the SpecDecodeCapture that measured the head."""

    target: Word | None = None
    """Internal: digest of the measured target, revision and precision. The head is offered only for these."""

    arms: list[JudgedArm] = Field(default=[], max_length=8)
    """Measured engines."""

    ratio: Word | None = None
    """Goodput with the new head relative to the current draft, as a decimal."""

    low: Word | None = None
    """Lower end of the 95 % confidence interval of the ratio."""

    high: Word | None = None
    """Upper end of the 95 % confidence interval of the ratio."""

    tokens_per_step: TokensPerStep | None = None
    """Tokens per step of the new head and of the current draft. They decide if goodput is inconclusive and a step with
    the better one costs no more. Not set if the deployment does not speculate."""


class SpecDecodeTrainingStatus(ApiModel):
    """Observed state of the training."""

    observed_generation: int | None = None
    """Generation of the object that the status describes."""

    phase: TrainingPhase | None = None
    """Current step, for people. Programs should read the conditions."""

    conditions: Conditions = Field(default=[])
    """Conditions Accepted, WaitingForGPUs, Succeeded (the head is published), Better, Promoted, Ready, Reconciling and
    Stalled."""

    claim: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Claim that holds rows, checkpoints and the head."""

    job: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Name of the Job."""

    rows: RowCounts | None = None
    """Counts of exported rows."""

    head: TrainedHead | None = None
    """Published head."""

    verdict: TrainingVerdict | None = None
    """Comparison of the new head with the current draft on the held-out prompts."""

    started_at: Timestamp | None = None
    """Start time of the first container."""

    finished_at: Timestamp | None = None
    """Time at which the training, with its measurement, ended."""
