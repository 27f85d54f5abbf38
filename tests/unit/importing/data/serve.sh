#!/usr/bin/env bash
# How our team starts it on the machine in the corner.
set -euo pipefail
export NCCL_DEBUG=WARN
MODEL=meta-llama/Llama-3.1-70B-Instruct

exec vllm serve "$MODEL" \
  --tensor-parallel-size 4 \
  --max-model-len 16384 \
  --speculative-config '{"model": "meta-llama/Llama-3.1-8B-Instruct", "num_speculative_tokens": 4}' \
  --gpu-memory-utilization 0.9 \
  --enable-prefix-caching
