import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.models import transformer


def test_a_decoder_cannot_see_later_tokens_and_an_encoder_sees_all():
    tokens = torch.randint(20, (2, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    decoder = transformer(vocabulary_size=20, width=16, depth=2, heads=2).eval()
    before, after = decoder(tokens), decoder(changed)
    assert before.shape == (2, 9, 20)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    encoder = transformer(vocabulary_size=20, width=16, depth=2, heads=2, num_classes=3).eval()
    assert encoder(tokens).shape == (2, 3)
    assert not torch.equal(encoder(tokens), encoder(changed))


def test_tied_embeddings_are_one_parameter():
    apart = transformer(vocabulary_size=20, width=16, depth=1, heads=2)
    tied = transformer(vocabulary_size=20, width=16, depth=1, heads=2, tied=True)
    assert tied.head.weight is tied.embed.table.token.weight
    assert len(list(apart.parameters())) - len(list(tied.parameters())) == 1


def test_impossible_transformers_are_refused():
    with pytest.raises(ConfigError, match="width=10 cannot be split over heads=4"):
        transformer(vocabulary_size=5, width=10, heads=4)
    with pytest.raises(ConfigError, match="tied=true needs an output over the vocabulary"):
        transformer(vocabulary_size=5, tied=True, num_classes=2)
