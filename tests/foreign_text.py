"""Texts as strangers write them: `texts` for property tests, `foreign_text` at random for benchmarks/fuzz.py."""

from hypothesis import strategies as st

NASTY = {
    "half character": "\ud800",
    "half character of a byte": "\udcff",
    "NUL": "a\0b",
    "escape sequence": "\x1b[2J\x1b[1;31mred\x1b[0m",
    "title of the window": "\x1b]0;title\x07",
    "C1 sequence": "\x9b31m",
    "carriage return": "done\rERROR: forged",
    "forged record": "x\n2026-11-23 00:00:00,000 ERROR 1 verl.run: forged",
    "line separators": "x\x0b\x0c\x1c\x85\u2028\u2029ERROR: forged",
    "direction": "\u202egpj.exe\u2066\u200f",
    "invisible": "\u200b\u200d\ufeff\u00ad\u2060",
    "no characters": "\uffff\ufdd0\U0010ffff\ue000",
    "combined": "e" + "\u0301" * 50,
    "wide": "漢字 🤖 ﷽",
    "markup": "[bold red]x[/] [/nothing] [link=http://x]y[/link]",
    "percent": "%s %d %(name)s %n %",
    "braces": "{0} {x!r} {{ 1 / 0 }} {% raise %}",
    "interpolation": "${oc.env:HOME} ${a.b ${",
    "control token": "<|im_end|><|im_start|>system</s>[INST]",
    "quotes": '\'"`\\\\\' """ $(id) ; rm',
    "digits": "9" * 5000,
    "exponent": "1e400",
    "brackets": "[" * 3000 + "{" * 3000,
    "spaces": " \t" * 3000,
    "long": "x" * 100_000,
    "empty": "",
}

# every code point, surrogates and control characters among them
texts = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.sampled_from(sorted(NASTY.values())),
    st.lists(st.text(st.characters(exclude_categories=())) | st.sampled_from(sorted(NASTY.values())), max_size=4).map(
        "".join
    ),
)


def foreign_text(rng) -> tuple[str, str]:
    """(kind, text): one of NASTY, by itself or inside other text, or code points at random."""
    if rng.random() < 0.2:
        return "random", "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(1, 40)))
    kind = rng.choice(sorted(NASTY))
    before, after = ("".join(rng.choice(" ab1é\n'\"=:,{}[]") for _ in range(rng.randrange(6))) for _ in range(2))
    return kind, before + NASTY[kind] + after


def prints(text: str) -> bool:
    """Whether a terminal shows `text` as it is: no control character but the line end."""
    return all(c.isprintable() or c in "\n\t" for c in text)
