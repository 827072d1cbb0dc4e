#!/bin/sh
# Trains on two nodes with four GPUs each: sbatch slurm.sh config/gpt2_124m.py --out_dir=/shared/runs/gpt2
# Slurm starts one torchrun per node, and torchrun one rank per GPU. Not tested: see docs/many_gpus.md.
#SBATCH --job-name=fitgpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --signal=TERM@120
# TERM comes 120 s before the time limit: the run saves and stops, and `--resume` continues it. torchrun waits 30 s for
# its ranks before it kills them.
set -eu
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=gpu --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HOST:29500" --max-restarts=3 -m fitgpt train "$@"
