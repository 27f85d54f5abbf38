"""What all tests share: how properties are tried."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure, and a run finds what every other run finds.
settings.register_profile(
    "same everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")
