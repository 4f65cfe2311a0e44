"""The cost of a recipe from its numbers: parameters, FLOPs, memory, kernels. Standard library only, no torch."""
