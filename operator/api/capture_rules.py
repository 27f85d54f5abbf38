"""CEL validation rules of SpecDecodeCapture and of capture schedules."""

from collections.abc import Mapping
from dataclasses import replace

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture import (
    ArmSpeculation,
    CaptureRun,
    CaptureWorkload,
    Dataset,
    LiveRecording,
    Phase,
    Prompts,
    SpecDecodeCaptureSpec,
    Storage,
)
from specdecode_operator.api.deployment import CaptureSchedule
from specdecode_operator.api.deployment_rules import (
    INSIDE_A_VOLUME,
    NAME_MAX_LENGTH,
    NGRAM,
    SPECULATION,
    Rule,
    forbidden,
    required,
    rule,
)
from specdecode_operator.api.speculation import Ngram

JOB_NAME = rule(
    f"self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= {NAME_MAX_LENGTH}",
    f"metadata.name: is {{self.metadata.name}}, which cannot name a Job and a folder: use at most {NAME_MAX_LENGTH}"
    " of a-z, 0-9 and -",
)

_FIELDS_BY_PATTERN: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Closed": (("concurrency",), ()),
    "Constant": (("requestsPerSecond",), ()),
    "Poisson": (("requestsPerSecond",), ()),
    "Burst": (("burstSize", "burstIntervalSeconds"), ()),
    "Staircase": (("requestsPerSecond", "stepSeconds", "stepRequestsPerSecond"), ()),
    "Multiturn": (("concurrency", "turns"), ("thinkSeconds",)),
    "Recorded": ((), ()),
}
"""Required and optional fields of a pattern, beyond those of every phase."""

_EXAMPLES: Mapping[str, str] = {
    "concurrency": "16",
    "requestsPerSecond": '"4"',
    "burstSize": "32",
    "burstIntervalSeconds": "10",
    "stepSeconds": "30",
    "stepRequestsPerSecond": '"1"',
    "turns": "4",
}


def immutable(field: str, message: str = "another run is another object: create one with another name") -> Rule:
    """Return the rule that a field keeps its value."""
    return forbidden(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field}: cannot be changed: {message}",
    )


def _needed(field: str) -> Rule:
    patterns = [name for name, (needed, _) in _FIELDS_BY_PATTERN.items() if field in needed]
    return required(
        f"!(self.pattern in {patterns}) || has(self.{field})",
        f"{field}: pattern {{self.pattern}} needs it: set it, to {_EXAMPLES[field]} for example",
    )


def _foreign(field: str) -> Rule:
    patterns = [name for name, (needed, possible) in _FIELDS_BY_PATTERN.items() if field in needed + possible]
    return forbidden(
        f"self.pattern in {patterns} || !has(self.{field})",
        f"{field}: pattern {{self.pattern}} does not use it: remove it",
    )


PHASE = (
    *map(_needed, _EXAMPLES),
    *map(_foreign, (*_EXAMPLES, "thinkSeconds")),
    rule(
        "self.name != 'warmup'",
        "name: is warmup, which is reserved for the requests before the first phase: use another name",
    ),
    rule(
        "has(self.durationSeconds) != has(self.requests)",
        "durationSeconds: a phase ends by time or by requests: set one of durationSeconds and requests",
    ),
    replace(INSIDE_A_VOLUME, holds=f"!has(self.path) || {INSIDE_A_VOLUME.holds}"),
)

PROMPTS = (
    rule(
        "has(self.synthetic) != has(self.dataset)",
        "synthetic: prompts have one source: set one of synthetic and dataset",
    ),
)

DATASET = (
    rule(
        "has(self.configMap) != has(self.persistentVolumeClaim)",
        "configMap: a file has one source: set one of configMap and persistentVolumeClaim",
    ),
    INSIDE_A_VOLUME,
)

_HAS_DATASET = "has(self.prompts) && has(self.prompts.dataset)"
_IS_TRACE = f"{_HAS_DATASET} && self.prompts.dataset.format == 'Trace'"


def _every_phase(holds: str, message: str, *, unless: str = "false") -> Rule:
    """Return a rule on each phase ``p``, unless a condition on the workload holds."""
    return rule(
        f"!has(self.phases) || {unless} || self.phases.all(p, {holds})",
        f"phases: {message}",
    )


WORKLOAD = (
    _every_phase("self.phases.exists_one(q, q.name == p.name)", "two phases have one name: rename one"),
    _every_phase(
        "!has(p.promptTokens)",
        "promptTokens is for synthetic prompts, but the prompts are from a dataset: remove promptTokens",
        unless=f"!({_HAS_DATASET})",
    ),
    _every_phase(
        "!has(p.promptTokens) || self.prompts.synthetic.sharedPrefixTokens <= p.promptTokens",
        "promptTokens of one is below prompts.synthetic.sharedPrefixTokens: raise it, or lower that",
        unless="!has(self.prompts) || !has(self.prompts.synthetic)",
    ),
    _every_phase(
        "!has(p.path)",
        "path is a file of prompts.dataset, which is not set: remove path, or set prompts.dataset",
        unless=_HAS_DATASET,
    ),
    _every_phase(
        "!has(p.category)",
        "category needs a dataset of format SPEED-Bench: remove it, or set prompts.dataset.format",
        unless=f"{_HAS_DATASET} && self.prompts.dataset.format == 'SPEED-Bench'",
    ),
    _every_phase(
        "!has(p.outputTokens) && p.pattern != 'Multiturn'",
        "a dataset of format Trace sets the output lengths and has no conversations: remove outputTokens, and use"
        " another pattern than Multiturn",
        unless=f"!({_IS_TRACE})",
    ),
    _every_phase(
        "p.pattern != 'Recorded'",
        "pattern Recorded takes its arrival times from a dataset of format Trace: set prompts.dataset.format, or use"
        " another pattern",
        unless=_IS_TRACE,
    ),
    rule(
        "!has(self.temperatures) || self.temperatures.map(t, t.sharePercent).sum() == 100",
        "temperatures: the shares add up to {self.temperatures.map(t, t.sharePercent).sum():d}: make their"
        " sharePercent 100 in all",
    ),
    rule(
        "!has(self.prompts) || !has(self.prompts.synthetic)"
        " || self.prompts.synthetic.sharedPrefixTokens <= self.prompts.synthetic.promptTokens",
        "prompts.synthetic.sharedPrefixTokens: is {self.prompts.synthetic.sharedPrefixTokens:d}, longer than the"
        " prompts with promptTokens {self.prompts.synthetic.promptTokens:d}: lower it, or raise promptTokens",
    ),
)

ONE_CLAIM = forbidden(
    "!has(self.persistentVolumeClaim) || !has(self.size) && !has(self.storageClassName)",
    "persistentVolumeClaim: cannot be combined with size or storageClassName: remove it, or the other two",
)

STORAGE = (ONE_CLAIM, *map(immutable, ("size", "storageClassName", "persistentVolumeClaim")))

LIVE = (
    rule(
        "has(self.durationSeconds) != has(self.requests)",
        "durationSeconds: a recording ends by time or by requests: set one of durationSeconds and requests",
    ),
)

_IS_LIVE = "has(self.source) && self.source == 'Live'"
_SEVERAL_ARMS = "has(self.arms) && self.arms.size() > 1"


def _compares(field: str) -> Rule:
    return forbidden(
        f"!has(self.{field}) || {_SEVERAL_ARMS} || {_IS_LIVE}",
        f"{field}: is for comparing arms: remove it, or list two arms or more",
    )


_STARTS_ENGINES = "is for captures that start an engine, and source is Live: remove it, or set source: Load"


def _of_load(field: str, is_default: str = "false") -> Rule:
    """Return that a live capture may not set a field; the API server has written its default if it has one."""
    return forbidden(f"!({_IS_LIVE}) || !has(self.{field}) || {is_default}", f"{field}: {_STARTS_ENGINES}")


def _is_default(field: str, model: type[ApiModel] = CaptureRun, place: str = "self") -> str:
    """Return the condition that a field is not set, or has the default that the API server writes."""
    (default,) = (each.default for each in model.model_fields.values() if each.alias == field)
    return f"!has({place}.{field}) || {place}.{field} == {repr(str(default)) if isinstance(default, str) else default}"


_SOURCE = (
    required(
        f"!({_IS_LIVE}) || has(self.live)",
        "live: source Live needs it: set live.durationSeconds, to 600 for example, or live.requests",
    ),
    forbidden(
        f"{_IS_LIVE} || !has(self.live)",
        "live: is for live captures, and source is Load: remove it, or set source: Live",
    ),
    forbidden(
        f"{_IS_LIVE} || !has(self.record) || !has(self.record.promptTokenIds) || !self.record.promptTokenIds",
        "record.promptTokenIds: is for live captures, and source is Load: remove it, or set source: Live",
    ),
    *map(_of_load, ("arms", "repetitions", "slo", "checks", "against")),
    _of_load(
        "workload",
        " && ".join(
            [
                *(f"!has(self.workload.{field})" for field in ("prompts", "phases", "temperatures")),
                *(
                    f"({_is_default(field, CaptureWorkload, 'self.workload')})"
                    for field in ("warmupRequests", "timeoutSeconds")
                ),
            ]
        ),
    ),
    *(_of_load(field, _is_default(field)) for field in ("seed", "deploymentDuringCapture", "borrowTimeoutSeconds")),
    forbidden(
        f"!({_IS_LIVE}) || !has(self.live) || !has(self.live.durationSeconds) || {_is_default('deadlineSeconds')}",
        "deadlineSeconds: limits a recording of live.requests, and live.durationSeconds is set: remove one of them",
    ),
)


RUN = (
    *_SOURCE,
    rule(
        "!has(self.arms) || self.arms.all(a, self.arms.exists_one(b, b.name == a.name))",
        "arms: two arms have one name: rename one",
    ),
    rule(
        f"!({_SEVERAL_ARMS}) || !has(self.repetitions) || self.repetitions > 1",
        "repetitions: is 1, but engine starts vary, so that several arms need 2 or more: raise it, or list one arm",
    ),
    *map(_compares, ("slo", "checks")),
    forbidden(
        f"!has(self.against) || !({_SEVERAL_ARMS})",
        "against: judges one engine, and there are several arms: remove it, or all arms but one",
    ),
)

SPEC = (
    *RUN,
    *map(
        immutable,
        (
            *("deployment", "deploymentDuringCapture", "workload", "seed", "record", "deadlineSeconds", "backoffLimit"),
            *("arms", "repetitions", "slo", "checks", "against", "source", "live"),
        ),
    ),
)

_TRAINS = "has(self.training)"
_OF_TEMPLATE_LIVE = "has(self.template.source) && self.template.source == 'Live'"
_TEMPLATE_DATASET = "self.template.workload.prompts.dataset"

SCHEDULE = (
    rule(
        f"!({_TRAINS}) || self.template.record.tokenIds",
        "template.record.tokenIds: is false, and a training needs the answers: set it to true, or remove training",
    ),
    rule(
        f"!({_TRAINS}) || !({_OF_TEMPLATE_LIVE}) || self.template.record.promptTokenIds",
        "template.record.promptTokenIds: is false, and a training on live captures needs the prompts: set it to true,"
        " or remove training",
    ),
    rule(
        f"!({_TRAINS}) || {_OF_TEMPLATE_LIVE} || has(self.template.workload.prompts) && has({_TEMPLATE_DATASET})"
        f" && {_TEMPLATE_DATASET}.format != 'Trace'",
        "template.workload.prompts: a training needs answers to text prompts, and these are random tokens: set dataset"
        " to a file of text prompts, set template.source: Live, or remove training",
    ),
    rule(
        f"!({_TRAINS}) || self.successfulHistoryLimit > 0",
        "successfulHistoryLimit: is 0, and a training reads the capture after its end: set it to 1 or more, or remove"
        " training",
    ),
    forbidden(
        "!has(self.template.storage.persistentVolumeClaim) || !has(self.retention)"
        " || !has(self.retention.count) && !has(self.retention.failedCount) && !has(self.retention.days)",
        "retention: is for claims that captures create, and template.storage.persistentVolumeClaim names the existing"
        " claim {self.template.storage.persistentVolumeClaim.claimName}: remove one of them",
    ),
)

_WORKLOAD_RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    CaptureWorkload: WORKLOAD,
    Prompts: PROMPTS,
    Dataset: DATASET,
    Phase: PHASE,
    ArmSpeculation: SPECULATION,
    LiveRecording: LIVE,
}

SCHEDULE_RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    **_WORKLOAD_RULES,
    CaptureSchedule: SCHEDULE,
    CaptureRun: RUN,
    Storage: (ONE_CLAIM,),
}
"""The rules of each model of a schedule, whose template may change at any time."""

CAPTURE_RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    **_WORKLOAD_RULES,
    SpecDecodeCaptureSpec: SPEC,
    Storage: STORAGE,
    Ngram: NGRAM,
}
"""The rules of each model of a capture."""
