#!/usr/bin/env bash
# demo: 4 ranks on 1 node, TP1 PP1 DP4. Written by `tridock slurm`.
#SBATCH --job-name=demo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --partition=train
#SBATCH --time=2:00:00
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
printf '%s slots=4\n' "${nodes[@]}" >"$RUN/hostfile"

# What follows the -- starts all ranks. The supervisor watches them on every node.
# It queues the job again where the run has saved because its time was over, or has lost a node:
# the run then continues from its newest checkpoint.
# shellcheck disable=SC2016  # a task alone knows the number and the GPUs of its node
exec tridock slurm supervise --env=NCCL_DEBUG=INFO "$RUN" -- \
  srun --ntasks-per-node=4 --distribution=block --gpu-bind=none --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  --kill-on-bad-exit=0 \
  bash -c 'gpus=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-all}}}; exec docker run --gpus="\"device=$gpus\"" "$@"' docker \
  --rm --network=host --ipc=host --pid=host --user="$(id -u):$(id -g)" \
  --ulimit=memlock=-1 --ulimit=stack=67108864 \
  --volume="$WORKSPACE:$WORKSPACE" --volume=/data:/data --volume=/a:/b:ro --workdir="$RUN" \
  --env=SLURM_JOB_ID --env=SLURM_STEP_ID --env=SLURM_NODEID --env=SLURM_PROCID --env=SLURM_LOCALID \
  --env=SLURM_NTASKS --env=SLURM_STEP_TASKS_PER_NODE --env=MASTER_ADDR --env=MASTER_PORT --env=TRIDOCK_RUN_ID \
  --env=TRIDOCK_WORLD_SIZE --env=DEEPSPEED_TIMEOUT --env=NCCL_DEBUG \
  '--env=X=it'"'"'s' tridock:latest \
  python -u -m tridock.train --run-folder "$RUN"
