"""titan_moe: train Mixture-of-Experts models with PyTorch."""
