"""Whole models. Families (Qwen3, DeepSeek, Mixtral, OLMoE ...) are values of `[model]`, not code."""
