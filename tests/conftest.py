"""The hypothesis profile of all tests, their YAML parser and their garbage collection."""

import gc

import yaml
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

# `yaml.safe_load` reads CRDs and examples eight times as fast with libyaml. This also affects the Kubernetes client,
# which parses kubeconfigs with `yaml.SafeLoader`, but not the operator's own loaders.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Modules and collected tests are no garbage, and each full collection would look at all of them.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, except what is there."""
    gc.freeze()
    gc.enable()
