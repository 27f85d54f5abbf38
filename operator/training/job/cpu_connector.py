"""Connector that writes hidden states on a CPU, without CUDA streams.

vLLM loads it through `kv_connector_module_path`.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as of_vllm


class _Done:
    """Completed event, because copies on a CPU are synchronous."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuHiddenStatesConnector(of_vllm.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Connector of vLLM with copies on the CPU."""

    def _submit_async_write(self, pending: of_vllm.PendingSave) -> None:
        first = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        tokens = pending.token_ids.clone()
        states = of_vllm.extract_from_kv_cache(self._kv_cache, slots, tokens.shape[0]).clone().contiguous()
        lock = self._lock_fds.pop(pending.req_id, None)
        done = _Done()
        self._req_copy_events[pending.req_id] = done
        tensors = {"hidden_states": states, "token_ids": tokens}
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda ended, request=pending.req_id: self._on_write_done(request, ended))
