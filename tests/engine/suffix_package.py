"""Where the package for suffix decoding is, which vLLM's environment does not have, and how it gets there.

    .venv/bin/python -m tests.engine.suffix_package

Snowflake's arctic-inference comes as source only: it is built here, with a torch of its own that is downloaded for
that (3 GB, once).
"""

from tests.engine.engine_process import Engine
from tests.engine.side_package import SidePackage

SOURCE_SHA256 = "36857e2fbe3ead34821a04be98dfab95086050c1e38199c8fdfe308234fdcf63"
PACKAGE = SidePackage(
    "suffix",
    # The version that vLLM 0.32 asks for (vllm/config/speculative.py, SpeculativeConfig._validate_suffix_decoding)
    f"arctic-inference==0.1.1 --hash=sha256:{SOURCE_SHA256}",
    "building arctic-inference (two minutes; downloads a torch to build with)",
)


def with_suffix(engine: Engine) -> Engine:
    """Return the same beside the package of suffix decoding; where that is not built, it has nothing to say of it."""
    package = PACKAGE.find()
    return engine.beside(*engine.more, package) if package else engine


if __name__ == "__main__":
    PACKAGE.install()
