"""Rotary frequencies that depend on the length of a row: rows that they would change are refused by every way into a model."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.config import SFT as SCHEMA
from verl.config import load_config
from verl.data_proto.samples import SamplingParams
from verl.errors import DataError, ModelError
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm, load_model_config
from verl.models.packing import pack_rows
from verl.models.rope import fixed_rotation, row_limits
from verl.models.routing import balancing_share
from verl.models.tiny import make_tiny_model
from verl.programs.sft import SFT
from verl.rollout.requests import OpenSamples

LONG = [float(3 + i) for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8,
}
CHANGING = {  # family, entries of its config.json
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "longrope": (
        "phi3",
        {"rope_parameters": {**LONGROPE, "long_factor": LONG}, "original_max_position_embeddings": 16},
    ),
}
POSITIONS = {"dynamic": 16, "longrope": 64}


@pytest.fixture(params=CHANGING)
def folder(request, tmp_path):
    family, entries = CHANGING[request.param]
    return make_tiny_model(tmp_path / "m", family, max_position_embeddings=POSITIONS[request.param], **entries)


def columns(*lengths):
    """Rows with one prompt token; all further tokens train."""
    responses = torch.zeros(len(lengths), max(lengths) - 1, dtype=torch.int64)
    mask = torch.zeros_like(responses, dtype=torch.bool)
    for row, length in enumerate(lengths):
        responses[row, : length - 1] = 5 + torch.arange(length - 1) * 7 % 200
        mask[row, : length - 1] = True
    ones = torch.ones(len(lengths), 1, dtype=torch.int64)
    return {"prompts": ones, "prompt_mask": ones.bool(), "responses": responses, "response_mask": mask}


def load_rows(folder, file, max_length):
    keys = [f"data.max_length={max_length}", "data.truncation=right", "data.train_batch_size=1"]
    files = [f"model.path={folder}", f"data.train_files={file}", f"trainer.default_local_dir={folder.parent / 'run'}"]
    return SFT.load_data(load_config([*files, *keys], schema=SCHEMA).config).train.dataset


def log_probs(module, *lengths):
    return packed_outputs(module, pack_rows(columns(*lengths), share_prompts=False), ("log_probs",))["log_probs"]


def test_a_forward_beyond_the_change_is_refused(folder):
    """In a pack with the longer row, the shorter one would have other log-probs than by itself."""
    module, theirs = load_causal_lm(folder), AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert fixed_rotation(module.config) == 16
    with torch.no_grad():
        ids = torch.tensor([[1, *columns(16)["responses"][0].tolist()]])
        reference = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(log_probs(module, 16, 9)[0], reference, rtol=0, atol=1e-5)
        with pytest.raises(ModelError, match="Rows of more than 16 tokens have other rotary frequencies"):
            log_probs(module, 40, 9)


def test_samples_and_texts_beyond_the_change_are_refused(folder):
    module = load_causal_lm(folder)
    samples = OpenSamples(SamplingParams(max_new_tokens=8, n=1), module, None, keep=False)
    assert samples.longest_sequence == 16


def test_sequences_beyond_the_change_are_refused_before_training(folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "' + "a" * 40 + '"}\n')

    with pytest.raises(DataError, match=r"rows.jsonl, row 0 .*: a sequence has 41 tokens. Rows of more than 16 tokens"):
        load_rows(folder, file, max_length=64)
    assert len(load_rows(folder, file, max_length=16)) == 1


def test_sequences_beyond_the_positions_are_a_warning(tmp_path, caplog):
    """Rotations of the usual kind reach further than a model was trained."""
    folder, file = make_tiny_model(tmp_path / "m", max_position_embeddings=16), tmp_path / "rows.jsonl"
    file.write_text('{"text": "' + "a" * 40 + '"}\n')
    with caplog.at_level(logging.WARNING):
        load_rows(folder, file, max_length=16)
        assert "max_position_embeddings" not in caplog.text
        load_rows(folder, file, max_length=64)
    assert "The longest sequence has 41 tokens" in caplog.text
    assert "max_position_embeddings of the model (16)" in caplog.text


def test_one_factor_for_all_lengths_makes_packs_equal_to_single_rows(tmp_path):
    family, entries = CHANGING["longrope"]
    folder = make_tiny_model(tmp_path / "m", family, max_position_embeddings=64, **entries)
    rotation = {"rope_parameters": {**LONGROPE, "short_factor": LONG, "long_factor": LONG}}
    module = load_causal_lm(folder, override_config=rotation)
    assert fixed_rotation(module.config) is None
    with torch.no_grad():
        both = log_probs(module, 40, 9)
        torch.testing.assert_close(both[0], log_probs(module, 40)[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(both[1, :8], log_probs(module, 9)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "rotation", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}]
)
def test_other_rotations_have_only_the_limit_of_positions(tmp_path, rotation):
    folder = make_tiny_model(
        tmp_path / "m", rope_parameters={"rope_theta": 1e4, **rotation}, max_position_embeddings=64
    )
    assert row_limits(load_model_config(folder, False, None)) == [(64, "the model's max_position_embeddings")]


def test_a_balancing_loss_that_config_asks_for_is_said_to_have_no_effect(tmp_path, caplog):
    """transformers adds it to its loss; here no loss has it."""
    folder = make_tiny_model(tmp_path / "m", "mixtral", output_router_logits=True, router_aux_loss_coef=0.25)
    with caplog.at_level(logging.WARNING):
        load_causal_lm(folder)
    assert "no loss has the term of router_aux_loss_coef=0.25." in caplog.text
    for other in ({"output_router_logits": False}, {"output_router_logits": True, "router_aux_loss_coef": 0.0}):
        assert balancing_share(load_model_config(folder, False, {}).__class__(**other)) == ""
