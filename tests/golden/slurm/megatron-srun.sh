#!/usr/bin/env bash
# gpt2-345m-3d: 16 ranks on 4 nodes, TP2 PP2 DP4. Written by `tridock slurm`.
#SBATCH --job-name=gpt2-345m-3d
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:v100:4
#SBATCH --mem=160G
#SBATCH --partition=train
#SBATCH --time=2:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/gpt2-345m-3d-20260102-030405-0001/logs/slurm-%j.out

set -Eeuo pipefail
trap '' USR1  # the supervisor answers it

WORKSPACE=/scratch/me
RUN="$WORKSPACE/runs/gpt2-345m-3d-20260102-030405-0001"

# The rendezvous is on the first node, at a port that no other job has.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$RUN/logs"
printf '%s slots=4\n' "${nodes[@]}" >"$RUN/hostfile"

# What follows the -- starts all ranks. The supervisor watches them on every node.
# It queues the job again where the run has saved because its time was over, or has lost a node:
# the run then continues from its newest checkpoint.
exec tridock slurm supervise "$RUN" -- \
  srun --ntasks-per-node=4 --distribution=block --gpu-bind=none --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  --kill-on-bad-exit=0 \
  python -u -m tridock.train.megatron_lm.pretrain_gpt2 --run-folder "$RUN" --num-layers 24 --hidden-size 1024 \
  --num-attention-heads 16 --seq-length 1024 --make-vocab-size-divisible-by 128 --hidden-dropout 0.1 \
  --attention-dropout 0.1 --init-method-std 0.02 --layernorm-epsilon 1e-05 --split 949,50,1 --lr 0.00015 \
  --min-lr 1e-05 --lr-decay-style cosine --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-08 \
  --clip-grad 1.0 --train-iters 320000 --log-interval 1 --eval-iters 10 --seed 1234 --max-position-embeddings 1024 \
  --checkpoint-activations --checkpoint-num-layers 1 --deepspeed-activation-checkpointing \
  --partition-activations --contigious-checkpointing --synchronize-each-layer --model-parallel-size 2 \
  --pipe-parallel-size 2 --batch-size 4 --gas 16 --data-path "$WORKSPACE/data/webtext/webtext_text_document" \
  --vocab-file "$WORKSPACE/data/gpt2-vocab.json" --merge-file "$WORKSPACE/data/gpt2-merges.txt" --data-impl mmap \
  --fp16 --loss-scale-window 1000 --hysteresis 2 --lr-decay-iters 320000 --warmup 0.01 --eval-interval 100 \
  --save "$RUN/checkpoints" --save-interval 500 --tensorboard-dir "$RUN/tensorboard" --deepspeed \
  --deepspeed_config "$RUN/ds_config.json" --zero-stage 1
