#!/bin/sh
# Trains on two machines: run this on both. HOST is the name of one of them, which the other can reach.
#   HOST=node-0 sh two_nodes.sh config/gpt2_124m.py --out_dir=/shared/runs/gpt2
# Not tested on two machines: see docs/many_gpus.md.
set -eu
: "${HOST:?the name or address of the first machine}"
# The network between the machines, if they have several:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
exec torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-backend=c10d --rdzv-id="${RUN_ID:-fitgpt}" \
    --rdzv-endpoint="$HOST:29500" --max-restarts=3 -m fitgpt train "$@"
