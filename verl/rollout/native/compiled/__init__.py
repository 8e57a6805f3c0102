"""Decoding on the processor by compiled kernels; everything here is optional, and torch computes where they are missing."""
