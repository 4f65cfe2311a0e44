"""Metrics of a run: one record per logged step, for console, file and charts; runs compared; environment; regions."""
