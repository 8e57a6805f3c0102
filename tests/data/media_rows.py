"""Malformed rows with images, each with words of its sentence; and runs of programs on them, for the fuzzer."""

import base64
import contextlib
import io
import os
import re

from PIL import Image

from tests.json_lines import write_lines
from tests.letters_task import overrides, write_task
from tests.vision_families import vision_folder
from verl.cli.main import main


def picture(width=40, height=30, color=(200, 30, 90)):
    return Image.new("RGB", (width, height), color)


def encoded(image=None, kind="PNG", **settings):
    buffer = io.BytesIO()
    (image or picture()).save(buffer, kind, **settings)
    return buffer.getvalue()


def row(content="<image>How many?", **fields):
    reward = {"style": "rule", "ground_truth": "4"}
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "data_source": "dots", "reward_model": reward, **fields}


def written(folder, *rows):
    file = folder / "rows.jsonl"
    write_lines(file, rows)
    return str(file)


def data_url(content):
    return "data:image/png;base64," + base64.b64encode(content).decode()


def bomb():
    return encoded(Image.new("1", (9000, 9000)))


UNREADABLE = {
    "a number": (lambda p: 7, "is 7, a int"),
    "null": (lambda p: None, "NoneType"),
    "an empty object": (lambda p: {}, "without image, video, bytes, path or url"),
    "other fields": (lambda p: {"picture": "a.png"}, "without image, video, bytes, path or url"),
    "no bytes": (lambda p: b"", "is empty"),
    "text bytes": (lambda p: b"hello", "no image that can be read"),
    "a truncated PNG": (lambda p: encoded(picture(300, 300))[:-200], "is damaged"),
    "a truncated JPEG": (lambda p: encoded(Image.effect_noise((300, 300), 50), "JPEG")[:600], "is damaged"),
    "a bomb": (lambda p: bomb(), "9000 x 9000 pixels"),
    "two frames": (
        lambda p: encoded(picture(), "GIF", save_all=True, append_images=[picture(color=(0, 0, 0))]),
        "2 frames",
    ),
    "vector graphics": (lambda p: b"%!PS-Adobe-3.0 EPSF-3.0\n", "no image that can be read"),
    "a missing file": (lambda p: str(p / "none.png"), "does not exist"),
    "a folder": (lambda p: str(p), "is a folder"),
    "an empty name": (lambda p: "", "an empty name"),
    "a pipe": (lambda p: pipe(p), "is a pipe"),
    "a web address": (lambda p: "https://example.org/a.png", "nothing is downloaded"),
    "a bucket": (lambda p: {"url": "s3://bucket/a.png"}, "nothing is downloaded"),
    "a missing file URL": (lambda p: (p / "none.png").as_uri(), "does not exist"),
    "a data URL of text": (lambda p: "data:image/png,hello", "without base64"),
    "damaged base64": (lambda p: "data:image/png;base64,####", "base64 is damaged"),
    "base64 of nothing": (lambda p: "data:image/png;base64,", "is empty"),
    "base64 of text": (lambda p: data_url(b"hello"), "no image that can be read"),
}


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


TEXT = {"type": "text", "text": "How many?"}
MALFORMED = {
    "more images than places": (
        row("How many?", images=[data_url(encoded())]),
        "'images' has 1 images, and .* 0 places",
    ),
    "more places than images": (row("<image><image>", images=[data_url(encoded())]), "has 1 images, and .* 2 places"),
    "a part without an image": (row([{"type": "image"}, TEXT]), "has 0 images, and .* 1 places"),
    "a token of images without an image": (row("<|image_pad|>?"), "has no images, and its text has '<.image_pad.>'"),
    "an unreadable image": (row(images=["none.png"]), "image 0: the file none.png does not exist"),
    "the token of images in a text": (
        row("<image> and <|image_pad|>?", images=[data_url(encoded())]),
        "2 times '<.image_pad.>'.*, and there are 1 images",
    ),
    "a missing video": (row([{"type": "video", "video": "a.mp4"}, TEXT]), "video 0: the file a.mp4 does not exist"),
    "more videos than places": (row("What?", videos=["a.mp4"]), "'videos' has 1 videos, and .* 0 places"),
    "a place in a row without images": (row("<image>A?"), "'images' has 0 images, and .* 1 places"),
    "a place without a video": (row("<image><video>", images=[data_url(encoded())]), "'videos' has 0 .* 1 places"),
    "an image as a video": (row("<image>", videos=["a.mp4"]), "'images' has 0 images, and .* 1 places"),
    "a remote video": (row("<video>", videos=["https://example.org/a.mp4"]), "nothing is downloaded"),
    "a video without frames": (row("<video>", videos=[[]]), "video 0 has no frames"),
    "a frame that is no image": (row("<video>", videos=[{"video": [data_url(b"no")]}]), "frame 0 is no image"),
    "frames of two sizes": (
        row("<video>", videos=[{"video": [data_url(encoded()), data_url(encoded(picture(80, 30)))]}]),
        "frames of the sizes",
    ),
    "a setting of no video": (row("<video>", videos=[{"video": "a.mp4", "fsp": 2}]), "no setting 'fsp'.*mean 'fps'"),
    "no frames a second": (row([{"type": "video", "video": "a.mp4", "fps": 0}]), "fps of a video is 0"),
    "two numbers of frames": (row("<video>", videos=[{"video": "a.mp4", "fps": 1, "nframes": 4}]), "Give one of them"),
    "a video token without a video": (row("<|video_pad|>?"), "has no images, and its text has '<.video_pad.>'"),
    "audio": (row([{"type": "audio", "audio": "a.wav"}, TEXT]), "audio .* not available"),
    "an unknown part": (row([{"type": "table"}, TEXT]), "content other than text, images and videos"),
    "a part that is no object": (row(["text", TEXT]), "content other than text, images and videos"),
    "a text part without text": (row([{"type": "text"}]), "content other than text, images and videos"),
    "too long": (row("<image>" + "x" * 600, images=[data_url(encoded())]), "more than data.max_prompt_length=512"),
}


def sft_row(*contents, **fields):
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **fields}


SFT_MALFORMED = {
    "an image behind an answer": (
        sft_row("A?", "4", "<image>B?", "5", images=[data_url(encoded())]),
        "follows the first token",
    ),
    "a token without an image": (sft_row("<|image_pad|>?", "4"), "has no images, and its text has"),
    "no place": (sft_row("A?", "4", images=[data_url(encoded())]), "'images' has 1 images, and .* 0 places"),
    "a bad image": (sft_row("<image>?", "4", images=["none.png"]), "none.png does not exist"),
    "a missing video": (sft_row("<video>?", "4", videos=["a.mp4"]), "video 0: the file a.mp4 does not exist"),
    "too long": (sft_row("<image>?", "x" * 2000, images=[data_url(encoded())]), "more than data.max_length=1024"),
    "a text row": ({"text": "<image>A", "images": [data_url(encoded())]}, "'images' has 1 images, and .* 0 places"),
}


def as_json(source):
    """A source as a row in JSON has it; None if only Python or parquet can."""
    if isinstance(source, bytes):
        return data_url(source)
    return source if isinstance(source, str | dict | int) or source is None else None


def malformed(folder):
    """(program, kind, row) of every malformed row."""
    for name, (make, _) in UNREADABLE.items():
        source = as_json(make(folder))
        yield "train", name, row(images=[source])
        yield "sft", name, sft_row("<image>?", "4", images=[source])
    for program, table in (("train", MALFORMED), ("sft", SFT_MALFORMED)):
        yield from ((program, name, bad) for name, (bad, _) in table.items())


def settings_of(program, model, task, file, run):
    rows = [f"data.train_files={file}", "data.val_files=[]", f"trainer.default_local_dir={run}"]
    if program == "train":
        return overrides(model, task, "data.max_prompt_length=512", *rows)
    return [f"model.path={model}", "data.train_batch_size=2", "trainer.total_training_steps=2", *rows]


def cases(rng, count, folder):
    """Programs on rows with a malformed one at a random place: a sentence, and nothing trains."""
    model, task = vision_folder(folder / "model", "qwen2_vl"), write_task(folder)
    table = list(malformed(folder))
    for number in range(count or len(table)):
        program, kind, bad = table[number] if number < len(table) else rng.choice(table)
        good = row("Plain?") if program == "train" else sft_row("Plain?", "4")
        at = rng.randrange(6)
        rows = [good] * at + [bad] + [good] * (5 - at)
        file, run = folder / f"{number}.jsonl", folder / f"run{number}"
        write_lines(file, rows)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([program, *settings_of(program, model, task, file, run)])
        lines = [line for line in said.getvalue().splitlines() if f"{file.name}, row {at}" in line]
        assert code == 3, (kind, code, said.getvalue())
        assert "Traceback" not in said.getvalue(), (kind, said.getvalue())
        assert len(lines) == 1, (kind, said.getvalue())
        assert re.search(r"[.?]$", lines[0].strip()), (kind, lines)
        assert not list(run.glob("**/metrics.jsonl")) or not (run / "metrics.jsonl").read_text(), kind
        yield f"{program}: {kind}", "refused"
