"""Reads an exported capture with the reader of a tool, in the tool's own environment, and prints what it found.

    python -m read_exports TOOL FILE BLOCK_TOKENS TOKENIZER

Of each request of a load, that is [time, prompt tokens, output tokens, the reader's own prompt]; of training data, the
rows after speculators' own preprocessing.
"""

import json
import os
import sys
from pathlib import Path


def vllm_bench(file: Path, block_tokens: int, tokenizer: str) -> list[object]:
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets.datasets import TimedTrace, add_dataset_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    arguments = parser.parse_args(
        [
            "--dataset-name=timed_trace",
            f"--dataset-path={file}",
            f"--timed-trace-chunk-hash-size={block_tokens}",
        ]
    )
    trace = TimedTrace(**vars(arguments))
    requests = trace.sample(tokenizer=AutoTokenizer.from_pretrained(tokenizer), num_requests=10**6)
    return [[each.timestamp, each.prompt_len, each.expected_output_len, each.prompt] for each in requests]


def guidellm(file: Path, block_tokens: int, tokenizer: str) -> list[object]:
    from guidellm.data.deserializers import DatasetDeserializerFactory
    from guidellm.schemas.data.deserializers import FileDataArgs, MooncakeTraceFormatArgs
    from transformers import AutoTokenizer

    trace = MooncakeTraceFormatArgs(source=FileDataArgs(kind="json_file", path=file), hash_id_block_size=block_tokens)
    found = DatasetDeserializerFactory.deserialize(
        config=trace, processor_factory=lambda: AutoTokenizer.from_pretrained(tokenizer), random_seed=1
    )
    turns = [json.loads(each["conversation_turns"])["turns"] for each in found]
    columns = [only["columns"] for (only,) in turns]
    names = ("relative_timestamp_column", "prompt_tokens_count_column", "output_tokens_count_column", "text_column")
    return [[each[name][0] for name in names] for each in columns]


def aiperf(file: Path, block_tokens: int, tokenizer: str) -> list[object]:
    # Offline, aiperf asks the cache of the hub even for a folder.
    os.environ.pop("HF_HUB_OFFLINE")
    from aiperf.common import random_generator
    from aiperf.common.tokenizer import Tokenizer
    from aiperf.dataset.generator.prompt import PromptGenerator
    from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader

    random_generator.init(1)
    generator = PromptGenerator(
        prompts=None, prefix_prompts=None, tokenizer=Tokenizer.from_pretrained(tokenizer, resolve_alias=False)
    )
    first = json.loads(file.read_text().partition("\n")[0])
    assert MooncakeTraceDatasetLoader.can_load(first)
    loader = MooncakeTraceDatasetLoader(filename=file, prompt_generator=generator, default_block_size=block_tokens)
    traces = [only for (only,) in loader.load_dataset().values()]
    prompts = [generator._build_token_sequence(each.input_length, each.hash_ids, block_tokens) for each in traces]
    return [
        [each.timestamp, len(prompt), each.output_length, prompt, each.extra]
        for each, prompt in zip(traces, prompts, strict=True)
    ]


def speculators(file: Path, _block_tokens: int, tokenizer: str) -> list[object]:
    from speculators.data_generation.preprocessing import build_speculator_training_dataset, load_raw_dataset
    from transformers import AutoTokenizer

    raw, _ = load_raw_dataset(str(file))
    rows = build_speculator_training_dataset(raw, AutoTokenizer.from_pretrained(tokenizer), num_proc=1)
    return [{name: each[name].tolist() for name in ("input_ids", "loss_mask")} for each in rows]


if __name__ == "__main__":
    tool, path, block, model = sys.argv[1:]
    found = globals()[tool](Path(path), int(block), model)
    sys.stdout.write(f"\n{json.dumps(found)}\n")
