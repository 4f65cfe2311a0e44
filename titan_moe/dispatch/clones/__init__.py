"""Clones of hot experts on ranks with a lower load."""
