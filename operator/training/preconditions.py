"""Check whether deployment, rows, claim and trainer allow a training."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DatasetFormat, Source
from specdecode_operator.api.training import DEFAULT_SIZE, SpecDecodeTrainingSpec, TrainingRun
from specdecode_operator.capture.observation import Capture, CapturedDeployment, ObservedDeployment, read_capture
from specdecode_operator.capture.preconditions import captured_deployment
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster.quantities import quantity
from specdecode_operator.deployment.conditions import TRUE, Blocked
from specdecode_operator.deployment.models.model_locations import downloads_to_cache
from specdecode_operator.deployment.resource_claim import claims_devices
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.geometry import ModelGeometry, SelfAttention
from specdecode_operator.sizing.placement import CPU_PRODUCT
from specdecode_operator.training.observation import Training, TrainingObservation
from specdecode_operator.training.trainer_args import arguments_blocked
from specdecode_operator.untrusted import mapping

HIDDEN_LAYERS: Final = 4
"""Number of layers of the target whose outputs are stored: three for the head's input, and the last one."""

HIDDEN_ELEMENT_BYTES: Final = 2
_STATE_BYTES_PER_PARAMETER: Final = 16
"""Weight, gradient and both moments of Adam in float32."""

_FROZEN_BYTES: Final = 2
"""Embedding and LM head of the target in 16 bits, which the trainer keeps in memory with the head."""
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")


def hidden_state_bytes(target: ModelGeometry, tokens: int) -> int:
    """Return the bytes of the hidden states of this number of tokens."""
    return tokens * HIDDEN_LAYERS * target.hidden_size * HIDDEN_ELEMENT_BYTES


@dataclass(frozen=True)
class TrainerMemory:
    """Estimated memory of the trainer on each GPU, in bytes."""

    head_parameters: int
    head_bytes: int
    frozen_bytes: int

    @property
    def total_bytes(self) -> int:
        """Total memory in bytes."""
        return self.head_bytes + self.frozen_bytes


def trainer_memory(target: ModelGeometry, spec: TrainingRun) -> TrainerMemory:
    """Return the estimated memory of the trainer, whose head has the shape of the target's layers."""
    parameters = _head_parameters(target, spec)
    tables = 1 if target.tie_word_embeddings else 2
    frozen = tables * target.vocab_size * target.hidden_size * _FROZEN_BYTES
    return TrainerMemory(parameters, parameters * _STATE_BYTES_PER_PARAMETER, frozen)


def _head_parameters(target: ModelGeometry, spec: TrainingRun) -> int:
    """Return the estimated number of trained parameters: layers, the projection of hidden states, and an LM head."""
    hidden = target.hidden_size
    attention = next((each for each in target.attentions if isinstance(each, SelfAttention)), None)
    queries = attention.num_heads * attention.head_dim if attention else hidden
    keys = attention.num_kv_heads * attention.head_dim if attention else hidden
    # If all layers of the target have experts, the head gets its own dense layer.
    width = target.widest_dense or 4 * hidden
    inputs = 2 * hidden  # embedding and hidden state side by side
    layer = inputs * (queries + 2 * keys) + queries * hidden + 3 * hidden * width
    projection = (HIDDEN_LAYERS - 1) * hidden * hidden
    vocabulary = min(_argument(spec, "--draft-vocab-size") or target.vocab_size, target.vocab_size)
    return (_argument(spec, "--num-layers") or 1) * layer + projection + vocabulary * hidden


def _argument(spec: TrainingRun, flag: str) -> int | None:
    """Return the value of a numeric argument of the trainer; None if it is not set."""
    words = [part for each in spec.trainer.args for part in each.split("=", 1)]
    return next((int(after) for word, after in pairwise(words) if word == flag and _NUMBER.fullmatch(after)), None)


_GB: Final = 10**9


def trainer_gpus(spec: TrainingRun, source: CapturedDeployment) -> int:
    """Return the number of GPUs of the trainer: by default as many as one replica takes, and 0 on a CPU."""
    chosen = source.launch.plan.chosen
    if spec.trainer.gpus is not None:
        return spec.trainer.gpus
    return 0 if chosen.product == CPU_PRODUCT else chosen.gpus


def training_blocked(spec: SpecDecodeTrainingSpec, observed: ObservedDeployment | None) -> Blocked | None:
    """Return why no head can be trained for a deployment, regardless of rows and claims."""
    source = captured_deployment(spec.deployment, observed)
    return source if isinstance(source, Blocked) else run_blocked(spec, source)


def run_blocked(run: TrainingRun, source: CapturedDeployment) -> Blocked | None:
    """Return why no head can be trained with these settings for a deployment with a plan."""
    return deployment_blocked(source) or arguments_blocked(run.trainer.args) or trainer_blocked(run, source)


def deployment_blocked(source: CapturedDeployment) -> Blocked | None:
    """Return why no head can be trained for a deployment's target."""
    facts, chosen = source.launch.facts, source.launch.plan.chosen
    if facts.replay is not None:
        message = (
            f"deployment {source.key.name} replays a recording, so it has no target: name a deployment without"
            " spec.engine.replay"
        )
        return Blocked("EngineReplayed", message, permanent=True)
    if chosen.nodes > 1:
        message = (
            f"a replica of deployment {source.key.name} takes {chosen.nodes} nodes, and trainings support only one:"
            " name a deployment with fewer GPUs per replica (spec.parallelism)"
        )
        return Blocked("MultiNodeNotSupported", message, permanent=True)
    return None


def trainer_blocked(spec: TrainingRun, source: CapturedDeployment) -> Blocked | None:
    """Return why the trainer cannot run on the deployment's product, or does not fit."""
    chosen, gpus = source.launch.plan.chosen, trainer_gpus(spec, source)
    name = source.key.name
    if chosen.product == CPU_PRODUCT:
        if not gpus:
            return None
        message = (
            f"spec.trainer.gpus: {gpus}: deployment {name} runs on CPUs, so the training does too: set it to 0, or name"
            " a deployment on GPUs, in another training"
        )
        return Blocked("TrainerGPUsOnCPU", message, permanent=True)
    if gpus < chosen.gpus:
        message = (
            f"spec.trainer.gpus: {gpus}: the target needs {chosen.place} to generate hidden states: set it to"
            f" {chosen.gpus} or more in another training, or remove it"
        )
        return Blocked("TrainerWithoutGPUs" if not gpus else "TooFewGPUs", message, permanent=True)
    if gpus > chosen.gpus and claims_devices(source.launch.facts.spec):
        message = (
            f"spec.trainer.gpus: {gpus}: the pod claims {chosen.place} like an engine of deployment {name}"
            f" (spec.accelerator.resourceClaim): set it to {chosen.gpus} in another training,"
            " or remove it"
        )
        return Blocked("TooManyGPUs", message, permanent=True)
    device = find_device(chosen.product)
    memory = trainer_memory(source.launch.facts.pair.target, spec)
    if device is None or memory.total_bytes <= device.total_bytes:
        return None
    message = (
        f"spec.method: {spec.method}: the trainer needs {format_gib(memory.total_bytes)} GiB per GPU (estimated:"
        f" {memory.head_parameters:,} parameters of the head with gradients and Adam's moments in float32,"
        f" {format_gib(memory.head_bytes)} GiB, and the target's embedding and LM head,"
        f" {format_gib(memory.frozen_bytes)} GiB), and {chosen.product} has {format_gib(device.total_bytes)} GiB: use"
        " GPUs with more memory, or a smaller --draft-vocab-size or --num-layers in spec.trainer.args"
    )
    return Blocked("TrainerDoesNotFit", message, permanent=True)


def rows_blocked(spec: SpecDecodeTrainingSpec, observed: TrainingObservation) -> Blocked | None:
    """Return why the rows cannot be exported from the captures, or read from the dataset."""
    if spec.dataset is not None:
        return _dataset_blocked(spec, observed.rows)
    return next(_captures_blocked(spec, observed.captures, observed.capture_claims), None)


def _captures_blocked(
    spec: SpecDecodeTrainingSpec, captures: Mapping[str, Body | None], claims: Mapping[str, Body | None]
) -> Iterator[Blocked]:
    for number, name in enumerate(spec.captures):
        where, body = f"spec.captures[{number}]: {name}", captures.get(name)
        if body is None:
            message = f"{where}: not found in this namespace; continues when this SpecDecodeCapture exists"
            yield Blocked("CaptureNotFound", message)
            continue
        capture = read_capture(body)
        yield from _capture_blocked(where, capture, spec.deployment)
        claim = capture.status.claim
        if claim is None or claims.get(claim) is None:
            message = f"{where}: its claim {claim or '(not set)'} does not exist: train on another capture"
            yield Blocked("CaptureClaimNotFound", message)


def _capture_blocked(where: str, capture: Capture, deployment: str) -> Iterator[Blocked]:
    spec = capture.spec
    if spec.get("deployment") != deployment:
        message = (
            f"{where}: is a capture of deployment {spec.get('deployment')}, not of {deployment}: use captures of"
            f" {deployment}"
        )
        yield Blocked("CaptureOfOtherDeployment", message, permanent=True)
    record = mapping(spec, "record")
    if not record.get("tokenIds"):
        message = f"{where}: has no answers, because record.tokenIds is false: use a capture with record.tokenIds: true"
        yield Blocked("NoTokenIds", message, permanent=True)
    if spec.get("source") != Source.LIVE:
        dataset = mapping(mapping(mapping(spec, "workload"), "prompts"), "dataset")
        if not dataset or dataset.get("format") == DatasetFormat.TRACE:
            message = (
                f"{where}: its prompts are random tokens, so its answers do not resemble answers to users: use a"
                " capture with a dataset of text prompts, or a live capture"
            )
            yield Blocked("RandomPrompts", message, permanent=True)
    ended = capture.ended
    if ended is None:
        yield Blocked("CaptureNotSucceeded", f"{where}: it has not ended; continues when it succeeds")
    elif ended.status is not TRUE:
        message = f"{where}: it failed ({ended.reason}), so its files are incomplete: use another capture"
        yield Blocked("CaptureNotSucceeded", message, permanent=True)


def _dataset_blocked(spec: SpecDecodeTrainingSpec, source: Body | None) -> Blocked | None:
    dataset = spec.dataset
    assert dataset is not None  # noqa: S101  checked by the caller
    if dataset.config_map is not None:
        field, name = "configMap.name", dataset.config_map.name
    else:
        field = "persistentVolumeClaim.claimName"
        name = dataset.persistent_volume_claim.claim_name if dataset.persistent_volume_claim else ""
    if source is None:
        return Blocked("DatasetNotFound", f"spec.dataset.{field}: {name}: not found; continues when it exists")
    if dataset.config_map is None:
        return None
    keys = {*(source.get("data") or {}), *(source.get("binaryData") or {})}
    if dataset.path in keys:
        return None
    held = ", ".join(sorted(keys)[:8]) or "none"
    message = (
        f"spec.dataset.path: {dataset.path}: is not a key of ConfigMap {name} (keys: {held}): add this key, or correct"
        " the path in another training"
    )
    return Blocked("DatasetNotFound", message)


def head_blocked(spec: SpecDecodeTrainingSpec, source: CapturedDeployment, claim: Body | None) -> Blocked | None:
    """Return why the head to continue from cannot be read."""
    head, served = spec.from_, source.launch.facts.spec
    volume, draft = served.models.volume, served.speculation.draft if served.speculation else None
    reference = head.persistent_volume_claim if head else None
    if head is not None and head.revision is not None and volume is not None:
        message = (
            f"spec.from.revision: {head.revision}: has no effect, because deployment {source.key.name} reads models"
            " from models.volume: remove it in another training"
        )
        return Blocked("Invalid", message, permanent=True)
    is_own = (
        head is not None and draft is not None and head.model == draft.model and head.revision in {None, draft.revision}
    )
    if head is not None and reference is None and downloads_to_cache(served) and not is_own:
        message = (
            f"spec.from.model: {head.model}: is not in models.cache of deployment {source.key.name}, which has only its"
            " target and draft: put the head on a claim, and name it in spec.from.persistentVolumeClaim of another"
            " training"
        )
        return Blocked("Invalid", message, permanent=True)
    if reference is None or claim is not None:
        return None
    field = "spec.from.persistentVolumeClaim.claimName"
    return Blocked("ClaimNotFound", f"{field}: {reference.claim_name}: claim not found; continues when it exists")


def claim_in_use(claim: str, rival: str) -> Blocked:
    """Return the blocking reason for a claim that another training uses."""
    message = f"claim {claim} is used by training {rival}; continues when that training ends, or name another claim"
    return Blocked("ClaimInUse", message)


def claim_too_small(
    training: Training, spec: SpecDecodeTrainingSpec, source: CapturedDeployment, observed: TrainingObservation
) -> Blocked | None:
    """Return the blocking reason if the hidden states need more space than the claim has."""
    tokens = _tokens(spec, observed.captures)
    needed = hidden_state_bytes(source.launch.facts.pair.target, tokens)
    size = _claim_bytes(spec, observed.claim)
    if size is None or needed <= size:
        return None
    field = "spec.storage.persistentVolumeClaim" if spec.storage.existing_claim else "spec.storage.size"
    message = (
        f"{field}: claim {claim_of(training, spec.storage)} has {size / _GB:.1f} GB, and the hidden states of up to"
        f" {tokens:,} tokens need {needed / _GB:.1f} GB: use a larger claim, or lower spec.maxTokens to"
        f" {tokens * size // needed:,}"
    )
    return Blocked("TooSmallClaim", message, permanent=True)


def _tokens(spec: SpecDecodeTrainingSpec, captures: Mapping[str, Body | None]) -> int:
    """Return an upper bound of the tokens to train on: spec.maxTokens, or less if the captures are short."""
    longest = 0
    for body in captures.values():
        requests = mapping(mapping(mapping(body or {}, "status"), "summary"), "requests")
        completed = requests.get("completed")
        if not isinstance(completed, int) or isinstance(completed, bool) or completed < 0:
            return spec.max_tokens
        longest += completed * spec.trainer.sequence_length
    return min(spec.max_tokens, longest) if captures else spec.max_tokens


def _claim_bytes(spec: SpecDecodeTrainingSpec, claim: Body | None) -> int | None:
    """Return the size of the claim, created or to create; None if it is unknown."""
    if claim is None:
        size: object = spec.storage.size or DEFAULT_SIZE
    else:
        wanted = mapping(mapping(mapping(claim, "spec"), "resources"), "requests").get("storage")
        size = mapping(mapping(claim, "status"), "capacity").get("storage") or wanted
    found = quantity(size)
    return None if found is None else int(found)
