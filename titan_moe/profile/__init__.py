"""Traces of optimizer steps, and the report of where their time goes."""
