"""The SpecDecodeCapture kind: traces and step statistics of a deployment's engine on a volume.

One object is one run. Everything that feeds its Job is immutable: another run
is another object.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel, ObjectName
from specdecode_operator.api.capture_workload import CaptureWorkload
from specdecode_operator.api.patterns import SIZE

KIND = "SpecDecodeCapture"
PLURAL = "specdecodecaptures"

Quantity = Annotated[str, StringConstraints(max_length=16, pattern=SIZE)]
DEFAULT_SIZE = "20Gi"


class DuringCapture(StrEnum):
    """What becomes of the deployment's engines while the capture has one of its own."""

    KEEP = "Keep"
    SUSPEND = "Suspend"


class Record(ApiModel):
    """What is recorded beside times and counts. Prompts never are."""

    token_ids: StrictBool = False
    """Record the tokens of the answers."""

    step_stats: StrictBool = True
    """Record the scheduler's statistics of each step."""


class Storage(ApiModel):
    """The volume that the files are written to."""

    size: Quantity | None = None
    """Size of the claim that is created. Absent: 20Gi, unless existingClaim is given."""

    storage_class_name: ObjectName | None = None
    """Storage class of the claim that is created. Absent: the cluster's default."""

    existing_claim: ObjectName | None = None
    """A claim of this namespace to write to, instead of one that is created. Captures may share it."""

    retain: StrictBool = True
    """Keep the claim that was created when this object is deleted."""


class CaptureRun(ApiModel):
    """Which load, and where the files go: what a capture and the template of a schedule have in common."""

    deployment_during_capture: DuringCapture = DuringCapture.KEEP
    """Suspend: its engines give their GPUs to the capture and come back after it, however it ends. Keep: the capture
    waits for GPUs that no engine wants."""

    workload: CaptureWorkload = CaptureWorkload()
    """What the load generator sends."""

    seed: StrictInt = Field(default=0, ge=0, le=2_147_483_647)
    """Seed of all that is random: prompts, arrivals, temperatures."""

    record: Record = Record()
    """What is recorded."""

    storage: Storage = Storage()
    """The volume that the files are written to."""

    deadline_seconds: StrictInt = Field(default=3600, ge=30, le=604_800)
    """How long the load may take once the engine serves. On top of it the engine has as long to start as in its
    deployment, and merging and validation have 15 minutes and a tenth of it. Each attempt has all of these."""

    backoff_limit: StrictInt = Field(default=0, ge=0, le=10)
    """How often a run that failed is begun anew."""


class SpecDecodeCaptureSpec(CaptureRun):
    """Whose engine, which load, and where the files go."""

    deployment: ObjectName
    """The SpecDecodeDeployment of this namespace whose engine is captured; it may be suspended."""

    suspend: StrictBool = False
    """No engine and no load; what was recorded so far is kept as partial files. Once it is false again, the capture
    begins anew."""

    ttl_seconds_after_finished: StrictInt | None = Field(default=None, ge=0, le=31_536_000)
    """When a finished capture is deleted; its claim stays unless storage.retain is false. Absent: never."""
