#!/usr/bin/env bash
# Run a command on a GPU that no other command started this way has, once there is one.
#   benchmarks/on_a_gpu.sh python benchmarks/plan.py --checkpoints checkpoints
set -euo pipefail
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)} || gpus=
[[ $gpus ]] || { echo "no NVIDIA GPU: nvidia-smi isn't there or lists none, or CUDA_VISIBLE_DEVICES is empty" >&2; exit 1; }
while true; do
  for gpu in ${gpus//,/ }; do
    exec 9> "${TMPDIR:-/tmp}/pronghorn-gpu-$gpu.lock" # the command and what it starts inherit the lock with the file
    if flock --nonblock 9; then
      CUDA_VISIBLE_DEVICES=$gpu exec "$@"
    fi
  done
  sleep 1
done
