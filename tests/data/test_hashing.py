"""The order of an epoch is a permutation, differs by key, and is the same in every version."""

import numpy as np
import pytest

from titan_moe.data.hashing import derive_key, hash_counters, permute

STEP = 0x9E3779B97F4A7C15


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 1000])
def test_permute_is_a_permutation(length: int) -> None:
    keys = np.repeat(derive_key(3), length)
    assert sorted(permute(np.arange(length), length, keys).tolist()) == list(range(length))


def test_permute_is_uniform_over_keys() -> None:
    length, num_keys = 10, 4000
    permuted = permute(np.zeros(num_keys, dtype=np.int64), length, hash_counters(derive_key(1), np.arange(num_keys)))
    counts = np.bincount(permuted, minlength=length)
    assert counts.min() > 0.8 * num_keys / length
    assert counts.max() < 1.2 * num_keys / length


def test_permute_separates_neighbours() -> None:
    order = permute(np.arange(1000), 1000, np.repeat(derive_key(5), 1000))
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.02
    assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.1


def _splitmix64(state: int) -> int:
    """One output of SplitMix64, in Python integers."""
    z = (state + STEP) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_hash_counters_is_splitmix64() -> None:
    assert _splitmix64(0) == 0xE220A8397B1DCDAF  # its published first output for seed 0
    for key in (0, 1, 2**64 - 1):
        bits = hash_counters(np.array([key], dtype=np.uint64), np.arange(1, 5))
        assert bits.tolist() == [_splitmix64((_splitmix64(key) + n * STEP) % 2**64) for n in range(4)]


def test_permute_and_keys_keep_their_values() -> None:
    """Checkpoints store a position in this order, and golden losses depend on it."""
    assert permute(np.arange(8), 8, np.repeat(derive_key(0, 1), 8)).tolist() == [7, 2, 6, 3, 5, 0, 1, 4]
    assert derive_key(1, 2, 3).tolist() == [3315798163377792184]
