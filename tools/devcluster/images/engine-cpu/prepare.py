"""Run once in a fresh environment, by the image's own Python: does now what every start would repeat.

Compiles all modules, and asks vLLM about the model classes that the examples use. The environment is
mounted read-only afterwards.
"""

import compileall
import os
import py_compile
import sys
from pathlib import Path

ENVIRONMENT = sys.argv[1]
MODEL_CLASSES = ("LlamaForCausalLM",)

# Few files of torch's tests are for a newer Python; that they do not compile harms nobody.
compileall.compile_dir(
    ENVIRONMENT,
    quiet=2,
    workers=0,
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
)

CACHE = Path(ENVIRONMENT) / "vllm-cache"
os.environ["VLLM_CACHE_ROOT"] = str(CACHE)

from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402

for name in MODEL_CLASSES:
    ModelRegistry.models[name].inspect_model_cls()

# vLLM writes them for their owner only; the engine runs as another user.
for answer in (CACHE / "modelinfos").iterdir():
    answer.chmod(0o644)
