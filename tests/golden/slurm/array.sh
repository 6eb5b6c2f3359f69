#!/usr/bin/env bash
# 7.5b: 3 runs, each of 16 ranks on 4 nodes, TP4 PP4 DP1. Written by `tridock slurm`.
#SBATCH --job-name=7.5b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --hint=nomultithread
#SBATCH --gres=gpu:4
#SBATCH --account=abc@v100
#SBATCH --qos=qos_gpu-t3
#SBATCH --constraint=v100-32g
#SBATCH --time=6:00:00
#SBATCH --array=0-2%2
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/slurm-%A_%a.out

set -Eeuo pipefail
trap '' USR1  # the supervisor answers it
module purge

WORKSPACE=/scratch/me
runs=(
  7.5b-20260102-030405-0001
  7.5b-20260102-030405-0002
  7.5b-20260102-030405-0003
)
RUN="$WORKSPACE/runs/${runs[SLURM_ARRAY_TASK_ID]}"
mapfile -t program <"$RUN/program"

# The rendezvous is on the first node, at a port that no other job has.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$RUN/logs"
printf '%s slots=4\n' "${nodes[@]}" >"$RUN/hostfile"

# What follows the -- starts all ranks. The supervisor watches them on every node.
# It queues the job again where the run has saved because its time was over, or has lost a node:
# the run then continues from its newest checkpoint.
# shellcheck disable=SC2016  # a task alone knows the number and the GPUs of its node
exec tridock slurm supervise "$RUN" -- \
  srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \
  bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' torchrun \
  --nnodes=4 --nproc-per-node=4 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  -m "${program[@]}"
