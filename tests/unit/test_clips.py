"""No message is shortened by a slice, which cuts secrets before they are masked: `redaction.clip` masks first."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OPERATOR: Final = Path(__file__).parents[2] / "operator"
SHORTEST: Final = 8
"""Characters below which a slice shows no part of a secret that matters."""

COUNTS: Final = re.compile(r"_?(?:MOST|SHOWN)(?:_\w+)?|_MAX_POSITIONS|_\w+_NAMED|LARGEST_K|_LAST|most")
"""Constants that count items of a list, not characters."""

NO_MESSAGES: Final = {
    # Digests and commits.
    "deployment/attestation/attest.py: digest(pods)[:16]",
    "cli/capture/fetch.py: file.sha256[:12]",
    "training/offers.py: self.sha256[:12]",
    "capture/recorder/head_orders.py: order.sha256[:12]",
    "capture/recorder/head_update.py: order.sha256[:12]",
    "cli/hub.py: digest[:40]",
    "cli/hub.py: commit[:12]",
    "cli/hub.py: str(last)[:12]",
    "deployment/models/model_locations.py: digest[:12]",
    "capture/report/capture_reader.py: _text(manifest.get('config_hash') or meta.config_hash)[:_HASH]",
    "deployment/models/model_facts.py: str(commit)[:64]",
    # Names of objects, files and certificates, which are of letters, digits and dashes.
    "handlers/certificate_renewal.py: hosts[0][:_LONGEST_COMMON_NAME]",
    "training/judge.py: name[:_LONGEST_NAME - len(digest) - 1]",
    "cli/capture/fetch.py: location.capture[:40]",
    "cli/deployment_options.py: name[:NAME_MAX_LENGTH]",
    "cli/capture/commands.py: deployment[:NAME_MAX_LENGTH - len(suffix)]",
    "cli/text_files.py: folder.name[:64]",
    "cli/text_files.py: target.name[:64]",
    "deployment/conditions.py: re.sub('[^A-Za-z0-9_,:]', '', update.reason)[:_REASON_LIMIT]",
    "deployment/rollout/rollout_gate.py: key.name[:_LONGEST_NAME]",
    "deployment/speculation_policy.py: status.arm[:_LONGEST_ARM]",
    "deployment/models/model_locations.py: re.sub('[^-._a-zA-Z0-9]+', '.', self.model)[-180:]",
    "importing/convert.py: old[:NAME_MAX_LENGTH - len(_SUFFIX)]",
    "importing/convert.py: re.sub('[^a-z0-9]+', '-', (old or model).lower())[:NAME_MAX_LENGTH]",
    "replay/server/serve.py: Request(scope).headers.get('x-request-id', '')[:_LONGEST_ID]",
    "deployment/models/model_facts.py: str(told['reason'])[:64]",  # compared with those that are known
    "deployment/models/checkpoint_reader.py: '.'.join(folder[:min(numbered, 3)])[:64]",
    "deployment/models/checkpoint_reader.py: dtype[:16]",
    # Numbers.
    "capture/comparison/golden_records.py: number[:9]",
    "capture/comparison/compare_arms.py: index[-9:]",
    "deployment/models/checkpoint_reader.py: words[numbered][:9]",
    "cluster/observed_figures.py: ' '.join((f'{value:.4g}' for _, value in ordered if math.isfinite(value)))[:256]",
    # Input that is parsed or compared, and not shown.
    "cluster/engine_probe.py: data[start:start + _PIECE_BYTES]",
    "cluster/packing.py: (_COMMON + text)[-_WINDOW_BYTES:]",
    "vllm/settings_watch.py: str(record.msg)[:_LOOKED_AT]",
    "replay/server/completion_requests.py: _TEXT[start * BYTES_PER_TOKEN:(start + end - begin) * BYTES_PER_TOKEN]",
    "deployment/models/model_facts.py: message[:MESSAGE_LIMIT_BYTES]",
    "deployment/models/checkpoint_reader.py: first[:_LENGTH_BYTES]",
    "deployment/models/checkpoint_reader.py: first[_LENGTH_BYTES:_LENGTH_BYTES + length]",
}
"""Slices that shorten no message."""

UNMASKED: Final = {
    "redaction.py",
    "deployment/pod_scripts/download_model.py: text[:limit]",
    "deployment/models/checkpoint_reader.py: text[:limit]",
    "capture/recorder/canary.py: printable[:LONGEST_REASON - 20]",
    "capture/recorder/canary.py: str(error)[:LONGEST_REASON]",
    "capture/recorder/head_metrics.py: printable[:LONGEST_REASON]",
    "capture/recorder/head_orders.py: reason[:LONGEST_REASON]",
}
"""The module that masks, and scripts that run without it and keep whole words (`tests/unit/deployment/models`),
or repeat vLLM's own error messages."""


def is_length(bound: ast.expr | None) -> bool:
    """Return whether a bound of a slice is a length of a text, as far as can be seen."""
    match bound:
        case ast.Constant(value=int(value)):
            return value >= SHORTEST
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return (name.isupper() or name in {"limit", "length_limit", "width"}) and not COUNTS.fullmatch(name)
        case ast.UnaryOp(operand=operand):
            return is_length(operand)
        case ast.BinOp(left=left, right=right):
            return is_length(left) or is_length(right)
    return False


def clips(code: str) -> Iterator[str]:
    """Return the places where code shortens what may be a text, without masking secrets."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(attr="hexdigest") | ast.Name(id="content_hash" | "sorted" | "tuple" | "list")
                )
            ):
                continue
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
                if is_length(upper) or (isinstance(lower, ast.UnaryOp) and is_length(lower)):
                    yield ast.unparse(node)
            case ast.FormattedValue(format_spec=ast.JoinedStr(values=[ast.Constant(value=str(spec))])):
                if re.fullmatch(r"(?:.?[<>^])?\d*\.\d+s?", spec):
                    yield ast.unparse(node)
            case ast.Attribute(attr="shorten") | ast.alias(name="shorten"):
                yield "textwrap.shorten"


def test_messages_are_shortened_only_by_clip() -> None:
    found = {
        f"{file.relative_to(OPERATOR)}: {clip}"
        for file in OPERATOR.rglob("*.py")
        for clip in clips(file.read_text(encoding="utf-8"))
        if str(file.relative_to(OPERATOR)) not in UNMASKED
    }
    fix = "use specdecode_operator.redaction.clip, or add the slice to NO_MESSAGES if it shortens no message"
    assert not found - NO_MESSAGES - UNMASKED, fix
    assert not NO_MESSAGES - found, "these are gone: remove them from NO_MESSAGES"


def test_slices_that_shorten_text_are_found() -> None:
    code = "a[:300]; b[-LIMIT:]; c[: limit - 1]; textwrap.shorten(d, 9); f'{e:.200}'; f'{f:>9.99s}'; g[:LONGEST // 3]"
    assert len([*clips(code)]) == 7
    assert not [*clips("a[:3]; b[:_MOST_NAMED]; c[1:]; f'{d:.2f}'; e[index]; f[: len(g)]; h[:-4]")]
