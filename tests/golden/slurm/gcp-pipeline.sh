#!/usr/bin/env bash
# gpt-xl-pipeline: 32 ranks on 4 nodes, TP1 PP2 DP16. Written by `tridock slurm`.
#SBATCH --job-name=gpt-xl-pipeline
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --partition=train
#SBATCH --time=5:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/gpt-xl-pipeline-20260102-030405-0001/logs/slurm-%j.out

set -Eeuo pipefail
trap '' USR1  # the supervisor answers it

WORKSPACE=/scratch/me
RUN="$WORKSPACE/runs/gpt-xl-pipeline-20260102-030405-0001"

# The rendezvous is on the first node, at a port that no other job has.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$RUN/logs"
printf '%s slots=8\n' "${nodes[@]}" >"$RUN/hostfile"

# What follows the -- starts all ranks. The supervisor watches them on every node.
# It queues the job again where the run has saved because its time was over, or has lost a node:
# the run then continues from its newest checkpoint.
# shellcheck disable=SC2016  # a task alone knows the number and the GPUs of its node
exec tridock slurm supervise "$RUN" -- \
  srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \
  bash -c 'exec env ${CUDA_VISIBLE_DEVICES+TRIDOCK_DEVICES=$CUDA_VISIBLE_DEVICES} deepspeed --node_rank="$SLURM_NODEID" "$@"' deepspeed \
  --hostfile="$RUN/hostfile" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --no_ssh \
  --no_local_rank --module tridock.train.megatron_core.pretrain_gpt --run-folder "$RUN"
