"""What is attested of a rollout: an in-toto statement with a predicate of ours.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from typing import Any, Final

import msgspec

from specdecode_operator.attestation.envelope import UnverifiedError
from specdecode_operator.attestation.pods import Pods

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://specdecode.io/attestations/rollout/v1alpha1"


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """A part of the statement."""


class Subject(_Told, frozen=True):
    """What the statement is about, by its digest."""

    name: str
    digest: dict[str, str]


class AttestedObject(_Told, frozen=True):
    """The SpecDecodeDeployment."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec_sha256: str


class Memory(_Told, frozen=True):
    """What the engines report of their KV cache."""

    predicted_tokens: int
    reported_tokens: int | None = None
    residual_bytes: int | None = None
    """On one GPU, predicted less reported."""


class Image(_Told, frozen=True):
    """An image as the kubelet runs it."""

    container: str
    digest: str
    """sha256:…"""


class Verdict(_Told, frozen=True):
    """What the newest comparison of the deployment came to."""

    capture: str
    uid: str
    status: str
    """Of the condition Pays."""

    reason: str
    message: str


class Served(_Told, frozen=True):
    """What there is to say once every engine of the template serves."""

    engines: int
    engine_version: str | None
    kv_cache: Memory
    images: tuple[Image, ...]
    verdict: Verdict | None = None


class Rollout(_Told, frozen=True):
    """The predicate."""

    made_at: str
    """RFC 3339."""

    operator_version: str
    object: AttestedObject
    plan: dict[str, Any]
    """As status.plan of that generation has it."""

    pods: tuple[Pods, ...]
    """Of each template of the workload: the leader's first where there are two."""

    served: Served | None = None
    """Absent until all engines serve: then only the plan is attested."""

    @property
    def age(self) -> tuple[int, str]:
        """By which rollouts of one object are sorted, the newest last."""
        return self.object.generation, self.made_at


class Statement(_Told, frozen=True):
    """An in-toto statement."""

    type: str = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: str
    predicate: Rollout


def statement_of(rollout: Rollout) -> Statement:
    """Return the statement that is made of a rollout: its subjects are templates of pods, and images."""
    place = f"{rollout.object.namespace}/{rollout.object.name}"
    pods = [Subject(f"{place}/pods/{number}", {"sha256": each.sha256}) for number, each in enumerate(rollout.pods)]
    images = {each.digest: each for each in (rollout.served.images if rollout.served else ())}
    named = [Subject(f"{place}/images/{each.container}", _digest(each)) for each in images.values()]
    return Statement(STATEMENT_TYPE, (*pods, *named), PREDICATE_TYPE, rollout)


def statement_text(statement: Statement) -> bytes:
    """Return the text that is signed."""
    return msgspec.json.encode(statement, order="sorted")


def read_statement(payload: bytes) -> Statement:
    """Return the statement of a payload whose signature holds.

    Raises
    ------
    UnverifiedError
        When it speaks of something else, or says of one thing two.
    """
    try:
        statement = msgspec.json.decode(payload, type=Statement)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UnverifiedError(f"is no statement of a rollout that this version reads: {error}") from error
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise UnverifiedError(f"is a statement of another kind: {PREDICATE_TYPE} is meant")
    if statement != statement_of(statement.predicate):
        raise UnverifiedError("its subjects are not those of its predicate")
    return statement


def _digest(image: Image) -> dict[str, str]:
    algorithm, _, value = image.digest.partition(":")
    return {algorithm: value}
