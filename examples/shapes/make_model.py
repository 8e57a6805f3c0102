"""A small vision-language model around SmolLM2: its language weights as they are, and a vision tower trained here.

    python examples/shapes/make_model.py work/models/SmolLM2-135M-Instruct scikit_learn-*.whl work/models/SmolLM2-135M-shapes

The architecture is SmolVLM's (transformers' Idefics3): a SigLIP tower, pixel shuffle and one linear layer in front of a Llama.
Tower and layer learn to classify pictures of verl/data/tasks/shapes.py, as towers are trained before they meet a language
model: a digit by the embedding of its token, numbers of circles and squares by weights of the classifier. The language model
has never read their features: that is left to fine-tuning.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F

from verl.data.tasks import shapes

TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for m in messages %}{{ '\\n' if not loop.first }}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}<|im_start|>assistant\n{% endif %}"
)
SCALE = 4  # 64 patches of 8x8 pixels become 4 tokens
TASKS = ("digits", "digits", "shapes", "circles", "circles")  # the harder ones twice
CLASSES = (11, shapes.MAX_SHAPES + 1, shapes.MAX_SHAPES + 1)  # digits and none, circles, squares
TOWER = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": shapes.SIDE,
    "patch_size": 8,
}


def build(language: Path) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    """The model with a random tower and connector, in float32, and its tokenizer with the tokens of images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(language)
    tokenizer.add_tokens([transformers.AddedToken(token, special=True) for token in TOKENS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    decoder = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    decoder.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    config = transformers.Idefics3Config(
        text_config=decoder.config,
        vision_config=TOWER,
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids(TOKENS[0]),
        pad_token_id=decoder.config.pad_token_id,
        tie_word_embeddings=True,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    model.generation_config = decoder.generation_config
    return model, tokenizer


def directions_of_digits(model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase) -> torch.Tensor:
    """[digits, width]: the embedding of each digit's token less the mean embedding, of length 0.5."""
    embeddings = model.get_input_embeddings().weight.detach()
    ids = tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])
    return 0.5 * F.normalize(embeddings[ids] - embeddings.mean(0), dim=1)


def train_features(model: torch.nn.Module, digit_rows: torch.Tensor, wheel: Path, num_steps: int, seed: int) -> float:
    """Train tower and connector to tell digits and the numbers of circles and squares apart, on new pictures in each step.
    `digit_rows` [digits, width] classify the digits. Returns the accuracy of the last 10 steps. Test digits are left out."""
    digits = shapes.read_digits(wheel)
    random.Random(seed).shuffle(digits)
    digits = digits[len(digits) // 10 :]
    tower, connector, width = model.model.vision_model, model.model.connector, digit_rows.shape[1]
    rng, rates = random.Random(f"{seed} tower"), []
    head = torch.nn.Linear(width, sum(CLASSES) - len(digit_rows))
    parameters = [*tower.parameters(), *connector.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (1 - step / num_steps) * 2, (step + 1) / 50)
        pictures = [shapes.picture_of(task, digits, rng) for task in TASKS for _ in range(12)]
        states = tower(pixels_of(pictures)).last_hidden_state
        # the head reads each token normalized, and takes the mean, as a layer of the language model will
        tokens = F.rms_norm(connector(states), (width,))
        logits = torch.cat([tokens @ digit_rows.T, head(tokens)], dim=-1).mean(1).split(CLASSES, dim=-1)
        targets = torch.tensor([(10 if p.digit is None else p.digit, p.circles, p.squares) for p in pictures]).T
        loss = sum(F.cross_entropy(part, target) for part, target in zip(logits, targets, strict=True))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        right = torch.stack([part.argmax(-1) == target for part, target in zip(logits, targets, strict=True)]).all(0)
        rates.append(right.float().mean().item())
    with torch.no_grad():
        # what all pictures share says nothing. The last norm, not the connector, makes features as large as embeddings of
        # tokens: smaller weights of the connector would move too fast
        norm = tower.post_layernorm
        norm.bias.sub_(states.mean((0, 1)))
        features = connector(states - states.mean((0, 1)))
        size = model.get_input_embeddings().weight.square().mean().sqrt() / features.square().mean().sqrt()
        for parameter in norm.parameters():
            parameter.mul_(size)
    return sum(rates[-10:]) / 10


def pixels_of(pictures: list[shapes.Picture]) -> torch.Tensor:
    """float32 [pictures, 3, height, width] from -1 to 1, as the image processor makes them."""
    raw = b"".join(p.image.tobytes() for p in pictures)
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(pictures), shapes.SIDE, shapes.SIDE, 3)
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("language", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("wheel", type=Path, help="scikit-learn's wheel, which has the digits")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=600, help="of 60 pictures, for the tower (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and pictures (default %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, tokenizer = build(args.language)
    accuracy = train_features(model, directions_of_digits(model, tokenizer), args.wheel, args.steps, args.seed)
    sys.stdout.write(f"After {args.steps} steps, the tower classifies {accuracy:.2f} of new pictures.\n")
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    size = {"longest_edge": shapes.SIDE}
    processor = transformers.Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor.save_pretrained(args.output)
    (args.output / "processor_config.json").write_text(f'{{"image_seq_len": {64 // SCALE**2}}}')


if __name__ == "__main__":
    main()
