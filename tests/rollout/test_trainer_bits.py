"""In bfloat16 the sampler and the training forward compute the same hidden states, where processor and torch allow it."""

import pytest
import torch

from tests.rollout.conftest import make_prompts
from verl.data_proto.samples import SamplingParams
from verl.models.cpu.weights import DenseDecoder
from verl.models.forward import packed_outputs
from verl.models.matmul import Matmul
from verl.models.packing import pack_rows
from verl.models.tiny import make_tiny_model
from verl.rollout.native.compiled import library

WIDE = {"hidden_size": 576, "intermediate_size": 2304, "head_dim": 36, "num_attention_heads": 16}  # sums in parts


@pytest.fixture(scope="module")
def kernels():
    kernels = library.kernels()
    if kernels is None or kernels.kind(torch.bfloat16) != library.PAIRS:
        pytest.skip("matmuls of this processor read no pairs of bfloat16 values")
    return kernels


def load(folder, family, sizes):
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(folder, family, initializer_range=0.05, **sizes)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="verl", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and weights of norms
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def rows_of(prompts, completions):
    """The columns of the completions, prompts padded on the left and responses on the right."""
    ids = {prompt.ordinal: torch.tensor(prompt.token_ids) for prompt in prompts}
    size = max(map(len, ids.values()))
    columns = {
        "prompts": torch.zeros(len(completions), size, dtype=torch.long),
        "prompt_mask": torch.zeros(len(completions), size, dtype=torch.bool),
    }
    for row, completion in enumerate(completions):
        prompt = ids[completion.ordinal]
        columns["prompts"][row, size - len(prompt) :] = prompt
        columns["prompt_mask"][row, size - len(prompt) :] = True
    columns["responses"] = torch.tensor([completion.token_ids for completion in completions])
    columns["response_mask"] = torch.ones_like(columns["responses"], dtype=torch.bool)
    return columns


@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", WIDE), ("qwen2", {}), ("qwen3", WIDE)], ids=["llama", "qwen2", "qwen3"]
)
def test_log_probs_of_the_sampler_are_the_trainers(kernels, family, sizes, tmp_path, make_engine):
    model = load(tmp_path, family, sizes)
    if not kernels.equals_trainer(DenseDecoder.of(model)):
        pytest.skip("the matmuls of this version of torch sum in another order")
    prompts = make_prompts([3, 20, 7, 33, 65])
    engine = make_engine("native", module=model)
    assert "training forward" in str(engine.invariance())
    completions = engine.generate(prompts, SamplingParams(n=3, max_new_tokens=24, ignore_eos=True), step=0)
    sampled = torch.tensor([completion.log_probs for completion in completions])
    columns = rows_of(prompts, completions)
    for share_prompts in (True, False):
        packed = pack_rows(columns, share_prompts=share_prompts)
        trained = packed_outputs(model, packed, ["log_probs"])["log_probs"].detach()
        assert (trained - sampled).abs().max() < 1e-5  # rounding of the log-softmax


@pytest.mark.parametrize("inputs", [576, 896, 1536, 2048, 4864, 8192])
def test_sums_of_products_are_added_as_the_trainer_adds_them(kernels, inputs):
    block = kernels.sum_block(inputs)
    if block is None:
        pytest.skip("the matmuls of this version of torch sum in another order")
    x, weight = torch.randn(37, inputs).bfloat16(), torch.randn(96, inputs).bfloat16()
    assert torch.equal(
        kernels.product(x, kernels.pack(weight), 96, 3, block), Matmul(x.dtype, x.device).product(x, weight).float()
    )
