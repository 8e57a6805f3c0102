"""The config tree as Hydra composes it in programs of users; made by verl/compat/hydra_groups.py."""
