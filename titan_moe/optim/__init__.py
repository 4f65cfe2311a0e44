"""What turns gradients into new weights: AdamW over all model parts, its parameter groups and its learning rate."""
