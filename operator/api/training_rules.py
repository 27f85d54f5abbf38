"""CEL validation rules of SpecDecodeTraining."""

from collections.abc import Mapping

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture_rules import ONE_CLAIM, STORAGE, immutable
from specdecode_operator.api.deployment_rules import INSIDE_A_VOLUME, Rule, forbidden, rule
from specdecode_operator.api.training import SpecDecodeTrainingSpec, StartingHead, TrainingRows, TrainingStorage

ROWS = (
    rule(
        "has(self.configMap) != has(self.persistentVolumeClaim)",
        "configMap: a file has one source: set one of configMap and persistentVolumeClaim",
    ),
    INSIDE_A_VOLUME,
)

HEAD = (
    rule(
        r"!(self.model.matches('^[/-]') || self.model.matches('(^|/)\\.\\.(/|$)'))",
        "model: is {self.model}, which is not a hub ID or a path inside a volume: write it without leading / or - and"
        " without ..",
    ),
    forbidden(
        "!has(self.persistentVolumeClaim) || !has(self.revision)",
        "revision: is for models of the Hub, and persistentVolumeClaim is set: remove one of them",
    ),
)

RUN = (
    rule(
        "(has(self.captures) && self.captures.size() > 0) != has(self.dataset)",
        "captures: rows have one source: set one of captures and dataset",
    ),
    rule(
        "!has(self.captures) || self.captures.all(c, self.captures.exists_one(d, d == c))",
        "captures: a capture is listed twice: remove one",
    ),
)

_IMMUTABLE = (
    *("deployment", "captures", "dataset", "method", "from", "trainer", "holdoutPercent", "minRows", "maxTokens"),
    *("judgement", "seed", "deadlineSeconds", "backoffLimit"),
)

SPEC = (*RUN, *map(immutable, _IMMUTABLE))

_PARTS: Mapping[type[ApiModel], tuple[Rule, ...]] = {TrainingRows: ROWS, StartingHead: HEAD}

TRAINING_RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    **_PARTS,
    SpecDecodeTrainingSpec: SPEC,
    TrainingStorage: STORAGE,
}
"""The rules of each model of a training."""

NEW_TRAINING_RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    **_PARTS,
    SpecDecodeTrainingSpec: RUN,
    TrainingStorage: (ONE_CLAIM,),
}
"""The rules about one version of a training, without those about changes."""

REFRESH_RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {**_PARTS, TrainingStorage: (ONE_CLAIM,)}
"""The rules of each model of a schedule's training, whose template may change at any time."""
