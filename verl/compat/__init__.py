"""Code for scripts of other verl releases: their import paths, commands and functions.

The import paths (`verl.utils.fs`, `verl.trainer.ppo.reward`, ...) are rows of verl/compat/import_paths.py.
"""
