"""What must hold of where models come from. ``api/crd/deployment_rules.py`` says what rules are."""

from specdecode_operator.api.crd.cel import Reason, Rule

MODELS = (
    Rule(
        field="hubTokenSecret",
        holds="!has(self.volume) || !has(self.hubTokenSecret)",
        message="nothing is downloaded when models.volume is given: remove one of the two",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="cache.persistentVolumeClaim.claimName",
        holds="!has(self.cache) || !has(self.volume) || !has(self.volume.persistentVolumeClaim)"
        " || self.volume.persistentVolumeClaim.claimName != self.cache.persistentVolumeClaim.claimName",
        message="is %s, the claim of models.volume, which is mounted read-only: name another, or remove models.volume",
        values=("self.cache.persistentVolumeClaim.claimName",),
    ),
)

MODEL_VOLUME = (
    Rule(
        field="persistentVolumeClaim",
        holds="has(self.persistentVolumeClaim) || has(self.hostPath)",
        message="is missing: name a claim, or a hostPath",
        reason=Reason.REQUIRED,
    ),
    Rule(
        field="hostPath",
        holds="!has(self.hostPath) || !has(self.persistentVolumeClaim)",
        message="models are in one place: remove it, or persistentVolumeClaim",
        reason=Reason.FORBIDDEN,
    ),
)

HOST_PATH = (
    Rule(
        field="path",
        holds=r"self.path.matches('^/[^/]') && !self.path.matches('(^|/)\\.\\.?(/|$)')",
        message="is %s: write a directory of the nodes in full, beginning with / and without . or ..",
        values=("self.path",),
    ),
)

ROPE_SCALING = (
    Rule(
        field="originalMaxPositionEmbeddings",
        holds="self.type == 'yarn' || !has(self.originalMaxPositionEmbeddings)",
        message="type %s multiplies the length that the config.json says: remove it, or use type: yarn",
        values=("self.type",),
        reason=Reason.FORBIDDEN,
    ),
)

ASSUMED_MODEL = (
    Rule(
        field="weightsGiB",
        holds="has(self.weightsGiB) || has(self.kvBytesPerToken) || has(self.stateMiBPerRequest)",
        message="is missing, as are kvBytesPerToken and stateMiBPerRequest: set at least one, or remove assume",
        reason=Reason.REQUIRED,
    ),
)

_HAS_VOLUME = "has(self.models) && has(self.models.volume)"
HAS_DRAFT = "has(self.speculation) && has(self.speculation.draft)"
# What the hub allows as OWNER/NAME or NAME; a path in a volume is relative, has no .. and looks like no option.
_HUB_ID = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?$"
_ABSOLUTE_OR_OPTION = r"^[/-]"
_PARENT_FOLDER = r"(^|/)\\.\\.(/|$)"


def _source_of(model: str, absent: str) -> tuple[Rule, ...]:
    """Return the rules on where a target or draft comes from.

    Parameters
    ----------
    model
        Path of the target or draft from the spec.
    absent
        Beginning of a CEL expression that passes where there is none.
    """
    name, revision = f"self.{model}.model", f"self.{model}.revision"
    return (
        Rule(
            field=f"{model}.model",
            holds=f"{absent}({_HAS_VOLUME}) || {name}.matches('{_HUB_ID}')",
            message="is %s, which is not a hub ID: write OWNER/NAME,"
            " or copy the folder to a volume and set models.volume",
            values=(name,),
        ),
        Rule(
            field=f"{model}.model",
            holds=f"{absent}!({_HAS_VOLUME})"
            f" || !({name}.matches('{_ABSOLUTE_OR_OPTION}') || {name}.matches('{_PARENT_FOLDER}'))",
            message="is %s, which is no path inside models.volume:"
            " write it from the root of the volume, without leading / or - and without ..",
            values=(name,),
        ),
        Rule(
            field=f"{model}.revision",
            holds=f"{absent}!({_HAS_VOLUME}) || !has({revision})",
            message="nothing is downloaded when models.volume is given, so there is no revision to choose:"
            " remove one of the two",
            reason=Reason.FORBIDDEN,
        ),
    )


def _checkpoints_of(model: str, absent: str) -> tuple[Rule, ...]:
    """Return the rules of ``_source_of`` on the other checkpoints of a target or draft."""
    checkpoints = f"self.{model}.checkpoints"
    none = f"{absent}!has({checkpoints})"
    return (
        Rule(
            field=f"{model}.checkpoints",
            holds=f"{none} || {_HAS_VOLUME} || {checkpoints}.all(c, c.model.matches('{_HUB_ID}'))",
            message="a model in it is not a hub ID: write OWNER/NAME,"
            " or copy the folder to a volume and set models.volume",
        ),
        Rule(
            field=f"{model}.checkpoints",
            holds=f"{none} || !({_HAS_VOLUME}) || {checkpoints}.all(c,"
            f" !(c.model.matches('{_ABSOLUTE_OR_OPTION}') || c.model.matches('{_PARENT_FOLDER}')))",
            message="a model in it is no path inside models.volume:"
            " write it from the root of the volume, without leading / or - and without ..",
        ),
        Rule(
            field=f"{model}.checkpoints",
            holds=f"{none} || !({_HAS_VOLUME}) || !{checkpoints}.exists(c, has(c.revision))",
            message="nothing is downloaded when models.volume is given, so there is no revision to choose:"
            " remove one of the two",
            reason=Reason.FORBIDDEN,
        ),
    )


SOURCES = (
    *_source_of("target", absent=""),
    *_source_of("speculation.draft", absent=f"!({HAS_DRAFT}) || "),
    *_checkpoints_of("target", absent=""),
    *_checkpoints_of("speculation.draft", absent=f"!({HAS_DRAFT}) || "),
)
"""Rules of the whole spec."""

INSIDE_A_VOLUME = Rule(
    field="path",
    holds=r"!(self.path.matches('^/') || self.path.matches('(^|/)\\.\\.(/|$)'))",
    message="is %s, which is no path inside the volume: write it without leading / and without ..",
    values=("self.path",),
)
"""The rule on a file, or a folder, of a volume or a ConfigMap."""
