"""The modules of a model: plain PyTorch without ranks, precision recipes or schedules.

Expert parallelism is another object in `moe.dispatcher`.
"""
