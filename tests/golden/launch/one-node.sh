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
export DS_ENV_FILE=/workspace/runs/tiny-20260102-030405-abcd/deepspeed_env

exec deepspeed \
  --hostfile /workspace/runs/tiny-20260102-030405-abcd/hostfile \
  --master_addr node-1 \
  --master_port 29500 \
  --no_ssh \
  --node_rank 0 \
  --no_local_rank \
  --module tridock.train \
  --run-folder /workspace/runs/tiny-20260102-030405-abcd
