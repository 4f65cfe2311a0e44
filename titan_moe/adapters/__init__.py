"""What trains beside frozen weights, and what is frozen."""
