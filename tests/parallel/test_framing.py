import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.parallel.framing import ChannelClosed, ChannelCorrupt, encode_frame, receive, send, to_jsonable

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), plain, max_size=4))
def test_messages_arrive_as_they_were_sent(message):
    sender, right = socket.socketpair()
    with sender, right:
        send(sender, encode_frame(message))
        assert receive(right, 1.0) == message


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (b"\xff\xff\xff\xff", ChannelCorrupt),
        (b"\x00\x00\x00\x02[]", ChannelCorrupt),
        (b"\x00\x00\x00\x03{{{", ChannelCorrupt),
        (b"\x00\x00", TimeoutError),
        (b"\x00\x00\x00\x09{}", TimeoutError),
    ],
)
def test_what_is_not_a_message(written, error):
    sender, right = socket.socketpair()
    with sender, right:
        sender.sendall(written)
        with pytest.raises(error):
            receive(right, 0.1)


def test_the_other_side_gone():
    sender, right = socket.socketpair()
    sender.close()
    with right:
        with pytest.raises(ChannelClosed):
            receive(right, 1.0)
        with pytest.raises(ChannelClosed):
            send(right, b"{}")


@pytest.mark.parametrize("value", [b"x", object(), {"a": b"x"}, {1 + 2j}])
def test_values_that_json_cannot_carry(value):
    with pytest.raises(RewardError):
        encode_frame({"value": value})


def test_sets_become_lists():
    assert to_jsonable({3, 1}) == [1, 3]
