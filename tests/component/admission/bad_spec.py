"""A spec that the API server refuses, and the parts that many of them have."""

from dataclasses import dataclass

VOLUME = "{persistentVolumeClaim: {claimName: models}}"


@dataclass(frozen=True)
class Bad:
    """A spec without target, the field that the answer must name, and the fix that it must offer."""

    spec: str
    field: str
    fix: str


def speculation(rest: str) -> str:
    """Spec with method draft_model and more."""
    return f"speculation: {{method: draft_model, draft: {{model: org/draft}}, {rest}}}"
