"""Metrics of a run: one record per logged step, for console, file and TensorBoard; the environment; trace regions."""
