"""The options of `advise`."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import offered
from specdecode_operator.payoff.acceptance import LARGEST_K

Capture = Annotated[
    Path | None,
    typer.Argument(help="A capture's folder: its K, its acceptance, and how long its steps took.", show_default=False),
]
Baseline = Annotated[
    Path | None,
    typer.Option("--baseline", help="A capture without speculation: how long the target's steps take, by requests."),
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="FILE", help="An engine's /metrics, saved: acceptance since its start."),
]
ByPosition = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="SHARES",
        help="Share of drafts accepted up to each position, as vLLM counts them: 0.8,0.6,0.4. They do not rise.",
    ),
]
Conditional = Annotated[
    str | None,
    typer.Option(
        "--conditional-acceptance",
        metavar="SHARES",
        help="The same, each of the drafts whose earlier tokens were all accepted: 0.8,0.75,0.67.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option("--acceptance-rate", help="Accepted over drafted tokens at K, where positions are not known."),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-K",
        min=1,
        max=LARGEST_K,
        show_default=False,
        help="K: tokens proposed a step. Absent: as many as there are positions.",
    ),
]
TargetStep = Annotated[
    str | None,
    typer.Option(
        "--target-step-ms",
        metavar="MS",
        help="A step of the target with a token for each request; or by tokens in it: 1:20,64:24,512:60.",
    ),
]
VerifyStep = Annotated[
    float | None,
    typer.Option(
        "--verify-step-ms",
        help="A step of the target with K + 1 tokens for each of the first --batch, without drafting.",
    ),
]
DraftStep = Annotated[
    str | None,
    typer.Option("--draft-step-ms", metavar="MS", help="One pass of the draft, likewise. Absent: 0, as with ngram."),
]
ParallelDrafting = Annotated[
    bool, typer.Option("--parallel-drafting", help="The draft proposes all K tokens in one pass.")
]
TargetContext = Annotated[
    float, typer.Option("--target-context-ms", help="What 1,000 tokens of KV cache add to a step of the target.")
]
DraftContext = Annotated[float, typer.Option("--draft-context-ms", help="What they add to a pass of the draft.")]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch", metavar="REQUESTS", help="Requests that decode at once; several: 1,8,32. Absent: as captured, or 1."
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="TOKENS", help="Tokens of each of them; several: 2000,32000.")
]
KvTokens = Annotated[
    int | None,
    typer.Option("--kv-tokens", min=1, help="Tokens that the KV cache holds beside the draft, as plan says."),
]
KvTokensAlone = Annotated[
    int | None, typer.Option("--kv-tokens-alone", min=1, help="Tokens that it holds without speculation.")
]
SizeRatio = Annotated[
    float | None,
    typer.Option("--size-ratio", help="Bytes of the draft's weights over those of the target's, for MBSU."),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        autocompletion=offered.methods,
        help="Who proposes tokens, for the prefix-cache tax and for schedules of K. Absent: as captured.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        min=1,
        max=1_048_576,
        show_default=False,
        help="Tokens in a block of the KV cache. Absent: as captured, or 16.",
    ),
]
MtpLayers = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="Layers of the target that predict further tokens (num_nextn_predict_layers), for the tax of method mtp.",
    ),
]
SharedPrefix = Annotated[
    int | None,
    typer.Option("--shared-prefix", min=1, max=2**31, help="Tokens with which prompts begin alike, with --method."),
]
