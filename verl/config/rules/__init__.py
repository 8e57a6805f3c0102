"""Rules between keys, as one table."""

from verl.config.rules.algorithms import ALGORITHMS
from verl.config.rules.api import Rule
from verl.config.rules.batches import BATCHES
from verl.config.rules.families import FAMILIES
from verl.config.rules.guards import GUARDS
from verl.config.rules.ranges import RANGES
from verl.config.rules.runs import RUNS

RULES: tuple[Rule, ...] = (*RANGES, *FAMILIES, *BATCHES, *ALGORITHMS, *RUNS, *GUARDS)

__all__ = ["RULES", "Rule"]
