#!/usr/bin/env bash
# Run tiny-20260102-030405-abcd: what the head executes. Started by Tridock, which records its exit code.
set -Eeuo pipefail

trap '' USR1
cd /workspace/runs/tiny-20260102-030405-abcd
export DEEPSPEED_TIMEOUT=10080
export NCCL_DEBUG=INFO
export GREETING='it'"'"'s two words'
export TRIDOCK_RUN_ID=tiny-20260102-030405-abcd
export TRIDOCK_WORLD_SIZE=4

exec python \
  -m tridock.node start-ranks \
  --nnodes 1 \
  --node-rank 0 \
  --nproc-per-node 4 \
  --master-addr node-1 \
  --master-port 29500 \
  --module tridock.train \
  --run-folder /workspace/runs/tiny-20260102-030405-abcd
