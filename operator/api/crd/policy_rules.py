"""What must hold of a policy. ``api/crd/deployment_rules.py`` says what rules are."""

from specdecode_operator.api.crd.cel import Rule

POLICY = (
    Rule(
        field="cooldownSeconds",
        # Their defaults are there as soon as a policy is.
        holds="self.cooldownSeconds >= self.windowSeconds",
        message="is %d, less than windowSeconds, in which the engines have to be seen after each change:"
        " write %d or more, or lower windowSeconds",
        values=("self.cooldownSeconds", "self.windowSeconds"),
    ),
)
