"""Rules of experts from a dense checkpoint: with them, the first logits are the dense model's."""

from collections.abc import Iterator

from titan_moe.config.absolute_paths import HUGGING_FACE
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, row, rule, rules_in, said
from titan_moe.config.swiglu import SwiGLU

GRANULARITY = "checkpoint.upcycle.granularity"


def _is_used(recipe: Recipe) -> bool:
    return recipe.checkpoint.upcycle.granularity > 0


upcycled_weights_are_of_hugging_face = row(
    "the dense weights are read from a checkpoint of Hugging Face",
    lambda r: _is_used(r) and not r.checkpoint.load_from.startswith(HUGGING_FACE),
    "{checkpoint.upcycle.granularity} needs `hf:` and the folder of a dense model in {checkpoint.load_from}",
    GRANULARITY,
)
noise_is_on_copies = row(
    "noise is added to experts that are copied from a dense model",
    lambda r: r.checkpoint.upcycle.noise_std > 0 and not _is_used(r),
    "{checkpoint.upcycle.noise_std} has no effect with {checkpoint.upcycle.granularity}",
    "checkpoint.upcycle.noise_std checkpoint.upcycle.granularity",
)


@rule(
    "virtual groups of experts are selected as a whole, so that a token has every piece of the dense MLP equally often",
    f"{GRANULARITY} model.moe.top_k num_experts num_groups",
)
def virtual_groups_are_whole(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe, pieces = recipe.model.moe, recipe.checkpoint.upcycle.granularity
    if not pieces:
        return
    if recipe.model.num_moe_layers == 0:
        yield said(recipe, "{checkpoint.upcycle.granularity} needs MoE layers, but {model.moe.num_experts}")
    for key, number in (("top_k", moe.top_k), ("num_experts", moe.num_experts)):
        if number % pieces:
            yield said(recipe, f"{{{GRANULARITY}}} does not divide {{model.moe.{key}}}")
    of_group = moe.num_experts // max(moe.num_groups, 1)
    if moe.num_groups > 1 and moe.num_experts % pieces == 0 and of_group % pieces:
        yield said(recipe, f"{{{GRANULARITY}}} does not divide the {of_group} experts of {{model.moe.num_groups}}")


upcycled_scores_have_one_sum = row(
    "the copies of a piece are added up with weights that must have one sum for all tokens",
    lambda r: _is_used(r) and (not r.model.moe.normalize_topk or r.model.moe.score_fn == "sparsemixer"),
    "{checkpoint.upcycle.granularity} needs scores whose sum is the same for all tokens, which {model.moe.score_fn} "
    "with {model.moe.normalize_topk} does not give",
    "model.moe.normalize_topk model.moe.score_fn checkpoint.upcycle.granularity",
)


@rule(
    "an expert computes what the dense MLP does with the same units, and nothing else is in a block",
    f"{GRANULARITY} model.moe.hash_layers score_on latent_size shared_expert_gate expert_mlp_bias router_bias "
    "swiglu_limit swiglu_alpha swiglu_up_offset model.mtp.num_depths model.norm_placement model.class",
)
def upcycled_experts_are_parts_of_the_mlp(recipe: Recipe, world_size: int) -> Iterator[str]:
    model, plain = recipe.model, SwiGLU()
    if not _is_used(recipe):
        return
    needs: dict[str, bool] = {
        "moe.hash_layers": not model.moe.hash_layers,
        "moe.score_on": model.moe.score_on == "activation",
        "moe.latent_size": model.moe.latent_size == 0,
        "moe.shared_expert_gate": not model.moe.shared_expert_gate or model.moe.shared_ffn_hidden_size == 0,
        "moe.expert_mlp_bias": not model.moe.expert_mlp_bias,
        "moe.router_bias": not model.moe.router_bias,
        "moe.swiglu_limit": model.moe.swiglu.limit == plain.limit,
        "moe.swiglu_alpha": model.moe.swiglu.alpha == plain.alpha,
        "moe.swiglu_up_offset": model.moe.swiglu.up_offset == plain.up_offset,
        "mtp.num_depths": model.mtp.num_depths == 0,
        "norm_placement": model.norm_placement == "before",
        "class": model.class_ == ModelConfig.class_,
    }
    for key in (key for key, is_met in needs.items() if not is_met):
        yield Problem(said(recipe, f"{{{GRANULARITY}}} cannot be had with {{model.{key}}}"), f"model.{key}")


upcycled_weights_train = row(
    "adapters have their base in a folder, and upcycled weights are in none",
    lambda r: _is_used(r) and r.model.adapter.is_used,
    "{checkpoint.upcycle.granularity} cannot be had with adapters ({model.adapter.rank})",
    "checkpoint.upcycle.granularity model.adapter.rank",
)
noise_is_saved = row(
    "a checkpoint without frozen weights reads them from the dense model, and noise is drawn anew on another device",
    lambda r: _is_used(r) and r.checkpoint.upcycle.noise_std > 0 and not r.checkpoint.saves_frozen,
    "{checkpoint.upcycle.noise_std} with {checkpoint.saves_frozen}",
)

UPCYCLE_RULES = rules_in(globals())
