"""A sample of what a trained model says."""

from typing import Any

import torch

from titan_moe.config import Recipe
from titan_moe.config.train import SAMPLE_PROMPT_TOKENS
from titan_moe.data.loader import Loader


def sample(model: Any, loader: Loader, recipe: Recipe, device: torch.device) -> str:
    """Continue a held-out prompt, on all ranks alike: the prompt and what follows."""
    prompt_BN = loader.held_out_prompt(SAMPLE_PROMPT_TOKENS).to(device)
    generator = torch.Generator(device).manual_seed(recipe.run.seed)  # so that all ranks draw alike
    num_tokens, temperature = recipe.metrics.sample_tokens, recipe.metrics.sample_temperature
    tokens_BN = model.generate(prompt_BN, num_tokens, temperature=temperature, generator=generator)
    decode, (prompt, text) = loader.tokenizer.decode, tokens_BN[0].split([prompt_BN.shape[1], num_tokens])
    return f"--- held-out prompt ---\n{decode(prompt.tolist())}\n--- the model continues ---\n{decode(text.tolist())}"
