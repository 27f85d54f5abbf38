"""CEL validation rules of SpecDecodeDeployment, and the `Rule` type that all CRD rules use.

The API server evaluates the rules before it stores an object. Each rule is attached to the innermost model that
contains all fields it compares. Most rules repeat a check of vLLM 0.32, so that an invalid combination fails at
admission and not hours later at engine start.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.deployment import (
    Accelerator,
    Autoscaling,
    Engine,
    EnvVar,
    Policy,
    RecordingSource,
    Replay,
    Serving,
    SpecDecodeDeploymentSpec,
)
from specdecode_operator.api.speculation import (
    AdapterSlots,
    AssumedModel,
    Draft,
    HostPath,
    ModelImage,
    Models,
    ModelVolume,
    Ngram,
    RopeScaling,
    Speculation,
)
from specdecode_operator.enums import (
    METHODS_NEEDING_DRAFT,
    METHODS_TAKING_DRAFT,
    METHODS_WITH_LAYERS,
    METHODS_WITH_LOOKUP,
    METHODS_WITH_SAMPLING,
    METHODS_WITH_TARGETS_HEAD,
    Method,
)


class Reason(StrEnum):
    """Prefix that the API server puts before a message. Its fourth value, duplicate, drops the message."""

    INVALID = "FieldValueInvalid"
    REQUIRED = "FieldValueRequired"
    FORBIDDEN = "FieldValueForbidden"


_VALUE: Final = re.compile(r"\{([^{}:]+)(:d)?\}")


@dataclass(frozen=True)
class Rule:
    """A condition on one model, and the message if it does not hold."""

    field: str
    """Path of the field to blame, relative to the model: ``serving.port``."""
    holds: str
    """CEL expression that is true for a valid object; ``self`` is the model."""
    message: str
    """Fault and fix, after the field's path. ``{…}`` has a CEL expression of a value, with
    with ``:d`` for a number."""
    reason: Reason = Reason.INVALID

    @property
    def values(self) -> list[str]:
        """CEL expressions of the values in the message."""
        return [found[1] for found in _VALUE.finditer(self.message)]

    def as_validation(self) -> dict[str, str]:
        """Return the rule as an entry of ``x-kubernetes-validations``."""
        validation = {"rule": self.holds, "fieldPath": f".{self.field}", "reason": self.reason.value}
        # Needed with an expression, too: if its result has a line break, the API server shows the message instead.
        validation["message"] = self.words("…" for _ in self.values)
        if self.values:
            # format() and not string(): the API server cannot bound the cost of the latter.
            text = _VALUE.sub(lambda found: "%d" if found[2] else "%s", self.message)
            validation["messageExpression"] = f"'{text}'.format([{', '.join(self.values)}])"
        return validation

    def reads(self, field: str) -> bool:
        """Return whether the rule depends on a field of its model."""
        return any(re.search(rf"\bself\.{re.escape(field)}\b", text) for text in (self.holds, *self.values))

    def words(self, values: Iterable[str]) -> str:
        """Return the message with these values."""
        given = iter(values)
        return _VALUE.sub(lambda _: next(given), self.message)


def rule(holds: str, message: str, reason: Reason = Reason.INVALID) -> Rule:
    """Return a rule from its CEL expression and a message that begins with the field: ``port: is taken: choose …``."""
    field, _, text = message.partition(": ")
    return Rule(field, holds, text, reason)


def required(holds: str, message: str) -> Rule:
    """Return a rule about a missing field."""
    return rule(holds, message, Reason.REQUIRED)


def forbidden(holds: str, message: str) -> Rule:
    """Return a rule about a field that must be absent."""
    return rule(holds, message, Reason.FORBIDDEN)


MODELS = (
    forbidden(
        "!has(self.volume) || !has(self.hubTokenSecret)",
        "hubTokenSecret: has no effect with models.volume, which is not downloaded: remove one of the two",
    ),
    rule(
        "!has(self.cache) || !has(self.volume) || !has(self.volume.persistentVolumeClaim)"
        " || self.volume.persistentVolumeClaim.claimName != self.cache.persistentVolumeClaim.claimName",
        "cache.persistentVolumeClaim.claimName: is {self.cache.persistentVolumeClaim.claimName}, the claim of"
        " models.volume, which is mounted read-only: name another, or remove models.volume",
    ),
)

MODEL_VOLUME = (
    required(
        "has(self.persistentVolumeClaim) || has(self.hostPath) || has(self.image)",
        "persistentVolumeClaim: is missing: name a claim, a hostPath or an image",
    ),
    forbidden(
        "!has(self.hostPath) || !has(self.persistentVolumeClaim)",
        "hostPath: models can be in only one place: remove it, or persistentVolumeClaim",
    ),
    forbidden(
        "!has(self.image) || !has(self.persistentVolumeClaim) && !has(self.hostPath)",
        "image: models can be in only one place: remove it, or persistentVolumeClaim and hostPath",
    ),
)


def _tagged(field: str) -> Rule:
    """Return the rule that an image has a tag or a digest."""
    image = f"self.{field}"
    return rule(
        rf"!has({image}) || {image}.matches('^[^[:space:]/][^[:space:]]*$') && !{image}.matches('://') &&"
        rf" ({image}.matches(':[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}$') || {image}.matches('@sha256:[0-9a-f]{{64}}$'))",
        f"{field}: is {{{image}}}, which is not an image with a tag or a digest: add a tag (:v1) or a digest"
        " (@sha256:…), and leave out https:// and blanks",
    )


MODEL_IMAGE = (_tagged("reference"),)
DRAFT = (
    forbidden(
        "!has(self.image) || !has(self.persistentVolumeClaim)",
        "image: the draft can be in only one place: remove it, or persistentVolumeClaim",
    ),
)

HOST_PATH = (
    rule(
        r"self.path.matches('^/[^/]') && !self.path.matches('(^|/)\\.\\.?(/|$)')",
        "path: is {self.path}: write a directory of the nodes in full, beginning with / and without . or ..",
    ),
)

ROPE_SCALING = (
    forbidden(
        "self.type == 'yarn' || !has(self.originalMaxPositionEmbeddings)",
        "originalMaxPositionEmbeddings: type {self.type} always multiplies the length in config.json: remove it,"
        " or use type: yarn",
    ),
)

ASSUMED_MODEL = (
    required(
        "has(self.weightsGiB) || has(self.kvBytesPerToken) || has(self.stateMiBPerRequest)",
        "weightsGiB: is missing, as are kvBytesPerToken and stateMiBPerRequest: set at least one, or remove assume",
    ),
)

_HAS_VOLUME = "has(self.models) && has(self.models.volume)"
HAS_DRAFT = "has(self.speculation) && has(self.speculation.draft)"
# What the hub allows as OWNER/NAME or NAME; a path in a volume is relative, has no .. and looks like no option.
_HUB_ID = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?$"
_ABSOLUTE_OR_OPTION = r"^[/-]"
_PARENT_FOLDER = r"(^|/)\\.\\.(/|$)"


def _source_of(model: str, absent: str, on_volume: str, volume: str) -> tuple[Rule, ...]:
    """Return the rules on the source of a target or draft.

    ``model`` is its path in the spec; ``absent`` is the beginning of a CEL expression that passes if there is none;
    ``on_volume`` is the CEL expression that it is on a volume, which is field ``volume``.
    """
    name, revision = f"self.{model}.model", f"self.{model}.revision"
    return (
        rule(
            f"{absent}({on_volume}) || {name}.matches('{_HUB_ID}')",
            f"{model}.model: is {{{name}}}, which is not a hub ID: write OWNER/NAME, or copy the folder to a volume"
            " and set models.volume",
        ),
        rule(
            f"{absent}!({on_volume})"
            f" || !({name}.matches('{_ABSOLUTE_OR_OPTION}') || {name}.matches('{_PARENT_FOLDER}'))",
            f"{model}.model: is {{{name}}}, which is not a path inside {volume}: write it from the root of the"
            " volume, without leading / or - and without ..",
        ),
        forbidden(
            f"{absent}!({on_volume}) || !has({revision})",
            f"{model}.revision: has no effect with {volume}, which is not downloaded: remove one of the two",
        ),
    )


def _checkpoints_of(model: str, absent: str) -> tuple[Rule, ...]:
    """Return the rules of ``_source_of`` on the other checkpoints of a target or draft."""
    checkpoints = f"self.{model}.checkpoints"
    none = f"{absent}!has({checkpoints})"
    return (
        rule(
            f"{none} || {_HAS_VOLUME} || {checkpoints}.all(c, c.model.matches('{_HUB_ID}'))",
            f"{model}.checkpoints: a model in it is not a hub ID: write OWNER/NAME, or copy the folder to a volume"
            " and set models.volume",
        ),
        rule(
            f"{none} || !({_HAS_VOLUME}) || {checkpoints}.all(c,"
            f" !(c.model.matches('{_ABSOLUTE_OR_OPTION}') || c.model.matches('{_PARENT_FOLDER}')))",
            f"{model}.checkpoints: a model in it is not a path inside models.volume: write it from the root of the"
            " volume, without leading / or - and without ..",
        ),
        forbidden(
            f"{none} || !({_HAS_VOLUME}) || !{checkpoints}.exists(c, has(c.revision))",
            f"{model}.checkpoints: a revision has no effect with models.volume, which is not"
            " downloaded: remove one of the two",
        ),
    )


def _sources_of_adapters() -> tuple[Rule, ...]:
    """Return the rules of ``_source_of`` on adapters, each of which may have its own claim."""
    none = "!has(self.adapters) || "
    stored = f"({_HAS_VOLUME} || has(a.persistentVolumeClaim))"
    outside = f"(a.model.matches('{_ABSOLUTE_OR_OPTION}') || a.model.matches('{_PARENT_FOLDER}'))"
    return (
        rule(
            f"{none}self.adapters.all(a, {stored} || a.model.matches('{_HUB_ID}'))",
            "adapters: the model of an adapter is not a hub ID: write OWNER/NAME, or copy the folder to a volume and"
            " set models.volume or its persistentVolumeClaim",
        ),
        rule(
            f"{none}self.adapters.all(a, !{stored} || !{outside})",
            "adapters: the model of an adapter is not a path inside its volume: write it from the root of the volume,"
            " without leading / or - and without ..",
        ),
        forbidden(
            f"{none}!self.adapters.exists(a, {stored} && has(a.revision))",
            "adapters: the revision of an adapter has no effect on a volume: remove one of the two",
        ),
    )


ADAPTER_SLOTS = (
    rule(
        "!has(self.maxRank) || self.maxRank in [1, 8, 16, 32, 64, 128, 256, 320, 512]",
        "maxRank: is {self.maxRank:d}, not a rank that vLLM accepts: use 1, 8, 16, 32, 64, 128, 256, 320 or 512",
    ),
    rule(
        "!has(self.gpu) || !has(self.host) || self.host >= self.gpu",
        "host: is {self.host:d}, below gpu {self.gpu:d}, and adapters on the GPU are also kept on the host: raise it,"
        " or lower gpu",
    ),
)

_HAS_ADAPTERS = "has(self.adapters) && self.adapters.size() > 0"
ADAPTERS = (
    *_sources_of_adapters(),
    forbidden(
        f"!has(self.adapterSlots) || {_HAS_ADAPTERS}",
        "adapterSlots: there are no adapters to keep: remove it, or set adapters",
    ),
    rule(
        "!has(self.adapterSlots) || !has(self.adapterSlots.maxRank) || !has(self.adapters)"
        " || self.adapters.all(a, a.rank <= self.adapterSlots.maxRank)",
        "adapterSlots.maxRank: is {self.adapterSlots.maxRank:d}, below the rank of an adapter: raise it, or remove it",
    ),
    rule(
        "!has(self.adapters) || !has(self.serving.servedModelNames)"
        " || !self.adapters.exists(a, a.name in self.serving.servedModelNames)",
        "adapters: the name of an adapter is also in serving.servedModelNames: rename one of the two",
    ),
)
"""Rules of the whole spec."""

_HAS_DRAFT_CLAIM = "has(self.speculation.draft.persistentVolumeClaim)"
_HAS_DRAFT_IMAGE = "has(self.speculation.draft.image)"
_NO_DRAFT: Final = f"!({HAS_DRAFT}) || "
_NO_DRAFT_IN_MODELS: Final = f"{_NO_DRAFT}{_HAS_DRAFT_CLAIM} || {_HAS_DRAFT_IMAGE} || "
_DRAFT = "speculation.draft"

SOURCES = (
    *_source_of("target", "", _HAS_VOLUME, "models.volume"),
    *_source_of(_DRAFT, _NO_DRAFT_IN_MODELS, _HAS_VOLUME, "models.volume"),
    *_source_of(_DRAFT, _NO_DRAFT, _HAS_DRAFT_CLAIM, "speculation.draft.persistentVolumeClaim")[1:],
    *_source_of(_DRAFT, _NO_DRAFT, _HAS_DRAFT_IMAGE, "speculation.draft.image")[1:],
    *_checkpoints_of("target", absent=""),
    *_checkpoints_of(_DRAFT, absent=_NO_DRAFT),
)
"""Rules of the whole spec."""

INSIDE_A_VOLUME = rule(
    r"!(self.path.matches('^/') || self.path.matches('(^|/)\\.\\.(/|$)'))",
    "path: is {self.path}, which is not a path inside the volume: write it without leading / and without ..",
)
"""The rule on a file, or a folder, of a volume or a ConfigMap."""


def is_one_of(methods: tuple[Method, ...], method: str = "self.method") -> str:
    """Return the CEL expression that a method is one of these."""
    return f"{method} in [{', '.join(repr(each.value) for each in methods)}]"


_SCHEDULE = "self.numSpeculativeTokensByBatchSize"
_NO_SCHEDULE = f"!has({_SCHEDULE})"
_IS_LOSSY = "has(self.rejectionSampling) && self.rejectionSampling == 'fly'"

OF_TRAINED_DRAFTS = (
    forbidden(
        "!has(self.draftUpdate) || self.draftUpdate == 'Restart' || has(self.trainedDrafts) && self.trainedDrafts",
        "draftUpdate: {self.draftUpdate} only applies to trained heads: set trainedDrafts: true, or remove it",
    ),
)
SPECULATION = (
    required(
        "self.method == 'none' || has(self.numSpeculativeTokens)",
        "numSpeculativeTokens: method {self.method} needs it: set it to 1 to 32, for example 3 for eagle and eagle3,"
        " 1 for mtp, 7 for dspark, 15 for dflash, or 5 for draft_model and ngram",
    ),
    rule(
        "self.method == 'none' || !has(self.numSpeculativeTokens) || self.numSpeculativeTokens > 0",
        "numSpeculativeTokens: is 0, which proposes no tokens: use 1 to 32, or method: none",
    ),
    rule(
        "self.method == 'suffix' || !has(self.numSpeculativeTokens) || self.numSpeculativeTokens <= 32",
        "numSpeculativeTokens: is {self.numSpeculativeTokens:d}, which is more than 32: method {self.method} takes at"
        " most 32",
    ),
    forbidden(
        "self.method != 'none' || !has(self.numSpeculativeTokens)",
        "numSpeculativeTokens: has no effect with method none: remove it, or choose another method",
    ),
    required(
        f"!({is_one_of(METHODS_NEEDING_DRAFT)}) || has(self.draft)",
        "draft: method {self.method} needs a draft: set draft.model, or use another method, such as ngram",
    ),
    forbidden(
        f"{is_one_of(METHODS_TAKING_DRAFT)} || !has(self.draft)",
        "draft: method {self.method} uses no draft model: remove it, or use the method that it is for, such as"
        " draft_model",
    ),
    forbidden(
        "self.method == 'draft_model' || !has(self.draft) || !has(self.draft.quantization)"
        " || self.draft.quantization == 'AsCheckpoint'",
        "draft.quantization: is {self.draft.quantization}, but the head of method {self.method} is served in its own"
        " precision: remove it",
    ),
    forbidden(
        "!has(self.draft) || self.method == 'draft_model' || !has(self.draft.checkpoints)"
        " || self.draft.checkpoints.size() == 0",
        "draft.checkpoints: the head of method {self.method} is served in its own precision: remove them",
    ),
    forbidden(
        "!has(self.draft) || !has(self.draft.persistentVolumeClaim) || !has(self.draft.checkpoints)"
        " || self.draft.checkpoints.size() == 0",
        "draft.checkpoints: draft.persistentVolumeClaim holds one checkpoint: remove one of the two",
    ),
    forbidden(
        "self.method == 'draft_model' || !has(self.useHeterogeneousVocab) || !self.useHeterogeneousVocab",
        "useHeterogeneousVocab: method {self.method} drafts in the vocabulary of the target: remove it, or use"
        " method: draft_model",
    ),
    forbidden(
        "!has(self.useHeterogeneousVocab) || !self.useHeterogeneousVocab || !has(self.draftSampling)"
        " || self.draftSampling == 'greedy'",
        "draftSampling: a draft of another vocabulary proposes the likeliest tokens: remove it, or"
        " useHeterogeneousVocab",
    ),
    forbidden(
        f"{is_one_of(METHODS_WITH_LOOKUP)} || !has(self.ngram)",
        "ngram: method {self.method} does not look up tokens in the prompt: remove it, or use method: ngram",
    ),
    forbidden(
        "self.method == 'suffix' || !has(self.suffix)",
        "suffix: method {self.method} does not look up tokens in earlier outputs: remove it, or use method: suffix",
    ),
    forbidden(
        "self.method != 'none' || !has(self.rejectionSampling)",
        "rejectionSampling: has no effect with method none: remove it, or choose another method",
    ),
    required(
        f"!({_IS_LOSSY}) || has(self.lossy) && self.lossy",
        "lossy: rejectionSampling fly changes the answers of the target: set lossy: true to accept that, or use"
        " rejectionSampling: block",
    ),
    forbidden(
        f"{_IS_LOSSY} || !has(self.lossy) || !self.lossy",
        "lossy: only applies to rejectionSampling fly: remove it, or use rejectionSampling: fly",
    ),
    rule(
        f"!({_IS_LOSSY}) || !has(self.numSpeculativeTokens) || self.numSpeculativeTokens != 1",
        "rejectionSampling: fly needs tokens after a rejected one: set numSpeculativeTokens to 2 or more",
    ),
    forbidden(
        f"{is_one_of(METHODS_WITH_SAMPLING)} || !has(self.draftSampling)",
        "draftSampling: method {self.method} has no draft that could sample: remove it, or choose a method with a"
        " draft",
    ),
    forbidden(
        f"{is_one_of(METHODS_WITH_SAMPLING)} || !has(self.adaptiveVerification) || !self.adaptiveVerification",
        "adaptiveVerification: method {self.method} has no draft that reports its confidence: remove it, or choose"
        " a method with a draft",
    ),
    forbidden(
        f"{is_one_of(METHODS_WITH_TARGETS_HEAD)} || !has(self.draftLmHeadQuantization)",
        "draftLmHeadQuantization: method {self.method} has no copy of the output head of the target: remove it, or"
        " use method: eagle or mtp",
    ),
    forbidden(
        "self.method == 'dflash' || !has(self.xpressTopC)",
        "xpressTopC: method {self.method} has no XPress head: remove it, or use method: dflash with such a head",
    ),
    forbidden(
        "self.method != 'none' || !has(self.extraConfig)",
        "extraConfig: has no effect with method none: remove it, or choose another method",
    ),
    forbidden(
        f"self.method != 'none' || {_NO_SCHEDULE}",
        "numSpeculativeTokensByBatchSize: has no effect with method none: remove it, or choose another method",
    ),
    rule(
        f"{_NO_SCHEDULE} || {_SCHEDULE}.all(r, r.from <= r.to)",
        "numSpeculativeTokensByBatchSize: a range ends before it begins: its from must not be above its to",
    ),
    rule(
        f"{_NO_SCHEDULE} || ({_SCHEDULE}.map(r, r.from).isSorted()"
        f" && {_SCHEDULE}.all(a, a.from > a.to || {_SCHEDULE}.exists_one(b, a.from <= b.to && b.from <= a.to)))",
        "numSpeculativeTokensByBatchSize: ranges overlap or are out of order: sort them by from, and begin each after"
        " the to of the one before",
    ),
    rule(
        f"{_NO_SCHEDULE} || !has(self.numSpeculativeTokens)"
        f" || {_SCHEDULE}.all(r, r.numSpeculativeTokens <= self.numSpeculativeTokens)",
        "numSpeculativeTokensByBatchSize: a range requests more than numSpeculativeTokens"
        " {self.numSpeculativeTokens:d}: lower that range, or raise numSpeculativeTokens",
    ),
)

NGRAM = (
    rule(
        "!has(self.promptLookupMin) || !has(self.promptLookupMax) || self.promptLookupMin <= self.promptLookupMax",
        "promptLookupMin: is {self.promptLookupMin:d}, above promptLookupMax {self.promptLookupMax:d}: lower it, or"
        " raise promptLookupMax",
    ),
)


POLICY = (
    rule(
        "self.cooldownSeconds >= self.windowSeconds",
        "cooldownSeconds: is {self.cooldownSeconds:d}, less than windowSeconds, for which engines are observed after"
        " each change: write {self.windowSeconds:d} or more, or lower windowSeconds",
    ),
)


_IS_PERCENTAGE: Final = "self.metric in ['KvCacheUsage', 'PredictedUtilization']"
AUTOSCALING = (
    rule(
        "self.minReplicas <= self.maxReplicas",
        "minReplicas: is {self.minReplicas:d}, above maxReplicas {self.maxReplicas:d}: lower it, or raise maxReplicas",
    ),
    rule(
        "self.minReplicas > 0 || has(self.keda) && has(self.keda.wakeUpQuery)",
        "minReplicas: is 0, but without engines there are no metrics to scale up on: use 1 or more, or set"
        " keda.wakeUpQuery to requests that wait at your gateway",
    ),
    rule(
        f"!({_IS_PERCENTAGE}) || self.target <= 100",
        "target: is {self.target:d}, but the target of {self.metric} is a percentage: use 1 to 100",
    ),
)


RECORDING_SOURCE = (
    rule(
        "has(self.configMap) != has(self.persistentVolumeClaim)",
        "configMap: a recording has one source: set one of configMap and persistentVolumeClaim",
    ),
    INSIDE_A_VOLUME,
)


def _of_records(field: str, default: str) -> Rule:
    return forbidden(
        f"self.mode == 'Steps' || self.{field} == '{default}'",
        f"{field}: is {{self.{field}}}, but mode {{self.mode}} does not match records: remove it, or use mode: Steps",
    )


def _not_of_vllm(field: str, absent: str) -> Rule:
    # The field changes what is replayed, and not what vLLM does.
    return forbidden(
        f"self.mode != 'Emulated' || {absent}",
        f"{field}: is not for mode Emulated, which runs vLLM itself: remove it, or use another mode",
    )


REPLAY = (
    _of_records("match", "Arrival"),
    _of_records("unmatched", "Repeat"),
    _not_of_vllm("acceptance", "!has(self.acceptance) || self.acceptance.size() == 0"),
    _not_of_vllm("timeScalePercent", "self.timeScalePercent == 100"),
    _not_of_vllm("loadFactor", "self.loadFactor == 1"),
    _not_of_vllm(
        "failures",
        "self.failures.startSeconds == 0 && self.failures.errorPercent == 0"
        " && !has(self.failures.hangAfterSeconds) && !has(self.failures.crashAfterSeconds)",
    ),
    rule(
        "!has(self.acceptance) || self.acceptance.size() == 0 || self.acceptance[0].fromSeconds == 0"
        " && self.acceptance.map(a, a.fromSeconds).isSorted()",
        "acceptance: is out of order: begin with fromSeconds 0, and sort by it",
    ),
)

_REPLAYS: Final = "has(self.engine.replay)"

REPLAYING_SPEC = (
    forbidden(
        f"!{_REPLAYS} || !has(self.serving.tlsSecret)",
        "serving.tlsSecret: a replay (engine.replay) only serves plain HTTP: remove one of the two",
    ),
    forbidden(
        f"!{_REPLAYS} || !has(self.captures) || self.captures.size() == 0",
        "captures: a capture of a replay (engine.replay) measures no engine: remove one of the two",
    ),
)
"""Rules between engine.replay and the rest of a spec."""


def _only_for(accelerator_type: str, field: str) -> Rule:
    return forbidden(
        f"self.type == '{accelerator_type}' || !has(self.{field})",
        f"{field}: is for type {accelerator_type}: remove it, or use type: {accelerator_type}",
    )


def _needed_on_cpu(field: str, example: int, what: str) -> Rule:
    return required(
        f"self.type != 'CPU' || has(self.{field})",
        f"{field}: type CPU needs the {what}: set it, to {example} for example",
    )


ACCELERATOR = (
    _needed_on_cpu("cpuCores", 4, "cores of a replica"),
    _needed_on_cpu("memoryGiB", 16, "memory of a replica"),
    _needed_on_cpu("kvCacheGiB", 4, "KV cache of a replica"),
    _only_for("CPU", "cpuCores"),
    _only_for("CPU", "memoryGiB"),
    _only_for("CPU", "kvCacheGiB"),
    _only_for("GPU", "products"),
    _only_for("GPU", "perNode"),
    _only_for("GPU", "memoryGiBPerGPU"),
    _only_for("GPU", "resourceClaim"),
    required(
        "!has(self.memoryGiBPerGPU) || has(self.products) && size(self.products) > 0",
        "products: memoryGiBPerGPU needs the products that it applies to: list their nvidia.com/gpu.product labels",
    ),
    rule(
        "!has(self.kvCacheGiB) || !has(self.memoryGiB) || self.kvCacheGiB < self.memoryGiB",
        "kvCacheGiB: is {self.kvCacheGiB:d}, which leaves no room for weights in memoryGiB {self.memoryGiB:d}: lower"
        " it, or raise memoryGiB",
    ),
    rule(
        "!has(self.products) || self.products.all(p, self.products.exists_one(q, q == p))",
        "products: names a product twice: remove one",
    ),
)

SERVING = (
    forbidden(
        "!self.enforceEager || !has(self.cudagraphMode)",
        "cudagraphMode: there are no CUDA graphs with enforceEager: remove one of the two",
    ),
    forbidden(
        "!has(self.maxCudagraphCaptureSize) || !has(self.cudagraphMode) || self.cudagraphMode != 'NONE'",
        "maxCudagraphCaptureSize: there are no CUDA graphs with cudagraphMode NONE: remove one of the two",
    ),
    forbidden(
        "!self.enforceEager || !has(self.maxCudagraphCaptureSize)",
        "maxCudagraphCaptureSize: there are no CUDA graphs with enforceEager: remove one of the two",
    ),
    rule(
        "self.maxNumBatchedTokens >= self.maxNumSeqs",
        "maxNumBatchedTokens: is {self.maxNumBatchedTokens:d}, below maxNumSeqs {self.maxNumSeqs:d}: raise it, or"
        " lower maxNumSeqs",
    ),
    rule(
        "self.minConcurrency <= self.maxNumSeqs",
        "minConcurrency: is {self.minConcurrency:d}, above maxNumSeqs {self.maxNumSeqs:d}, the maximum number of"
        " running requests: lower it, or raise maxNumSeqs",
    ),
    rule(
        "!has(self.servedModelNames) || self.servedModelNames.all(n, self.servedModelNames.exists_one(m, m == n))",
        "servedModelNames: has a name twice: remove one",
    ),
)

ENGINE = (_tagged("image"),)

_SOURCES = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
ENV_VAR = (
    forbidden(
        "!has(self.valueFrom) || !has(self.value) || self.value == ''",
        "valueFrom: the variable {self.name} also has a value: remove one of them",
    ),
    rule(
        "!has(self.valueFrom) ||"
        f" [{', '.join(f'has(self.valueFrom.{source})' for source in _SOURCES)}].exists_one(each, each)",
        f"valueFrom: the variable {{self.name}} must have one source: set exactly one of {', '.join(_SOURCES)}",
    ),
)

_TENSOR = "self.parallelism.tensor"
_DRAFT_TENSOR = "self.parallelism.draftTensor"
_HAS_METHOD = "has(self.speculation)"
_METHOD = "self.speculation.method"
_DRAFT_LENGTH = "self.speculation.draft.maxModelLen"
_RANGES = "self.speculation.numSpeculativeTokensByBatchSize"

_COUNT: Final = "self.accelerator.resourceClaim.count"
_HAS_COUNT: Final = f"(has(self.accelerator.resourceClaim) && has({_COUNT}))"
_GPUS: Final = f"{_TENSOR} * self.parallelism.pipeline * self.parallelism.data"

SPEC = (
    *SOURCES,
    *ADAPTERS,
    required(
        "self.target.model != '.' || has(self.serving.servedModelNames) && self.serving.servedModelNames.size() > 0",
        "serving.servedModelNames: is missing, and target.model . has no name: write the name that clients use",
    ),
    *REPLAYING_SPEC,
    rule(
        f"!({HAS_DRAFT}) || !has({_DRAFT_LENGTH}) || !has(self.serving.maxModelLen)"
        f" || {_DRAFT_LENGTH} <= self.serving.maxModelLen",
        "speculation.draft.maxModelLen: is {self.speculation.draft.maxModelLen:d}, above serving.maxModelLen"
        " {self.serving.maxModelLen:d}: lower it, or raise serving.maxModelLen",
    ),
    rule(
        f"!has(self.speculation) || !has({_RANGES}) || {_RANGES}.all(r, r.to <= self.serving.maxNumSeqs)",
        "speculation.numSpeculativeTokensByBatchSize: a range goes beyond serving.maxNumSeqs"
        " {self.serving.maxNumSeqs:d}, the maximum number of running requests: lower its to, or raise"
        " serving.maxNumSeqs",
    ),
    forbidden(
        "self.target.quantization != 'BF16' || self.serving.dtype in ['auto', 'bfloat16']",
        "serving.dtype: is {self.serving.dtype}, but target.quantization BF16 requires bfloat16: remove one of the two",
    ),
    rule(
        "self.accelerator.type != 'CPU'"
        " || self.parallelism.pipeline * self.parallelism.data == 1 && !self.parallelism.expert",
        "parallelism: a replica on CPU can only be split by tensor: remove the others",
    ),
    rule(
        f"!has(self.accelerator.kvCacheGiB) || !has({_TENSOR}) || self.accelerator.kvCacheGiB % {_TENSOR} == 0",
        "accelerator.kvCacheGiB: is {self.accelerator.kvCacheGiB:d}, not a multiple of"
        " parallelism.tensor {self.parallelism.tensor:d}: use a multiple, so that ranks get equal shares",
    ),
    rule(
        f"!{_HAS_COUNT} || has({_TENSOR})",
        "accelerator.resourceClaim.count: is {self.accelerator.resourceClaim.count:d}, but parallelism.tensor is not"
        " set: set it, or remove count to let the plan choose both",
    ),
    rule(
        f"!{_HAS_COUNT} || !has({_TENSOR}) || {_GPUS} % {_COUNT} == 0",
        "accelerator.resourceClaim.count: is {self.accelerator.resourceClaim.count:d}, which does not divide the"
        f" {{{_GPUS}:d}} GPUs of a replica (tensor x pipeline x data) into equal pods: remove it, or use that number",
    ),
    forbidden(
        f"!{_REPLAYS} || !has(self.accelerator.resourceClaim)",
        "accelerator.resourceClaim: a replay (engine.replay) claims no GPUs: remove one of the two",
    ),
    forbidden(
        f"!has({_DRAFT_TENSOR}) || {_HAS_METHOD} && {is_one_of(METHODS_WITH_LAYERS, _METHOD)}",
        "parallelism.draftTensor: there is no draft to split: remove it, or choose a method with a draft",
    ),
    rule(
        "!has(self.autoscaling) || self.autoscaling.metric != 'RunningRequests'"
        " || self.autoscaling.target <= self.serving.maxNumSeqs * self.parallelism.data",
        "autoscaling.target: is {self.autoscaling.target:d}, but a replica runs at most serving.maxNumSeqs"
        " {self.serving.maxNumSeqs:d} requests per data-parallel replica: lower it, or raise serving.maxNumSeqs",
    ),
    rule(
        f"!has({_DRAFT_TENSOR}) || {_DRAFT_TENSOR} == 1 || has({_TENSOR}) && {_DRAFT_TENSOR} == {_TENSOR}",
        "parallelism.draftTensor: is {self.parallelism.draftTensor:d}, but vLLM accepts 1 or the value of tensor: write"
        " 1, or set parallelism.tensor to the same",
    ),
    rule(
        f"self.parallelism.pipeline == 1 || !({_HAS_METHOD}) || {_METHOD} != 'draft_model'",
        "parallelism.pipeline: is {self.parallelism.pipeline:d}, but with method draft_model vLLM would build the"
        " draft from the layers of one stage: use 1, or a draft head",
    ),
    rule(
        f"self.parallelism.data == 1 || !({_HAS_METHOD}) || !has({_RANGES}) || {_RANGES}.size() == 0",
        "speculation.numSpeculativeTokensByBatchSize: vLLM ignores it with parallelism.data"
        " {self.parallelism.data:d}, whose copies must draft alike: remove it, or use replicas instead of data",
    ),
)

_HAS_CLAIM = (
    "has({0}.training) && has({0}.training.template.storage)"
    " && has({0}.training.template.storage.persistentVolumeClaim)"
)
_CLAIM = "training.template.storage.persistentVolumeClaim.claimName"

SCHEDULES = (
    rule(
        f"!has(self.captures) || self.captures.all(a, !({_HAS_CLAIM.format('a')})"
        f" || self.captures.exists_one(b, {_HAS_CLAIM.format('b')} && b.{_CLAIM} == a.{_CLAIM}))",
        "captures: two schedules train on one claim, where one training would hold its GPU hours while it waits for the"
        " other: name another claim in one of them",
    ),
)

NAME_MAX_LENGTH = 52
"""Longest name of an object. A Service's name ends at 63 (RFC 1035); as for a CronJob, 11 are left for suffixes."""

SERVICE_NAME = rule(
    f"self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= {NAME_MAX_LENGTH}",
    f"metadata.name: is {{self.metadata.name}}, which cannot name a Service: use at most {NAME_MAX_LENGTH} of a-z,"
    " 0-9 and -, beginning with a letter",
)
"""The rule on the name of a SpecDecodeDeployment."""

RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    SpecDecodeDeploymentSpec: (*SPEC, *SCHEDULES),
    AdapterSlots: ADAPTER_SLOTS,
    AssumedModel: ASSUMED_MODEL,
    RopeScaling: ROPE_SCALING,
    Speculation: (*SPECULATION, *OF_TRAINED_DRAFTS),
    Ngram: NGRAM,
    Accelerator: ACCELERATOR,
    Serving: SERVING,
    Models: MODELS,
    ModelVolume: MODEL_VOLUME,
    HostPath: HOST_PATH,
    ModelImage: MODEL_IMAGE,
    Draft: DRAFT,
    Engine: ENGINE,
    EnvVar: ENV_VAR,
    Policy: POLICY,
    Autoscaling: AUTOSCALING,
    Replay: REPLAY,
    RecordingSource: RECORDING_SOURCE,
}
"""The rules of each model."""
