"""Recipes from jobs of torchtitan, Megatron-Core and Megatron-Bridge: readers, a table of values, a writer."""
