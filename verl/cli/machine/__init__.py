"""Facts about a machine and its packages, and findings from them, for `verl doctor` and `verl check`."""
