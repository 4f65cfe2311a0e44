"""Optimizers over all model parts, their parameter groups and learning rate schedule."""
