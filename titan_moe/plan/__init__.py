"""What a recipe will cost, from its numbers alone: parameters, FLOPs, memory. Standard library only, no torch."""
