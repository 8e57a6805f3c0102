"""Rewards: scorers run in killable worker processes; a bad scorer costs its own sample, never the run.

`functions` finds the user's `compute_score`; `worker` is the process that runs it; `pool` keeps the processes;
`managers` turn requests into scores and shape them; `scorers` are the built-in ones; `check` runs them on the
reference answers. Nothing here imports torch, so that a worker starts in a few hundredths of a second.
"""
