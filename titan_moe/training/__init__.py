"""The assembly of a run, the optimizer step and the loop around it."""
