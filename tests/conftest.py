"""The hypothesis profile of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure, and each run draws the same examples. How many examples are filtered out does not
# depend on the machine, but a test that sets its own list would lose too_slow again.
settings.register_profile(
    "same everywhere",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("same everywhere")
