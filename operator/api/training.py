"""The SpecDecodeTraining kind: train a draft head on captured answers, judge it, and offer it to its deployment.

One object describes one run, as for a capture. The trainer is the speculators package in an image of the
user's choice.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import (
    BOUNDED,
    LEARNING_RATE,
    ApiModel,
    ConfigMapRef,
    FilePath,
    ObjectName,
    PersistentVolumeClaimRef,
    Timestamp,
)
from specdecode_operator.api.capture import DuringCapture, Quantity, Slo, Storage
from specdecode_operator.api.capture_status import TokensPerStep
from specdecode_operator.api.deployment_status import Conditions, Sentence, Word
from specdecode_operator.api.speculation import ModelId, ShortText

KIND = "SpecDecodeTraining"
PLURAL = "specdecodetrainings"

DEFAULT_SIZE = "200Gi"

Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
LearningRate = Annotated[str, StringConstraints(max_length=12, pattern=LEARNING_RATE)]


class TrainingMethod(StrEnum):
    """Kind of head to train, by the name that speculators uses."""

    EAGLE3 = "eagle3"
    PEAGLE = "peagle"
    DFLASH = "dflash"


class Promote(StrEnum):
    """Whether the deployment serves a better head without a change of its spec."""

    MANUAL = "Manual"
    ON_BETTER = "OnBetter"


class TrainingRows(ApiModel):
    """File of rows to train on."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds the file."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the file; mounted read-only."""

    path: FilePath
    """Path of the JSONL file in the ConfigMap or volume: one object per line, with input_ids and loss_mask. To write
    it, run specdecode capture export --format speculators without --holdout-percent."""


class TrainingStorage(Storage):
    """Volume for rows, hidden states, checkpoints and the head."""

    size: Quantity | None = None
    """Size of the claim to create. Defaults to 200Gi, unless persistentVolumeClaim is set."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Existing claim to write to, instead of creating one. Several trainings can share it; they run one after
    another."""


class StartingHead(ApiModel):
    """Existing head in the format of speculators, to continue from."""

    model: ModelId
    """Hugging Face Hub ID, or a path inside persistentVolumeClaim or inside models.volume of the deployment."""

    revision: ShortText | None = None
    """Branch, tag or commit of the Hub repository."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim with the head, such as the claim of an earlier training."""


class Trainer(ApiModel):
    """Image and settings of the trainer."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Image with speculators, and with vLLM in the version of the deployment. See docs/serve/train-a-draft.md."""

    args: list[Argument] = Field(default=[], max_length=64)
    """Additional arguments for speculators train. Arguments that the operator sets are rejected."""

    epochs: StrictInt = Field(default=3, ge=1, le=1000)
    """Number of passes over the rows."""

    learning_rate: LearningRate | None = None
    """Maximum learning rate, as a quoted decimal such as '1e-4'. Defaults to the default of speculators."""

    sequence_length: StrictInt = Field(default=2048, ge=64, le=1_048_576)
    """Maximum length of a row in tokens. Rows longer than this, or than serving.maxModelLen of the deployment, are
    truncated."""

    gpus: StrictInt | None = Field(default=None, ge=0, le=8)
    """Number of GPUs of the trainer, on one node. Defaults to the number of GPUs of one replica, which is the minimum.
    0 trains on CPUs. It is for tests, and the deployment must run on CPUs."""


class Judgement(ApiModel):
    """Measurement of the new head on held-out prompts, at temperature 0."""

    enabled: StrictBool = True
    """Measure the new head. If false, the condition Better stays Unknown."""

    num_speculative_tokens: StrictInt | None = Field(default=None, ge=1, le=32)
    """Number of tokens that the new head proposes per step (K). Defaults to K of the deployment, or to 3 if it has
    none."""

    requests: StrictInt = Field(default=200, ge=10, le=100_000)
    """Number of held-out prompts to send to each engine. Fewer are sent if fewer were held out."""

    concurrency: StrictInt = Field(default=4, ge=1, le=1024)
    """Number of requests in flight. Set it to the usual number of requests in flight per replica."""

    output_tokens: StrictInt = Field(default=128, ge=1, le=1_048_576)
    """Maximum length of an answer in tokens."""

    repetitions: StrictInt = Field(default=2, ge=2, le=20)
    """Number of times to start and measure each engine."""

    slo: Slo | None = None
    """Limits that a request must meet to count towards goodput."""

    deployment_during_capture: DuringCapture = DuringCapture.KEEP
    """Suspend: the deployment's engines stop, and the measurement uses their GPUs. Keep: the engines keep serving, and
    the measurement waits for free GPUs."""


class SpecDecodeTrainingSpec(ApiModel):
    """Specification of one training run."""

    deployment: ObjectName
    """Name of the SpecDecodeDeployment, in this namespace. The head is trained for its target."""

    captures: list[ObjectName] = Field(default=[], max_length=16)
    """Names of the captures to train on. Each must be a successful capture of the deployment with its current target,
    revision and precision, and with record.tokenIds. Live captures also need record.promptTokenIds. Set either this or
    dataset."""

    dataset: TrainingRows | None = None
    """File of rows to train on. Set either this or captures."""

    method: TrainingMethod = TrainingMethod.EAGLE3
    """Kind of head to train: eagle3, peagle or dflash."""

    from_: StartingHead | None = Field(default=None, alias="from")
    """Existing head to continue from. If not set, a new head is trained from random weights."""

    trainer: Trainer
    """Image and settings of the trainer."""

    holdout_percent: StrictInt = Field(default=10, ge=1, le=50)
    """Share of the prompts, in percent, to hold out from the training. The new head is measured on them."""

    min_rows: StrictInt = Field(default=200, ge=1, le=10_000_000)
    """Minimum number of rows to train on. With fewer, the training fails."""

    max_tokens: StrictInt = Field(default=10_000_000, ge=1000, le=10_000_000_000)
    """Maximum number of tokens to train on. If the rows have more, the seed chooses a random sample. Hidden states take
    about 32 kB per token at a hidden size of 4096."""

    judgement: Judgement = Judgement()
    """Measurement of the new head on held-out prompts, at temperature 0."""

    promote: Promote = Promote.MANUAL
    """Manual: the deployment keeps the draft of its spec. OnBetter: the deployment serves the new head if the condition
    Better is True and speculation.trainedDrafts of the deployment is true."""

    seed: StrictInt = Field(default=0, ge=0, le=2_147_483_647)
    """Seed for the choice of held-out prompts, the training and the load of the measurement."""

    storage: TrainingStorage = TrainingStorage()
    """Volume for rows, hidden states, checkpoints and the head: a claim to create (200Gi by default), or an existing
    one."""

    deadline_seconds: StrictInt = Field(default=86_400, ge=60, le=1_209_600)
    """Time limit for each attempt in seconds, until the head is published. The measurement is not
    included."""

    backoff_limit: StrictInt = Field(default=1, ge=0, le=10)
    """Number of retries after a failed attempt. A retry continues from the newest checkpoint."""

    suspend: StrictBool = False
    """Stop the training and free its GPUs. Rows and checkpoints are kept. If set to false again, the training continues
    from the newest checkpoint, and a measurement starts again."""


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
