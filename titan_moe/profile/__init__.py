"""Looking at where the time of a step goes."""
