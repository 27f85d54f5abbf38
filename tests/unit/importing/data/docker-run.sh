docker run -d --name llama-chat --restart unless-stopped \
  --gpus '"device=0,1"' --runtime nvidia \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e NCCL_P2P_LEVEL=NVL --env "HF_TOKEN=$HF_TOKEN" \
  -p 8080:8000 --shm-size 16g --ipc=host --ulimit memlock=-1 \
  vllm/vllm-openai:v0.33.0 \
  --model meta-llama/Llama-3.1-8B-Instruct \
  -tp 2 --max-model-len=8192 --served-model-name chat
