"""A dispatcher of one's own, and `titan-moe` with it: a class, its facts for rules and plans, a builder.

    torchrun --nproc-per-node 8 tools/examples/own_dispatcher.py train RECIPE.toml --parallel.dispatcher=gathering

Not with `--nproc`, which would start plain `titan-moe` on the ranks. `apply_expert_parallel` knows the name, too.
"""

import sys

import torch

from titan_moe import DispatcherFacts, TokenDispatcher, register_dispatcher
from titan_moe.cli import main
from titan_moe.dispatch.base import route
from titan_moe.dispatch.collectives import all_gather, reduce_scatter

GATHERING = DispatcherFacts("gathering", "gathers every row of the ep group.", sends="every_row", reads_host=False)


class GatheringDispatcher(TokenDispatcher):
    facts = GATHERING

    def __init__(self, inputs):
        super().__init__(inputs.permute)
        self.group, self.rank = inputs.group, inputs.group.rank()
        self.num_local_experts = inputs.num_experts // inputs.group.size()

    def prepare(self, topk_ids_TK, topk_scores_TK):
        ids_SK, e = all_gather(topk_ids_TK, self.group), self.num_local_experts
        return torch.where(ids_SK // e == self.rank, ids_SK % e, -1), all_gather(topk_scores_TK, self.group)

    def start_dispatch(self, x_TD, exchange):
        return all_gather(x_TD, self.group)

    def finish_dispatch(self, x_SD, exchange):
        return route(x_SD, *exchange, self.num_local_experts, exchange[0].numel(), exchange, self.permute)

    def start_combine(self, y_SD, exchange):
        return reduce_scatter(y_SD, self.group)

    def finish_combine(self, y_TD, exchange):
        return y_TD


register_dispatcher(GATHERING, GatheringDispatcher)
if __name__ == "__main__":
    sys.exit(main())
