"""The engine never notices the recorder: not what it returns, not what it raises, not what the recorder does wrong."""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.capture.recorder.collector import TOO_MANY_ERRORS
from specdecode_operator.capture.recorder.hooks import Hooks
from tests.support.engine_standins import EngineCoreOutputs, SamplingParams, chunk, engine_classes, last_chunk
from tests.unit.capture.conftest import Recorder

METHODS = ("add_request", "process_outputs", "abort_requests")


async def test_strange_objects_do_no_harm(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    server.add("b")
    strange = SimpleNamespace(request_id="b", new_token_ids=[1], finish_reason=None)
    await server.deliver(EngineCoreOutputs(0, [strange], None, 1.0))  # type: ignore[list-item]
    server.add("c", sampling_params=SamplingParams(stop=3))  # type: ignore[arg-type]
    await server.step(last_chunk("a", 2))
    record = recorder.requests()["a"]
    assert record.chunk_tokens == [2]
    closed = recorder.lines()[-1]
    assert (closed.errors, closed.dropped) == (2, 2)
    assert closed.first_error == "AttributeError: 'types.SimpleNamespace' object has no attribute 'events'"


async def test_strange_answers_of_the_engine_do_no_harm(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.hooks.remove()
    processor = type(recorder.server.processor)
    monkeypatch.setattr(processor, "process_outputs", lambda *_: "no output")
    monkeypatch.setattr(processor, "abort_requests", lambda *_, **__: None)
    Hooks(_classes_of(recorder), recorder.collector).install()
    assert recorder.server.processor.process_outputs([], None, None) == "no output"
    assert recorder.server.processor.abort_requests(["a"], internal=True) is None
    assert recorder.collector.errors == 2


def _classes_of(recorder: Recorder) -> Any:
    return replace(
        engine_classes(), output_processor=type(recorder.server.processor), client=type(recorder.server.client)
    )


async def test_after_many_errors_the_recorder_turns_itself_off(recorder: Recorder) -> None:
    recorder.server.add("a")
    for _ in range(TOO_MANY_ERRORS):
        await recorder.server.deliver(SimpleNamespace(outputs=[], timestamp=1.0))
    await recorder.server.step(last_chunk("a"))
    recorder.writer.turn()
    *_, off, closed = recorder.lines()
    assert "the hooks failed: AttributeError" in off.reason
    assert (closed.reason, closed.errors, closed.unfinished) == ("unknown_shape", TOO_MANY_ERRORS, 1)
    assert closed.dropped > TOO_MANY_ERRORS
    assert recorder.writer.is_closed


async def test_errors_of_the_engine_pass_and_are_not_ours(recorder: Recorder) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        recorder.server.processor.add_request(
            type("Request", (), {"request_id": [], "sampling_params": None, "prompt_token_ids": []})(), None
        )
    recorder.hooks.remove()
    client = type(recorder.server.client)

    async def dead(_: Any) -> None:
        raise ConnectionError("engine is dead")

    client.get_output_async = dead
    Hooks(_classes_of(recorder), recorder.collector).install()
    with pytest.raises(ConnectionError, match="dead"):
        await recorder.server.client.get_output_async()
    assert recorder.collector.errors == 0


async def test_arguments_and_results_are_untouched(recorder: Recorder) -> None:
    processor = recorder.server.processor
    recorder.server.add("a")
    outputs = [last_chunk("a")]
    result = processor.process_outputs(
        engine_core_outputs=outputs, engine_core_timestamp=1.0, iteration_stats=None, weight_version="v"
    )
    assert result.reqs_to_abort == []
    recorder.server.add("b")
    assert processor.abort_requests(request_ids=["b", "c"], internal=False) == ["b"]


async def test_hooks_look_like_the_originals(recorder: Recorder) -> None:
    processor, client = type(recorder.server.processor), type(recorder.server.client)
    signatures = [inspect.signature(getattr(processor, name)) for name in METHODS]
    assert inspect.iscoroutinefunction(client.get_output_async)
    recorder.hooks.remove()
    assert signatures == [inspect.signature(getattr(processor, name)) for name in METHODS]
    assert not any(hasattr(getattr(processor, name), "__wrapped__") for name in METHODS)
    assert not hasattr(client.get_output_async, "__wrapped__")


async def test_message_that_was_waited_for_while_hooks_were_removed(recorder: Recorder) -> None:
    server = recorder.server
    server.add("a")
    await server.step(chunk("a"))
    recorder.writer.close("ordered")
    recorder.hooks.remove()
    await server.step(last_chunk("a"))
    assert recorder.lines("request")[0].chunk_tokens == [1]
