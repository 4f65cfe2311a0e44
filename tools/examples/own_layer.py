"""An MoE layer in a model of one's own, and the loop that trains it: python tools/examples/own_layer.py"""

import torch
from torch import Tensor, nn

from titan_moe import MoE, MoEConfig, scale_balancing_losses, update_expert_biases

NUM_MICROBATCHES = 2


class MyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "score_fn": "sigmoid"}
        self.moe = MoE(width, MoEConfig(**experts, aux_loss_coef=1e-2, bias_update_speed=1e-3))

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND + self.moe(self.norm(x_BND))


def main(num_steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    model, losses = nn.Sequential(MyBlock(64), MyBlock(64)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scale_balancing_losses(model, 1 / NUM_MICROBATCHES)  # as the main loss below; once
    for step in range(num_steps):
        x_MBND = torch.randn(NUM_MICROBATCHES, 4, 16, 64)
        loss = sum((model(x_BND) - x_BND.relu()).square().mean() / NUM_MICROBATCHES for x_BND in x_MBND)
        loss.backward()  # adds the gradients of the balancing losses by itself
        optimizer.step()
        optimizer.zero_grad()
        counts = update_expert_biases(model)  # once a step, all ranks together; tokens of each expert by router
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1}  loss {losses[-1]:.3f}  tokens by expert {counts['1.moe.router'].tolist()}")
    return losses


if __name__ == "__main__":
    main()
