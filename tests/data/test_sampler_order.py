"""The order that a user's sampler gives: epochs, resuming, curricula, samplers that are wrong."""

import pytest

from verl.data.order import PromptOrder, SamplerOrder, load_sampler
from verl.errors import ConfigError, DataError

pytestmark = pytest.mark.seed("A5")


class Backwards:
    def __init__(self, num_rows=7):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __iter__(self):
        return iter(range(self.num_rows - 1, -1, -1))


class Learning(Backwards):
    """Rows that were seen come last; with its state an iterator continues."""

    def __init__(self, num_rows=6):
        super().__init__(num_rows)
        self.recent, self.position = [], 0

    def __iter__(self):
        self.position %= self.num_rows
        while self.position < self.num_rows:
            self.position += 1
            yield next(row for row in range(self.num_rows) if row not in self.recent)

    def update(self, rows):
        self.recent = (self.recent + rows)[-3:]

    def state_dict(self):
        return {"recent": self.recent, "position": self.position}

    def load_state_dict(self, state):
        self.recent, self.position = list(state["recent"]), state["position"]


def rows(order, start, stop):
    return [order.row(ordinal) for ordinal in range(start, stop)]


def test_every_epoch_leaves_out_its_incomplete_batch():
    order = SamplerOrder(Backwards, 7, batch_size=3)
    assert rows(order, 0, 8) == [(0, 6), (0, 5), (0, 4), (0, 3), (0, 2), (0, 1), (1, 6), (1, 5)]
    assert rows(order, 0, 8) == rows(order, 0, 8)


def test_a_sampler_in_order_is_the_order_without_shuffling():
    class Forward(Backwards):
        def __iter__(self):
            return iter(range(self.num_rows))

    plain = PromptOrder(7, seed=1, shuffle=False, batch_size=2)
    assert rows(SamplerOrder(Forward, 7, batch_size=2), 0, 20) == rows(plain, 0, 20)


@pytest.mark.parametrize("sampler", [Backwards, Learning])
@pytest.mark.parametrize("cursor", [1, 4, 6, 7, 11])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_resumed_order_continues(sampler, cursor, ahead):
    """`ahead` prompts were read before the checkpoint, but had not trained."""

    def walk(order, start, stop):
        walked = []
        for ordinal in range(start, stop):
            walked.append(order.row(ordinal))
            order.row(ordinal + ahead)
            if sampler is Learning:
                order.update([walked[-1][1]])
        return walked

    unbroken = SamplerOrder(sampler, 7, batch_size=2)
    expected = walk(unbroken, 0, 20)
    first = SamplerOrder(sampler, 7, batch_size=2)
    walk(first, 0, cursor)
    resumed = SamplerOrder(sampler, 7, batch_size=2)
    resumed.load_state_dict(first.state_dict(cursor))
    assert walk(resumed, cursor, 20) == expected[cursor:]


def test_what_a_sampler_has_learnt_without_state_is_said_to_be_lost(caplog):
    class Forgetful(Backwards):
        def update(self, batch):
            pass

    order = SamplerOrder(Forgetful, 7, batch_size=2)
    order.row(3)
    SamplerOrder(Forgetful, 7, batch_size=2).load_state_dict(order.state_dict(4))
    assert "no state_dict()" in caplog.text


@pytest.mark.parametrize(
    ("order", "error", "words"),
    [
        ([0, 1], DataError, "ended after 2 of the 4 rows"),
        ([0, 9, 1, 2], DataError, "gave row 9; there are 4 rows"),
        ([-1, 1, 2, 3], DataError, "gave row -1"),
    ],
)
def test_wrong_rows_are_refused(order, error, words):
    class Wrong(Backwards):
        def __iter__(self):
            return iter(order)

    with pytest.raises(error, match=words):
        rows(SamplerOrder(lambda: Wrong(4), 4, batch_size=2), 0, 4)


def test_wrong_classes_are_refused(tmp_path):
    file = tmp_path / "order.py"
    file.write_text("class Plain: ...\nclass Fails:\n    def __init__(self, data_source, data_config): raise KeyError(1)\n"
                    "    def __iter__(self): ...\n    def __len__(self): ...\n")  # fmt: skip
    for name, words in (("Plain", "with __iter__"), ("Fails", "cannot be made: KeyError"), ("None_", "has no")):
        with pytest.raises(ConfigError, match=words):
            load_sampler(str(file), name, [1], None)
    with pytest.raises(ConfigError, match="data.train_batch_size=2 is more than the 1 rows that train"):
        SamplerOrder(lambda: Backwards(1), 1, batch_size=2)
