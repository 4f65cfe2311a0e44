"""Learnable random tokens, a function of (seed, sample number): for golden losses, benchmarks and tests."""

from math import gcd

import numpy as np

from titan_moe.data.hashing import derive_key, hash_counters
from titan_moe.data.sample import Sample
from titan_moe.data.samples import Samples

_RULES, _TRAINING, _VALIDATION = 2, 3, 4
_NEAR, _FAR, _NOISE = 0, 1, 2
_MEAN_DOCUMENT_TOKENS = 64


class SyntheticSamples(Samples):
    """Tokens from two affine rules and noise.

    With x the last token and y the one before it, a token is `a·x + c` (60 %), `b·y + d` (20 %), or noise that favours
    small ids (20 %), modulo the vocabulary size. Unigram statistics, bigram statistics and attention each reduce the
    loss, so it falls early and keeps falling, to about 2 nats with a vocabulary of 256. Documents start at random. No
    rule crosses a document boundary, so document attention loses no information.
    """

    def __init__(self, vocab_size: int, seq_len_tokens: int, seed: int, is_validation: bool = False) -> None:
        self._vocab_size = vocab_size
        self._num_tokens = seq_len_tokens + 1
        self._seed = seed
        self.order = f"from run.seed = {seed}"
        self._stream = _VALIDATION if is_validation else _TRAINING
        self._near = _draw_affine_rule(vocab_size, seed, _NEAR)
        self._far = _draw_affine_rule(vocab_size, seed, _FAR)

    def take(self, first: int, count: int, mine: range) -> list[Sample]:
        return [self[first + offset] for offset in mine]

    def __getitem__(self, index: int) -> Sample:
        bits = hash_counters(derive_key(self._seed, self._stream, index), np.arange(3 * self._num_tokens))
        start_bits, rule_bits, noise_bits = np.split(bits, 3)
        is_start = start_bits % np.uint64(_MEAN_DOCUMENT_TOKENS) == 0
        is_start[0] = True
        uniform = (noise_bits >> np.uint64(11)).astype(np.float64) / 2**53
        square = uniform * uniform  # products round equally on every machine, powers do not
        noise = (square * square * self._vocab_size).astype(np.int64)
        tokens = self._follow(_choose_rules(is_start, rule_bits), noise)
        return Sample(tokens, (np.cumsum(is_start) - 1).astype(np.int32))

    def _follow(self, rules: np.ndarray, noise: np.ndarray) -> np.ndarray:
        (a, c), (b, d), vocab_size = self._near, self._far, self._vocab_size
        tokens: list[int] = []
        last = before_last = 0
        for rule, token in zip(rules.tolist(), noise.tolist(), strict=True):
            if rule == _NEAR:
                token = (a * last + c) % vocab_size
            elif rule == _FAR:
                token = (b * before_last + d) % vocab_size
            tokens.append(token)
            before_last, last = last, token
        return np.array(tokens, dtype=np.int64)


def _choose_rules(is_start: np.ndarray, bits: np.ndarray) -> np.ndarray:
    tenths = bits % np.uint64(10)
    rules = np.where(tenths < 6, _NEAR, np.where(tenths < 8, _FAR, _NOISE))
    follows_start = np.append(False, is_start[:-1])
    rules[follows_start & (rules == _FAR)] = _NEAR
    rules[is_start] = _NOISE
    return rules


def _draw_affine_rule(vocab_size: int, seed: int, rule: int) -> tuple[int, int]:
    """Draw (factor, shift). The factor is coprime to the vocabulary size, so the rule permutes the vocabulary."""
    factor, shift = (int(bits) % vocab_size for bits in hash_counters(derive_key(seed, _RULES, rule), np.arange(2)))
    while gcd(factor, vocab_size) != 1:
        factor += 1
    return factor, shift
