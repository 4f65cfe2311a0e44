"""A kept hash is that of the fields, and stays in its process."""

import pickle
from dataclasses import replace

from titan_moe.config.model import ModelConfig


def test_hash_is_kept_and_not_copied() -> None:
    model = ModelConfig(name="one", vocab_size=7)
    assert hash(model) == hash(model) == hash(ModelConfig(name="one", vocab_size=7))
    assert hash(replace(model, vocab_size=8)) != hash(model)
    copy = pickle.loads(pickle.dumps(model))
    assert copy == model
    assert vars(copy).keys() < vars(model).keys()
