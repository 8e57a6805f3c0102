"""The program of PPO and its critic-free kin."""
