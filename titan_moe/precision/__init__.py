"""Number formats of training; each file is one transform over a built model."""
