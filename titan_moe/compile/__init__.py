"""Regional compilation and CUDA graphs."""
