"""The SpecDecodeTraining kind: train a draft head on captured answers, judge it, and offer it to its deployment.

One object describes one run, as for a capture. The trainer is the speculators package in an image of the user.
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
    """Rows to train on that were exported before, from a file."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds the file."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the file; mounted read-only."""

    path: FilePath
    """Path of the JSONL file in the ConfigMap or volume, as specdecode capture export --format speculators writes
    it: one object per line, with input_ids and loss_mask."""


class TrainingStorage(Storage):
    """Volume for rows, hidden states, checkpoints and the head."""

    size: Quantity | None = None
    """Size of the claim to create. Defaults to 200Gi, unless persistentVolumeClaim is set."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Existing claim to write to, instead of creating one. Trainings can share it one after the other."""


class StartingHead(ApiModel):
    """Existing head to continue from."""

    model: ModelId
    """Hugging Face Hub ID, or the path inside the claim or inside models.volume of the deployment."""

    revision: ShortText | None = None
    """Branch, tag or commit of the Hub repository."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the head, such as the claim of an earlier training."""


class Trainer(ApiModel):
    """Image and settings of the trainer."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Image with vLLM of the deployment's version and with speculators. See docs/serve/train-a-draft.md."""

    args: list[Argument] = Field(default=[], max_length=64)
    """Further arguments of speculators train. Arguments that the operator sets are rejected."""

    epochs: StrictInt = Field(default=3, ge=1, le=1000)
    """Number of passes over the rows."""

    learning_rate: LearningRate | None = None
    """Highest learning rate as a quoted decimal such as '1e-4'. Defaults to the trainer's."""

    sequence_length: StrictInt = Field(default=2048, ge=64, le=1_048_576)
    """Longest row in tokens. Longer rows are cut."""

    gpus: StrictInt | None = Field(default=None, ge=0, le=8)
    """Number of GPUs of the trainer. Defaults to the number that one replica of the deployment takes. 0 trains on a
    CPU, for tests."""


class Judgement(ApiModel):
    """Measurement of the new head on held-out prompts, before anyone uses it."""

    enabled: StrictBool = True
    """Measure the new head. If false, the condition Better stays Unknown."""

    num_speculative_tokens: StrictInt | None = Field(default=None, ge=1, le=32)
    """Number of tokens that the new head proposes per step (K). Defaults to the deployment's, or to 3."""

    requests: StrictInt = Field(default=200, ge=10, le=100_000)
    """Number of held-out prompts to send to each engine. Fewer are sent if fewer were held out."""

    concurrency: StrictInt = Field(default=4, ge=1, le=1024)
    """Number of requests in flight."""

    output_tokens: StrictInt = Field(default=128, ge=1, le=1_048_576)
    """Longest answer in tokens."""

    repetitions: StrictInt = Field(default=2, ge=2, le=20)
    """Number of times to start and measure each engine."""

    slo: Slo | None = None
    """Limits that a request must meet to count towards goodput."""

    deployment_during_capture: DuringCapture = DuringCapture.KEEP
    """Suspend: the deployment's engines give their GPUs to the measurement. Keep: it waits for free GPUs."""


class SpecDecodeTrainingSpec(ApiModel):
    """Deployment, rows, trainer and what happens with the result."""

    deployment: ObjectName
    """Name of the SpecDecodeDeployment in this namespace for whose target the head is trained."""

    captures: list[ObjectName] = Field(default=[], max_length=16)
    """Names of successful captures in this namespace whose answers to train on. They need record.tokenIds, and the
    target, revision and precision of the deployment. Set either this or dataset."""

    dataset: TrainingRows | None = None
    """Rows to train on that were exported before. Set either this or captures."""

    method: TrainingMethod = TrainingMethod.EAGLE3
    """Kind of head to train: eagle3, peagle or dflash."""

    from_: StartingHead | None = Field(default=None, alias="from")
    """Existing head to continue from. If not set, a new head is trained from random weights."""

    trainer: Trainer
    """Image and settings of the trainer."""

    holdout_percent: StrictInt = Field(default=10, ge=1, le=50)
    """Share of the prompts, in percent, that no training sees. The new head is measured with them."""

    min_rows: StrictInt = Field(default=200, ge=1, le=10_000_000)
    """Fewest rows to start a training with."""

    max_tokens: StrictInt = Field(default=10_000_000, ge=1000, le=10_000_000_000)
    """Most tokens of rows to train on. Their hidden states are stored during the training, about 32 kB per token at a
    hidden size of 4096."""

    judgement: Judgement = Judgement()
    """Measurement of the new head on held-out prompts, before anyone uses it."""

    promote: Promote = Promote.MANUAL
    """Manual: the deployment keeps its draft until its spec changes. OnBetter: the deployment serves the new head if it
    is better and its speculation.trainedDrafts is true."""

    seed: StrictInt = Field(default=0, ge=0, le=2_147_483_647)
    """Seed for everything random: split of the rows, training, load of the measurement."""

    storage: TrainingStorage = TrainingStorage()
    """Volume for rows, hidden states, checkpoints and the head: a claim to create (200Gi by default), or an existing
    one."""

    deadline_seconds: StrictInt = Field(default=86_400, ge=60, le=1_209_600)
    """Time limit in seconds for each attempt of the training, from its first container to the published head."""

    backoff_limit: StrictInt = Field(default=1, ge=0, le=10)
    """Number of retries after a failed attempt. A retry continues from the newest checkpoint."""

    suspend: StrictBool = False
    """Stop the training and free its GPUs; checkpoints are kept. When set to false again, it continues."""


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
    """Rows that were exported."""

    training: int
    """Number of rows to train on."""

    holdout: int
    """Number of prompts that no training sees."""

    duplicates: int
    """Number of requests left out because another request has the same prompt and answer."""

    tokens: int
    """Number of tokens of all rows to train on."""

    left_out: list[Sentence] | None = Field(default=None, max_length=8)
    """Requests that were left out, each with the reason."""


class TrainedHead(ApiModel):
    """Published head."""

    path: Annotated[str, StringConstraints(max_length=1024)]
    """Folder of the head in the claim status.claim."""

    sha256: Word
    """SHA-256 checksum of model.safetensors."""

    bytes: int
    """Size of model.safetensors in bytes."""

    config: Annotated[dict[str, Any], Field(max_length=512), BOUNDED]
    """Contents of the head's config.json."""

    validation_loss: Word | None = None
    """Loss on the validation rows of the best checkpoint, as a decimal."""

    accuracy_percent: list[int] | None = Field(default=None, max_length=32)
    """Share of validation tokens that the head predicts as the target does, at each draft position, in percent."""


class JudgedArm(ApiModel):
    """One engine of the measurement."""

    name: Word
    """none, ngram, current or trained."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent. Not set without drafts."""

    goodput: Word | None = None
    """Tokens per second of the requests within the SLO, as a decimal."""


class TrainingVerdict(ApiModel):
    """Comparison of the new head with the deployment's current draft on the held-out prompts."""

    capture: Annotated[str, StringConstraints(max_length=253)]
    """Name of the SpecDecodeCapture that measured it."""

    arms: list[JudgedArm] = Field(default=[], max_length=8)
    """Engines that were measured."""

    ratio: Word | None = None
    """Goodput with the new head relative to the current draft, as a decimal."""

    low: Word | None = None
    """Lower end of the 95 % confidence interval of the ratio."""

    high: Word | None = None
    """Upper end of the 95 % confidence interval of the ratio."""


class SpecDecodeTrainingStatus(ApiModel):
    """Observed state of the training."""

    observed_generation: int | None = None
    """Generation of the object that the status describes."""

    phase: TrainingPhase | None = None
    """Current step, for people. Programs read the conditions."""

    conditions: Conditions = Field(default=[])
    """Conditions Accepted, WaitingForGPUs, Succeeded (the head is published), Better, Promoted, Ready, Reconciling and
    Stalled."""

    claim: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Claim that holds rows, checkpoints and the head."""

    job: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Name of the Job."""

    rows: RowCounts | None = None
    """Rows that were exported."""

    head: TrainedHead | None = None
    """Published head."""

    verdict: TrainingVerdict | None = None
    """Comparison of the new head with the current draft on the held-out prompts."""

    started_at: Timestamp | None = None
    """Start time of the first container."""

    finished_at: Timestamp | None = None
    """Time at which the training, with its measurement, ended."""
