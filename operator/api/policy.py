"""What the operator may do about speculation by itself, and what its status says of that."""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel, ObjectName
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.policy.decision import Action, Mode, Outcome
from specdecode_operator.problems import printable

MOST_DECISIONS: Final = 8
MOST_RESTARTS: Final = 24

_Name = Annotated[str, StringConstraints(max_length=253), AfterValidator(printable)]
_Text = Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)]
_Decimal = Annotated[str, StringConstraints(max_length=32), AfterValidator(printable)]
_Moment = Annotated[
    str,
    StringConstraints(max_length=64),
    Field(json_schema_extra={"format": "date-time"}),
]


class AcceptanceRule(StrEnum):
    """Public rules that speculation below an acceptance be turned off; they contradict each other."""

    BELOW_40_PERCENT = "Below40Percent"
    BELOW_50_PERCENT = "Below50Percent"
    BELOW_65_PERCENT = "Below65Percent"
    BELOW_80_PERCENT = "Below80Percent"

    @property
    def acceptance(self) -> float:
        """The acceptance, as a share."""
        return int(self.value.removeprefix("Below").removesuffix("Percent")) / 100


class Policy(ApiModel):
    """What is done about speculation by the goodput that a capture measured, and the load now."""

    mode: Mode = Mode.OBSERVE
    """Observe: say in the status what would be done. Advise: as a condition and in Events, too. Enforce: do it; the
    spec stays as it is, and status.policy says what is in force in the place of spec.speculation."""

    paused: StrictBool = False
    """Change nothing more until it is false again; what is in force stays."""

    evidence: ObjectName | None = None
    """SpecDecodeCapture of this namespace whose arms may be chosen. Absent: the newest of this deployment that compared
    arms."""

    min_gain_percent: StrictInt = Field(default=3, ge=1, le=100)
    """Goodput that another setting must bring more, in percent."""

    window_seconds: StrictInt = Field(default=900, ge=30, le=7200)
    """How long the load is looked at."""

    cooldown_seconds: StrictInt = Field(default=1800, ge=30, le=86_400)
    """How long nothing more is done after something was; before a setting is taken again that was left last, twice as
    long."""

    max_restarts_per_day: StrictInt = Field(default=6, ge=1, le=MOST_RESTARTS)
    """How often in 24 hours engines may be started anew: a change of all of them counts once."""

    acceptance_rule: AcceptanceRule | None = None
    """A public rule to advise by where no capture compared arms, never to act by: acceptance says little about goodput,
    and nothing with adaptiveVerification."""


class PolicyDecision(ApiModel):
    """Something that was advised or done."""

    at: _Moment
    """When, RFC 3339."""

    action: Action
    """What."""

    outcome: Outcome
    """What became of it."""

    target: _Name | None = None
    """The arm that was changed to, or the pod that was started anew."""

    message: _Text
    """Why, with the figures."""


class PolicyStatus(ApiModel):
    """What the policy does, and what it must remember."""

    mode: Mode
    """As the spec has it."""

    action: Action
    """What is best now: Keep, Change, TurnOff, TryAgain or Restart."""

    outcome: Outcome
    """What comes of it: Kept, Observed, Advised, Done, or what holds it back: Paused, CoolingDown,
    BudgetSpent, Refused."""

    reason: Annotated[str, StringConstraints(max_length=64)]
    """One CamelCase word for programs."""

    message: _Text
    """The same in a sentence with its figures."""

    target: _Name | None = None
    """The arm that would be changed to, or the pod that would be started anew."""

    evidence: _Name | None = None
    """The capture that it rests on."""

    arm: _Name | None = None
    """The arm in force, by its name there."""

    since: _Moment | None = None
    """Since when it is, by the policy; absent where it is what the spec says."""

    speculation: Speculation | None = None
    """What is in force in the place of spec.speculation; absent where that is."""

    asked: _Name | None = None
    """What tells the spec that this was decided for: another one begins anew."""

    left: _Name | None = None
    """The arm that was in force before."""

    acceptance_factor: _Decimal | None = None
    """Acceptance over what was measured when speculation was turned off, as a decimal."""

    tried_in_vain: StrictBool = False
    """Whether speculation was tried again since and turned off again."""

    failed_arms: list[_Name] = Field(default=[], max_length=8)
    """Arms whose engines never served here, as NAME@DIGEST of their speculation, the newest last: none of them is
    taken again for this spec, by whatever name. An arm that was changed is another one."""

    restarts: list[_Moment] = Field(default=[], max_length=MOST_RESTARTS)
    """When engines were started anew in the last 24 hours."""

    decisions: list[PolicyDecision] = Field(default=[], max_length=MOST_DECISIONS)
    """What was advised or done last, newest first."""
