"""The SpecDecodeTraining kind: train a draft head on captured answers, judge it, and offer it to its deployment.

One object describes one run, as for a capture. The trainer is the speculators package in an image of the
user's choice.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import (
    LEARNING_RATE,
    ApiModel,
    ConfigMapRef,
    FilePath,
    ObjectName,
    PersistentVolumeClaimRef,
)
from specdecode_operator.api.capture import DuringCapture, Quantity, Slo, Storage
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


class TrainingRun(ApiModel):
    """Trainer, measurement and storage, which trainings and the templates of schedules share."""

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


class SpecDecodeTrainingSpec(TrainingRun):
    """Specification of one training run."""

    deployment: ObjectName
    """Name of the SpecDecodeDeployment, in this namespace. The head is trained for its target."""

    captures: list[ObjectName] = Field(default=[], max_length=16)
    """Names of the captures to train on. Each must be a successful capture of the deployment with its current target,
    revision and precision, and with record.tokenIds. Live captures also need record.promptTokenIds. Set either this or
    dataset."""

    dataset: TrainingRows | None = None
    """File of rows to train on. Set either this or captures."""

    suspend: StrictBool = False
    """Stop the training and free its GPUs. Rows and checkpoints are kept. If set to false again, the training continues
    from the newest checkpoint, and a measurement starts again."""
