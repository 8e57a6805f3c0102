#!/bin/bash
# A run as a job on a Ray cluster that is already there. The job lives on when this terminal closes.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 examples/clusters/ray_job.sh algorithm.adv_estimator=grpo ...
#
# The current folder, with data and reward function, travels to the cluster; paths are relative to it. Large files and the run folder
# belong on storage that all nodes see. Stop it with `ray job stop ID`: the run ends its phase and saves.
set -euo pipefail
: "${RAY_API_SERVER_ADDRESS:?set RAY_API_SERVER_ADDRESS to the dashboard of the cluster, http://HEAD:8265}"
runtime_env=$(python -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("verl").origin).parent / "trainer" / "runtime_env.yaml")')

exec ray job submit --no-wait --runtime-env="$runtime_env" -- \
    python -m verl.trainer.main_ppo "$@" \
    ray_kwargs.ray_init.address=auto trainer.nnodes="${NNODES:-2}" trainer.n_gpus_per_node="${GPUS:-8}"
