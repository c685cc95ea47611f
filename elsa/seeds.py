"""Randomness as a function of (seed, purpose, step): a run resumed at step n draws what the unbroken run drew."""

import hashlib

import torch


def fold(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed of its own for every purpose and step."""
    return int.from_bytes(hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()) >> 1


def generator(seed: int, *purpose: str | int, device: str | torch.device = "cpu") -> torch.Generator:
    """A fresh generator for one purpose and step."""
    return torch.Generator(device).manual_seed(fold(seed, *purpose))
