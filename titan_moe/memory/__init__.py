"""What is kept, recomputed or moved away between forward and backward: one transform over a built model a file."""
