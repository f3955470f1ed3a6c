"""Messages through memory that two ranks share: their order, their room, and what finds none."""

import threading
from collections import deque

import pytest
import torch

from lockstep.errors import ConfigError, StallError
from lockstep.strategies.pipeline.links import _HEAD_BYTES, _PLACES, SharedMemoryLink

pytestmark = pytest.mark.shared_memory
ROOM = 1000


class Group:
    """Stands for the link by a process group, which keeps what is sent."""

    def __init__(self):
        self.sent = deque()

    def send(self, tensor):
        self.sent.append(tensor.clone())

    def receive(self, tensor):
        tensor.copy_(self.sent.popleft())
        return bool

    def flush(self):
        pass


@pytest.fixture(autouse=True)
def rank(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@pytest.fixture
def ends():
    """The sender's and the receiver's end of a link."""
    memory, group = memoryview(bytearray(_HEAD_BYTES + ROOM)), Group()
    return [SharedMemoryLink(memory, group, 1, 0.2, stay_awake=False) for _ in range(2)]


def received(link, like):
    tensor = torch.zeros_like(like)
    link.receive(tensor)()
    return tensor


def test_messages_of_every_size_and_type_come_in_their_order(ends):
    sender, receiver = ends
    messages = [torch.randn(9), torch.arange(3), torch.empty(0), torch.randn(2, dtype=torch.complex64)]
    messages += [torch.tensor([True, False]), torch.randn(5).bfloat16()]
    for _ in range(50):
        for message in messages:
            sender.send(message)
        for message in messages:
            assert torch.equal(received(receiver, message), message)
    assert not sender._beside.sent


def test_room_is_used_again_once_it_was_read(ends):
    sender, receiver = ends
    message = torch.zeros(100)
    for _ in range(3):
        sender.send(message)
        received(receiver, message)
    assert len(sender._on_the_way) == 1
    assert sender._on_the_way[0][1] == 0, "the first place is free again"


def test_what_finds_no_room_goes_by_the_group_in_its_turn(ends):
    sender, receiver = ends
    messages = [torch.full((n,), n % 256, dtype=torch.uint8) for n in (400, 480, 40, 200, ROOM + 1, 0, ROOM)]
    for message in messages:
        sender.send(message)
    assert [len(each) for each in sender._beside.sent] == [200, ROOM + 1, ROOM]
    for message in messages:
        assert torch.equal(received(receiver, message), message)


def test_a_gap_between_messages_is_filled(ends):
    sender, receiver = ends
    first, second, third = (torch.full((n,), n % 256, dtype=torch.uint8) for n in (300, 300, 200))
    sender.send(first)
    sender.send(second)
    received(receiver, first)
    sender.send(third)
    assert [begin for _, begin, _ in sender._on_the_way] == [320, 0]
    assert torch.equal(received(receiver, second), second)
    assert torch.equal(received(receiver, third), third)


def test_a_receiver_that_stays_away_is_named(ends):
    sender, _ = ends
    for _ in range(_PLACES):
        sender.send(torch.empty(0))
    with pytest.raises(StallError, match=r"waiting for rank 1, .*Missing ranks: \[1\]"):
        sender.send(torch.empty(0))
    with pytest.raises(StallError):
        sender.flush()


def test_a_message_of_another_size_is_refused(ends):
    sender, receiver = ends
    sender.send(torch.zeros(3))
    with pytest.raises(ConfigError, match="do not agree on which parameters are trained"):
        received(receiver, torch.zeros(4))


def test_the_counters_may_begin_anew(ends):
    for end in ends:
        end._count = end._expected = (1 << 32) - 2
        end._written._word.value = end._read._word.value = (1 << 32) - 2
    test_messages_of_every_size_and_type_come_in_their_order(ends)


def test_a_sender_and_a_receiver_at_once(ends):
    sender, receiver = ends
    messages = [torch.randint(0, 255, (n % 700,), dtype=torch.uint8) for n in range(0, 30_000, 17)]

    def send():
        for message in messages:
            sender.send(message)
        sender.flush()

    thread = threading.Thread(target=send)
    thread.start()
    for message in messages:
        assert torch.equal(received(receiver, message), message)
    thread.join()
    assert not sender._read.is_behind(len(messages))
