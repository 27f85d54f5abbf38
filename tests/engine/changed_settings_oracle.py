"""Prints the /metrics page of a process that has made vLLM's configuration of each list of arguments in a file."""

import json
import sys
from pathlib import Path

import engine_oracle
from prometheus_client import generate_latest

for argv in json.loads(Path(sys.argv[1]).read_text()):
    engine_oracle.engine_config(argv)
sys.stdout.write(f"PAGE\n{generate_latest().decode()}")
