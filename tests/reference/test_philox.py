"""The known answers that Random123 publishes for philox4x32-10 (kat_vectors)."""

import pytest
import torch

from linnet.reference.sample import philox

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter, key, expected):
    assert philox(words(counter), words(key)) == words(expected)


def test_counters_and_keys_broadcast():
    counters = [words(known[0]) for known in KNOWN]
    columns = tuple(torch.stack([c[i] for c in counters]) for i in range(4))
    keys = tuple(torch.stack([words(known[1])[i] for known in KNOWN]) for i in range(2))
    found = torch.stack(philox(columns, keys), 1)
    assert found.tolist() == [[int(w) for w in words(known[2])] for known in KNOWN]
