"""Data sets that `verl.data.prepare` makes, one file each."""
