"""Imported by every Python process of the CPU engine at its start.

vLLM's imports create millions of objects that stay. Looking for garbage among them after every
700 (Python's default) takes a quarter of the import time.
"""

import gc
import os
import sys

gc.set_threshold(50_000, 50, 50)

if {"vllm.entrypoints.cli.main", "serve"} <= set(sys.orig_argv) and "SPECDECODE_PLAIN_ENGINE" not in os.environ:
    gc.disable()
    import light_engine

    light_engine.prepare()
