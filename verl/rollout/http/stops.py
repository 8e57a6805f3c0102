"""Stop strings by our own rule: what a service finds is a hint, which can come too early, too late or not at all.

A server that decodes token by token cuts the text where characters are whole. Where a prompt ends within a character, vLLM's
takes the prompt itself for generated text and stops at a stop string in it. So a sample is cut by verl.rollout.stopping after
the first token that completes a stop string, and drawn on where the service has ended it without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from verl.rollout.http.dialects import Made, Wanted
from verl.rollout.stopping import StopRules


def sample_by_rules(sample: Callable[[Wanted], Made], wanted: Wanted, rules: StopRules) -> Made:
    """One sample as `rules` end it, of `sample`, which asks the service and makes at least one token: a second time, without
    stop strings, where the service has ended the first too early."""
    made = sample(wanted)
    if not rules.has_strings:
        return made
    end = _first_end(made.token_ids, 0, rules)
    if end is None and _ended_early(made, wanted):
        drawn = len(made.token_ids)
        params = replace(wanted.params, stop=(), max_new_tokens=wanted.params.max_new_tokens - drawn)
        token_ids = (*wanted.token_ids, *made.token_ids)
        on = replace(wanted, token_ids=token_ids, params=params, num_drawn=wanted.num_drawn + drawn)
        rest = sample(on)
        made = replace(rest, token_ids=made.token_ids + rest.token_ids, log_probs=made.log_probs + rest.log_probs)
        end = _first_end(made.token_ids, drawn, rules)
    if end is None:
        by_token = made.token_ids[-1] in wanted.stop_token_ids
        return replace(made, finish_reason="stop" if by_token else "length")
    return replace(made, token_ids=made.token_ids[:end], log_probs=made.log_probs[:end], finish_reason="stop")


def _ended_early(made: Made, wanted: Wanted) -> bool:
    by_string = made.finish_reason == "stop" and made.token_ids[-1] not in wanted.stop_token_ids
    return by_string and len(made.token_ids) < wanted.params.max_new_tokens


def _first_end(token_ids: list[int], searched: int, rules: StopRules) -> int | None:
    """Number of tokens after which the response first holds a stop string; it does not after `searched`."""
    response = np.asarray(token_ids)
    ends = (end for end in range(searched + 1, len(response) + 1) if rules.ends_string(response[:end]))
    return next(ends, None)
