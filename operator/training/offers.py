"""Find the heads that trainings offer to their deployment.

The status of a training is untrusted. A head must be on the training's claim, in the folder that the operator chose.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import ConditionStatus, TrainedDraftStatus
from specdecode_operator.api.speculation import Speculation, Target
from specdecode_operator.api.training import Promote, SpecDecodeTrainingSpec, TrainingMethod
from specdecode_operator.api.training_status import TrainedHead
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.enums import DraftUpdate, Method
from specdecode_operator.problems import shown
from specdecode_operator.training.observation import Training, read_training
from specdecode_operator.untrusted import mapping

HEAD_INVALID: Final = "HeadInvalid"
OTHER_TARGET: Final = "OtherTarget"
_METHODS: Final[Mapping[TrainingMethod, Method]] = {
    TrainingMethod.EAGLE3: Method.EAGLE3,
    TrainingMethod.PEAGLE: Method.EAGLE3,
    TrainingMethod.DFLASH: Method.DFLASH,
}
"""Method with which vLLM serves each kind of head."""

_DEFAULT_K: Final = 3
_MOST_K: Final = 32
_MOST_RANGES: Final = 16  # of K by batch size in an arm of a capture
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_OF_ANY_METHOD: Final = ("rejectionSampling", "lossy")


def head_folder(training: Key) -> str:
    """Return the folder of a training's head in its claim."""
    return f"{training.namespace}/{training.name}/head"


def target_digest(target: Target) -> str:
    """Return a digest of the target with its revision and precision, on which a head depends."""
    fields = target.model_dump(mode="json", include={"model", "revision", "quantization", "rope_scaling"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def head_speculation(
    written: Speculation | None, training: Training, spec: SpecDecodeTrainingSpec, head: TrainedHead
) -> Body:
    """Return the speculation that serves a head, for the arm that measures it and for its promotion.

    Keep the other settings of the written speculation if its method is the method of the head.
    """
    method = _METHODS[spec.method]
    asked = written.num_speculative_tokens if written else None
    k = spec.judgement.num_speculative_tokens or min(asked or _DEFAULT_K, _MOST_K)
    kept: Body = {}
    if written is not None:
        left_out = {"draft", "trained_drafts", "draft_update"}
        kept = written.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=left_out)
        if written.method is not method:
            kept = {name: kept[name] for name in _OF_ANY_METHOD if name in kept}
        elif k != asked or len(written.num_speculative_tokens_by_batch_size) > _MOST_RANGES:
            kept.pop("numSpeculativeTokensByBatchSize", None)
    draft = {
        "model": head_folder(training.key),
        "persistentVolumeClaim": {"claimName": claim_of(training, spec.storage)},
        "config": head.config,
    }
    return {**kept, "method": method.value, "numSpeculativeTokens": k, "draft": draft}


@dataclass(frozen=True)
class OfferedHead:
    """A head that a training offers to its deployment."""

    training: str
    claim: str
    path: str
    sha256: str
    speculation: Body

    def __str__(self) -> str:
        return f"Head {self.sha256[:12]} of training {self.training}"

    def is_named_by(self, status: TrainedDraftStatus) -> bool:
        """Whether a deployment's status names this head as the one in force."""
        return (status.training, status.sha256) == (self.training, self.sha256)

    def applied_to(self, body: Body) -> Body:
        """Return a deployment with this head instead of its draft."""
        written, speculation = body["spec"], self.speculation
        if is_in_place(body):
            speculation = {**speculation, "draftUpdate": DraftUpdate.IN_PLACE.value}
        changed = {**written, "speculation": speculation}
        if mapping(written, "speculation").get("method") != self.speculation["method"]:
            parallelism = mapping(written, "parallelism")
            changed["parallelism"] = {name: value for name, value in parallelism.items() if name != "draftTensor"}
        return {**body, "spec": changed}

    def engine_of(self, body: Body) -> str:
        """Return a hash of this head and of a deployment's engines with it; empty if its spec is invalid."""
        try:
            spec = SpecDecodeDeploymentSpec.parse(self.applied_to(body)["spec"], newer=True)
        except ValidationError:
            return ""
        return hashlib.sha256(f"{engine_spec_hash(spec)} {self.sha256}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class NotOffered:
    """Why a training offers no head to its deployment."""

    reason: str
    message: str
    status: ConditionStatus = FALSE


def offer_of(training: Training, written: SpecDecodeDeploymentSpec) -> OfferedHead | NotOffered:
    """Return the head that a training offers to its deployment, or the reason why there is no offer."""
    try:
        spec = SpecDecodeTrainingSpec.parse(training.spec, newer=True)
    except ValidationError:
        return NotOffered("NotAccepted", "This operator cannot read the training's spec")
    better = training.condition("Better")
    if spec.promote is Promote.MANUAL:
        fix = f"set it to OnBetter, or run specdecode training promote {training.key.name}"
        return NotOffered("Manual", f"spec.promote is Manual: {fix}")
    if better is None or better.status is not TRUE:
        status = UNKNOWN if better is None else better.status
        return NotOffered("NotBetter", "The head is offered if the condition Better is True", status)
    return _checked_offer(training, spec, written)


def _checked_offer(
    training: Training, spec: SpecDecodeTrainingSpec, written: SpecDecodeDeploymentSpec
) -> OfferedHead | NotOffered:
    head, verdict, claim = training.status.head, training.status.verdict, claim_of(training, spec.storage)
    if head is None or verdict is None:
        return NotOffered(HEAD_INVALID, "The status has no head, or no verdict")
    if problem := head_problem(training, spec, head):
        return NotOffered(HEAD_INVALID, problem)
    if verdict.target != target_digest(written.target):
        message = "The head was measured with another target, revision or precision: train one for the current target"
        return NotOffered(OTHER_TARGET, message)
    speculation = head_speculation(written.speculation, training, spec, head)
    return OfferedHead(training.key.name, claim, head.path, head.sha256, speculation)


def head_problem(training: Training, spec: SpecDecodeTrainingSpec, head: TrainedHead) -> str | None:
    """Return the first problem of the head in an untrusted status, which could make engines mount another volume."""
    kind = head.config.get("speculators_model_type")
    claim, folder = claim_of(training, spec.storage), head_folder(training.key)
    checks = (
        ("claim", training.status.claim, training.status.claim == claim, f"is not the training's claim, {claim}"),
        ("head.path", head.path, head.path == folder, f"is not the training's folder, {folder}"),
        ("head.sha256", head.sha256, _SHA256.fullmatch(head.sha256), "is not a SHA-256 checksum"),
        ("head.config.speculators_model_type", kind, kind == spec.method.value, f"is not the method, {spec.method}"),
        (
            "head.config.auto_map",
            "set",
            "auto_map" not in head.config,
            "names Python files, and code of heads is never executed",
        ),
    )
    wrong = ((name, value, why) for name, value, holds, why in checks if not holds)
    return next((f"status.{name}: {shown(value)}: {why}" for name, value, why in wrong), None)


@dataclass(frozen=True)
class Offers:
    """Heads that trainings offer to one deployment."""

    body: Body
    heads: Sequence[OfferedHead] = ()
    """Heads, the newest first."""

    present: OfferedHead | None = None
    """Head in force according to the status of the deployment."""

    start: OfferedHead | None = None
    """Head that engines load when they start, if they then get the head in force without a restart."""

    invalid: Mapping[str, NotOffered] = field(default_factory=dict)
    """Reason why a training with a better head does not offer it, by name of the training."""

    @property
    def loaded(self) -> OfferedHead | None:
        """Head of the pod template."""
        return self.start or self.present


def is_in_place(body: Body) -> bool:
    """Return whether a deployment asks for heads without a restart."""
    return mapping(mapping(body, "spec"), "speculation").get("draftUpdate") == DraftUpdate.IN_PLACE.value


def offers_of(body: Body, trainings: Sequence[Body]) -> Offers | None:
    """Return the heads that trainings offer to a deployment; None without trainedDrafts."""
    if mapping(mapping(body, "spec"), "speculation").get("trainedDrafts") is not True:
        return None
    try:
        written = SpecDecodeDeploymentSpec.parse(body["spec"], newer=True)
    except ValidationError:
        return Offers(body)
    key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
    heads, invalid = list[OfferedHead](), dict[str, NotOffered]()
    for each in sorted(trainings, key=_age, reverse=True):
        training = read_training(each)
        if training.deployment_key != key or "deletionTimestamp" in each["metadata"]:
            continue
        offer = offer_of(training, written)
        if isinstance(offer, OfferedHead):
            heads.append(offer)
        elif offer.reason in {HEAD_INVALID, OTHER_TARGET}:
            invalid[training.key.name] = offer
    told = mapping(mapping(body, "status"), "trainedDraft")

    def named(training: str, sha256: str) -> OfferedHead | None:
        names = told.get(training), told.get(sha256)
        return next((each for each in heads if (each.training, each.sha256) == names), None)

    start = named("startTraining", "startSha256") if is_in_place(body) else None
    return Offers(body, heads, named("training", "sha256"), start, invalid)


def _age(training: Body) -> tuple[str, str]:
    metadata = training["metadata"]
    return str(metadata.get("creationTimestamp", "")), metadata["name"]
