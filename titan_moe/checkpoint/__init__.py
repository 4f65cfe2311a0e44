"""What a run leaves behind to go on from: distributed checkpoints that resume exactly, onto any number of ranks."""
