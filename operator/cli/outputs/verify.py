"""What `verify` prints."""

from typing import Any

from specdecode_operator.cli.outputs.base import Output


class AttestationOutput(Output):
    """One attestation of a rollout."""

    place: str
    """The file, and the entry in its ConfigMap."""
    problem: str | None
    """Why it does not hold; null where it does."""
    rollout: dict[str, Any] | None
    """The predicate, as it was signed; null where it does not hold."""


class DifferenceOutput(Output):
    """A field that is not as attested."""

    field: str
    """Path in the object, or of which container."""
    attested: Any
    """Null where nothing is."""
    found: Any
    """Null where there is nothing."""


class ComparedOutput(Output):
    """One object that was held against the attestations."""

    kind: str
    name: str
    """With its namespace."""
    looked_at: str
    """What of it is attested and was compared."""
    differences: list[DifferenceOutput]
    """Empty where it is as attested."""


class VerifyOutput(Output):
    """What a third party finds out."""

    verified: bool
    """Whether all of it holds."""
    attestations: list[AttestationOutput]
    """All that the argument names."""
    several_objects: bool
    """Whether they are of several SpecDecodeDeployments: nothing is compared then."""
    objects: list[ComparedOutput]
    """Those of the files that an attestation says something of."""
    not_looked_at: list[str]
    """Kinds that no file has."""
