"""The code behind the names that recipes of existing releases import, where no module of ours does the same already.

The import paths themselves (`verl.utils.fs`, `verl.trainer.ppo.reward`, ...) only import from here or from our modules.
"""
