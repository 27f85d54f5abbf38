"""A pytest plugin under which tests see nothing that was computed before: neither caches nor values of test modules.

mutmut runs each mutant in a copy of a process that ran all tests. What a
function returned there, before it was changed, would still be in use.
"""

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import modules of tests anew, and empty the caches of all others of this project."""
    for name, module in list(sys.modules.items()):
        match name.partition(".")[0]:
            case "tests":
                del sys.modules[name]
            case "specdecode_operator" | "bench" | "devcluster":
                for cached in [each for each in vars(module).values() if hasattr(each, "cache_clear")]:
                    if not isinstance(cached, type):
                        cached.cache_clear()
