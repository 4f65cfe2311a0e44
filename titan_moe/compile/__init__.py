"""What torch.compile sees of a model; each file is one transform over a built model."""
