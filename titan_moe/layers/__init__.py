"""The modules that a model is made of: plain PyTorch that knows nothing of ranks, precision recipes or schedules.

An expert-parallel run differs from a one-GPU run by which dispatcher object sits in `moe.dispatcher`.
"""
