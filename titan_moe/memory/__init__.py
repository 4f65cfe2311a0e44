"""What is kept, recomputed or moved away between forward and backward; each file is one transform over a built model."""
