r"""Counting letters: "How many n are there in the word n-i-n-e?", answered letter by letter and in \boxed{}.

The task of verl-recipe's `char_count`, generated here from a seed. One row serves both programs: supervised fine-tuning
reads `messages` (question and worked answer), reinforcement learning reads `prompt` and `reward_model.ground_truth`.
"""

import random
import string
from pathlib import Path

from verl.data.files import write_parquet
from verl.errors import DataError

DATA_SOURCE = "char_count"
MAX_FAILED_SAMPLES = 3000  # in a row; then the word lengths count as exhausted


def question_of(letter: str, word: str) -> str:
    return f"How many {letter} are there in the word {'-'.join(word)}?"


def worked_answer(letter: str, word: str) -> str:
    r"""One comparison a line, then the count: "n = n.\ni != n.\n...\n\boxed{2} n in n-i-n-e."."""
    lines = [f"{other} {'=' if other == letter else '!='} {letter}." for other in word]
    return "\n".join([*lines, f"\\boxed{{{word.count(letter)}}} {letter} in {'-'.join(word)}."])


def sample_word(rng: random.Random, min_length: int, max_length: int) -> tuple[str, str]:
    """(letter, word): the count of the letter is uniform from 1 to the length of the word, its places are shuffled."""
    length = rng.randint(min_length, max_length)
    letter = rng.choice(string.ascii_lowercase)
    count = rng.randint(1, length)
    letters = [other for other in string.ascii_lowercase if other != letter]
    word = [letter] * count + rng.choices(letters, k=length - count)
    rng.shuffle(word)
    return letter, "".join(word)


def row_of(letter: str, word: str, split: str, index: int) -> dict[str, object]:
    """One row of the schema, with the worked answer in `messages`."""
    prompt = [{"role": "user", "content": question_of(letter, word)}]
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt,
        "messages": [*prompt, {"role": "assistant", "content": worked_answer(letter, word)}],
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": str(word.count(letter))},
        "extra_info": {"split": split, "index": index},
    }


def prepare(output: Path, *, num_train: int, num_test: int, min_length: int, max_length: int, seed: int) -> list[str]:
    """Write `output`/{train,test}.parquet, all questions distinct; returns one line per file. Raises DataError for lengths that
    are no range, or that give too few distinct questions."""
    if not 1 <= min_length <= max_length:
        raise DataError(f"Word lengths from {min_length} to {max_length} are not a range; set --min-length lower.")
    rng, questions, failed = random.Random(seed), dict[tuple[str, str], None](), 0
    while len(questions) < num_train + num_test:
        sampled = sample_word(rng, min_length, max_length)
        failed = failed + 1 if sampled in questions else 0
        questions[sampled] = None
        if failed == MAX_FAILED_SAMPLES:
            raise DataError(
                f"Words of {min_length} to {max_length} letters give {len(questions)} questions, fewer than the "
                f"{num_train + num_test} rows asked for. Set --max-length higher, or ask for fewer rows."
            )
    chosen, lines = list(questions), []
    for split, part in (("test", chosen[:num_test]), ("train", chosen[num_test:])):
        file = output / f"{split}.parquet"
        write_parquet(file, [row_of(letter, word, split, index) for index, (letter, word) in enumerate(part)])
        lines.append(f"{file}: {len(part)} rows")
    return lines
