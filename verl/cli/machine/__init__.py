"""What `verl doctor` knows about a machine: host, Pythons and packages, accelerators; and what follows from it."""
