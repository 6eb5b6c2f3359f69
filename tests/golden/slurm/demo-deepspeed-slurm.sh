#!/usr/bin/env bash
# demo: 4 ranks on 2 nodes, TP1 PP1 DP4. Written by `tridock slurm`.
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/demo-20260102-030405-0001/logs/slurm-%j.out

set -Eeuo pipefail
trap '' USR1  # the supervisor answers it

WORKSPACE=/scratch/me
RUN="$WORKSPACE/runs/demo-20260102-030405-0001"

# The rendezvous is on the first node, at a port that no other job has.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$RUN/logs"
printf '%s slots=2\n' "${nodes[@]}" >"$RUN/hostfile"

# What follows the -- starts all ranks. The supervisor watches them on every node.
# It queues the job again where the run has saved because its time was over, or has lost a node:
# the run then continues from its newest checkpoint.
exec tridock slurm supervise "$RUN" -- \
  deepspeed --hostfile="$RUN/hostfile" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
  --launcher=slurm --no_ssh_check \
  --launcher_args="--ntasks-per-node=2 --distribution=block --kill-on-bad-exit=0 --cpus-per-task=$SLURM_CPUS_PER_TASK" \
  -- -m tridock.train --run-folder "$RUN"
