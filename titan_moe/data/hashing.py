"""Counter-based random numbers: a pure function of (seed, counter), without state, equal for all NumPy versions."""

import numpy as np

_ROUNDS = 6
_SEED_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_counters(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Draw 64 random bits for every (key, counter) with SplitMix64 (doi:10.1145/2660193.2660195). Both are integer
    arrays and broadcast. Overflow is intended: arrays wrap silently, NumPy scalars would warn."""
    keys = _mix(np.atleast_1d(keys).astype(np.uint64) + _SEED_STEP)
    return _mix(keys + np.atleast_1d(counters).astype(np.uint64) * _SEED_STEP)


def derive_key(*numbers: int) -> np.ndarray:
    """Hash several numbers, such as (seed, purpose, index), into one key."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = hash_counters(key, np.array([number % 2**64], dtype=np.uint64))
    return key


def permute(positions: np.ndarray, length: int, keys: np.ndarray) -> np.ndarray:
    """Map each position to its element in a random permutation of `range(length)`; each key selects a permutation.

    A Feistel network over the next power of four with cycle walking (doi:10.1007/3-540-45760-7_9). One element of an
    epoch's order costs a few hashes, and no list of samples is shuffled or stored.
    """
    half_bits = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    permuted = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (is_outside := permuted >= length).any():
        permuted[is_outside] = _feistel(permuted[is_outside], half_bits, keys[is_outside])
    return permuted.astype(np.int64)


def _feistel(x: np.ndarray, half_bits: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = x >> half_bits, x & mask
    for number in range(_ROUNDS):
        noise = hash_counters(keys, right * np.uint64(_ROUNDS) + np.uint64(number))
        left, right = right, left ^ (noise & mask)
    return (left << half_bits) | right
