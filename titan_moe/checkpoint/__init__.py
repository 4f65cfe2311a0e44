"""Distributed checkpoints. A run resumes from them exactly, on any number of ranks."""
