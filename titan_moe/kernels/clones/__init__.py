"""Clones of hot experts: which experts, on which ranks, for which assignments."""
