"""Our fine-tuning and TRL's on the same rows with pictures, if TRL's environment exists."""

import pytest
import sft_cpu
from peer_env import default_folder, python_of

from tests.vision_families import TEMPLATE, vision_folder, vision_tokenizer


@pytest.mark.slow
@pytest.mark.skipif(
    not python_of(default_folder("trl")).exists(), reason="benchmarks/peers/sft_cpu.py makes TRL's environment"
)
def test_trl_has_the_same_losses_on_pictures(tmp_path):
    folder = vision_folder(tmp_path / "model", "idefics3")
    # TRL trains on text behind the token that ends a turn, ours does not
    template = TEMPLATE.replace("<|im_end|>\n", "<|im_end|>")
    for before, behind in (("messages %}", "{{ '\\n' if not loop.first }}"), ("generation_prompt %}", "{{ '\\n' }}")):
        template = template.replace(before, before + behind)
    vision_tokenizer("idefics3", template).save_pretrained(folder)
    report = sft_cpu.main(
        ["--model", str(folder), "--images", "--logs", str(tmp_path), "--rows", "4", "--rounds", "1"]
        + ["--learning-rate", "0.001", "--trl", "unpacked"]
    )
    assert report.results["loss_gaps"]["trl unpacked"] < 1e-5
