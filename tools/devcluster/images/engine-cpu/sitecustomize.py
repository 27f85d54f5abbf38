"""Imported by every Python process of the CPU engine at its start.

vLLM's imports create millions of objects that stay. Looking for garbage among them after every
700 (Python's default) takes a quarter of the import time, in each of the three processes of a start.
"""

import gc

gc.set_threshold(50_000, 50, 50)
