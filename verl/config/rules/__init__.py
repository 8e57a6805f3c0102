"""Rules between keys."""
