"""Synthetic tokens: reproducible from the sample number, different for validation, and learnable."""

import numpy as np

from titan_moe.data.synthetic import SyntheticSamples


def _tokens(samples: SyntheticSamples, count: int) -> np.ndarray:
    return np.stack([sample.tokens for sample in samples.take(0, count, range(count))])


def test_synthetic_sample_depends_only_on_seed_and_number() -> None:
    samples = SyntheticSamples(256, 64, seed=1)
    far_ahead = samples.take(1000, 4, range(1, 3))[0]
    assert np.array_equal(far_ahead.tokens, samples[1001].tokens)
    assert np.array_equal(far_ahead.tokens, SyntheticSamples(256, 64, seed=1)[1001].tokens)
    assert not np.array_equal(far_ahead.tokens, SyntheticSamples(256, 64, seed=2)[1001].tokens)
    assert len(np.unique(_tokens(samples, 50), axis=0)) == 50


def test_synthetic_values_stay_the_same() -> None:
    """Golden losses depend on these values."""
    assert SyntheticSamples(256, 12, seed=0)[0].tokens.tolist() == [
        215,
        90,
        2,
        183,
        122,
        127,
        114,
        199,
        234,
        143,
        226,
        25,
        108,
    ]


def test_synthetic_tokens_cover_the_vocabulary() -> None:
    for vocab_size in (2, 60, 256):
        tokens = _tokens(SyntheticSamples(vocab_size, 256, seed=3), 40)
        assert set(np.unique(tokens)) == set(range(vocab_size))


def test_synthetic_bigram_predicts_tokens_of_validation() -> None:
    training = _tokens(SyntheticSamples(32, 256, seed=0), 60)
    held_out = _tokens(SyntheticSamples(32, 256, seed=0, is_validation=True), 60)
    assert not np.array_equal(training[0], held_out[0])
    counts = np.full((32, 32), 0.1)
    np.add.at(counts, (training[:, :-1].ravel(), training[:, 1:].ravel()), 1)
    log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
    loss = -log_probs[held_out[:, :-1], held_out[:, 1:]].mean()
    assert loss < 0.6 * np.log(32)


def test_synthetic_rules_do_not_cross_documents() -> None:
    samples = SyntheticSamples(64, 512, seed=0).take(0, 60, range(60))
    tokens = np.stack([sample.tokens for sample in samples])
    document_ids = np.stack([sample.document_ids for sample in samples])
    is_inside = document_ids[:, 2:] == document_ids[:, :-2]
    counts = np.zeros((64, 64))
    np.add.at(counts, (tokens[:, :-2][is_inside], tokens[:, 2:][is_inside]), 1)
    is_predicted = counts.argmax(axis=1)[tokens[:, :-2]] == tokens[:, 2:]
    assert is_predicted[is_inside].mean() > 0.3
    assert is_predicted[~is_inside].mean() < 0.15
    assert (document_ids[:, 0] == 0).all()
    assert document_ids.max() > 2
