"""Random rows in the SDK's form."""

import numpy as np
from tinker import types


def tensor(values):
    return types.TensorData.from_numpy(np.asarray(values))


def datum(seed, length=None, **inputs):
    """A row of random tokens whose targets are not the shifted input. `inputs` are further arrays, or "policy" for random
    log-probs and advantages."""
    generator = np.random.default_rng(seed)
    length = length or int(generator.integers(2, 9))
    ids, targets = generator.integers(1, 30, length), generator.integers(1, 30, length)
    if inputs.pop("policy", False):
        inputs["logprobs"] = -3 - generator.random(length, np.float32)
        inputs["advantages"] = generator.standard_normal(length).astype(np.float32)
    elif not inputs:
        inputs["weights"] = generator.random(length, np.float32)
    named = {"target_tokens": targets, **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids.tolist()),
        loss_fn_inputs={name: tensor(values) for name, values in named.items()},
    )


def array(value):
    return np.asarray(value.data).reshape(value.shape or -1)
