"""Rewards: scorers run in killable worker processes; a failing scorer costs its own sample, never the run.

`functions` loads the user's `compute_score`; `worker` is the process that calls it, in a `sandbox`; `outcome` checks what
it returns; `process` is the handle on one worker, with its `prints`, `pool` has several, and `debug` none; `managers`
convert requests to scores and shape them; `scorers` are built in; `check` scores the reference answers. Nothing here
imports torch, so that a worker starts quickly.
"""
