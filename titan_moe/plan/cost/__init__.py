"""What a recipe costs, from its numbers: parameters, FLOPs, bytes, peaks, links."""
