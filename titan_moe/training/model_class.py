"""`model.class`: the import of a model of one's own, and the checks of its contract (`--explain model.class`)."""

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.dispatchers import LOCAL
from titan_moe.config.model import MoEConfig
from titan_moe.config.modules import import_named
from titan_moe.config.schema import in_toml
from titan_moe.data.packing import IGNORE_LABEL
from titan_moe.layers.moe import MoE
from titan_moe.layers.router import TopKRouter
from titan_moe.parallel.expert import has_own_dispatcher
from titan_moe.parallel.pipeline.model import Model, PipelinedModel
from titan_moe.training.evaluate import evaluating

logger = logging.getLogger("titan_moe")

LARGEST_LEAK = 0.1
"""Change of a document's loss by the tokens of another one, over the change if both were one: rounding is far below."""
MIN_LABELS = 8
"""With fewer labels a mean and a sum are too close to tell apart."""


def import_model_class(path: str) -> type[nn.Module]:
    """Import `package.module:Class`.

    Raises: RecipeError with key and reason if it cannot be imported, or not be called as a model is.
    """
    model_class: type[nn.Module] = import_named("model.class", path)
    try:
        inspect.signature(model_class).bind(None, kernels=None, loss_chunk_tokens=0)
    except (TypeError, ValueError) as error:
        call = "Class(model_config, kernels=..., loss_chunk_tokens=...)"
        raise RecipeError([f'model.class = "{path}" cannot be called as {call}: {error}; let it take these']) from error
    return model_class


def check_interface(model: object, recipe: Recipe) -> None:
    """Refuse a model that would fail late, train on uninitialised memory, or lose what it brings.

    Raises: RecipeError with all problems and their ways out.
    """
    problems = list(_interface_problems(model))
    if isinstance(model, nn.Module):
        problems += [*_dispatcher_problems(model, recipe), *_router_problems(model, recipe.model.moe)]
    if problems:
        raise RecipeError([f'model.class = "{recipe.model.class_}": {problem}' for problem in problems])


def _interface_problems(model: object) -> Iterator[str]:
    if not isinstance(model, nn.Module):
        yield "makes no nn.Module; name a class of models"
        return
    if type(model).forward is nn.Module.forward:
        yield "has no `forward`; let it take tokens and labels, as titan_moe.models.transformer:Transformer does"
    else:
        yield from _call_problems(model)
    if not _is_trained(model):
        yield (
            "has no parameter that requires a gradient, all are frozen; leave requires_grad = True in those that are "
            "to be trained"
        )
    if not isinstance(getattr(model, "layers", None), nn.Module):
        yield "has no `layers`; keep its blocks in an nn.ModuleDict of that name, which is sharded block by block"
    without_reset = {
        type(module).__name__: name
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if not hasattr(module, "reset_buffers")
    }
    for owner, buffer in without_reset.items():
        yield (
            f"{owner} has a buffer `{buffer}` and no method `reset_buffers`; a model is built without memory, so what "
            "its constructor writes is lost: let reset_buffers() fill its buffers"
        )


def _call_problems(model: nn.Module) -> Iterator[str]:
    try:
        inspect.signature(type(model).forward).bind(model, None, None, None)
    except TypeError as error:
        call = "forward(tokens, labels, document_ids)"
        yield f"has a `forward` that cannot be called as {call}: {error}; let it take these"


def _dispatcher_problems(model: nn.Module, recipe: Recipe) -> Iterator[str]:
    """A dispatcher that the model brings stays, unless the recipe names one: then one of the two would be lost."""
    name = recipe.parallel.dispatcher
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for own in sorted({type(layer.dispatcher).__name__ for layer in layers if has_own_dispatcher(layer)}):
        if name != LOCAL.name:
            yield (
                f'sets {own} as the dispatcher of its MoE layers, and parallel.dispatcher = "{name}" would replace it; '
                f"register {own} with titan_moe.register_dispatcher and name it there, or do not set it"
            )


def _router_problems(model: nn.Module, moe: MoEConfig) -> Iterator[str]:
    """A router that is none of ours has no balancing losses, counts or bias."""
    coefficients = {name: getattr(moe, name) for name in ("aux_loss_coef", "z_loss_coef", "bias_update_speed")}
    coefficients |= {f"aux_losses.{name}": value for name, value in vars(moe.aux_losses).items()}
    asked = ", ".join(f"model.moe.{name} = {value:g}" for name, value in coefficients.items() if value)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    foreign = sorted({type(layer.router).__name__ for layer in layers if not isinstance(layer.router, TopKRouter)})
    for router in foreign:
        if asked:
            yield (
                f"routes with {router}, to which {asked} cannot apply; derive it from titan_moe.TopKRouter, or set "
                "them to 0 and balance in the router itself"
            )
        else:
            logger.info("%s is no titan_moe.TopKRouter: the trainer neither balances nor logs its loads", router)
    if moe.num_experts and not layers:
        what = f"{asked} and logs of loads" if asked else "logs of loads"
        logger.info("%s has no titan_moe.MoE layer: %s do not apply to it", type(model).__name__, what)


def check_parts(parts: list[nn.Module], recipe: Recipe) -> None:
    """Refuse a stage of a pipeline in which everything is frozen: no gradient passes it. Collective.

    Raises: RecipeError on all ranks.
    """
    frozen = [part for part in parts if list(part.parameters()) and not _is_trained(part)]
    problems: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(problems, [next(iter(dict(part.named_parameters()))) for part in frozen])
    if names := next((names for of_rank in problems for names in of_rank), ""):
        trainable = recipe.optim.trainable
        setting = f"optim.trainable = {in_toml(trainable)}" if trainable else f'model.class = "{recipe.model.class_}"'
        if recipe.model.adapter.is_used:
            setting = f"model.adapter.rank = {recipe.model.adapter.rank}, {setting}"
        raise RecipeError(
            [
                f"{setting}: with parallel.pp = {recipe.parallel.pp} all parameters of a "
                f"stage are frozen ({names}, ...); take fewer stages, or parallel.pp = 1"
            ]
        )


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


@torch.no_grad()
def check_loss(
    model: Model,
    parts: list[nn.Module],
    recipe: Recipe,
    vocab_size: int,
    device: torch.device,
    check_exchanges: Callable[[], object],
) -> None:
    """Refuse a model whose loss is not a sum over label tokens, or whose documents see each other and must not.

    It sees one random microbatch, in evaluation mode, with ids below `vocab_size`, the tokenizer's. Labels are uniform
    and independent of the tokens, so no model has a mean cross entropy much below log(vocab_size), however it was
    trained. A loss that is a mean over tokens already is smaller by their number.

    With `data.document_attention` the loss of a second document must not depend on the tokens of the first, compared
    with how much it does if both are one document.

    Raises: RecipeError if it is a mean, or no scalar, or documents see each other.
    """
    shape = (recipe.train.micro_batch_sequences, recipe.train.seq_len_tokens)
    generator = torch.Generator().manual_seed(recipe.run.seed)
    tokens_BN, labels_BN = (torch.randint(vocab_size, shape, generator=generator).to(device) for _ in range(2))
    has_documents = recipe.data.document_attention
    document_ids_BN = torch.zeros(shape, dtype=torch.int32, device=device) if has_documents else None
    with evaluating(parts):
        loss = model(tokens_BN, labels_BN, document_ids_BN)
        check_exchanges()  # without all ranks the loss says nothing
        has_loss = not isinstance(model, PipelinedModel) or model.has_head
        problems = list(_loss_problems(loss, labels_BN.numel(), vocab_size)) if has_loss else []
        if has_documents and shape[1] > 2:
            problems += _document_problems(model, tokens_BN, labels_BN, recipe.run.seed)
            check_exchanges()
    if dist.get_world_size() > 1:  # all ranks end alike
        by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, problems)
        problems = next(filter(None, by_rank), [])
    if problems:
        raise RecipeError([f'model.class = "{recipe.model.class_}" {problem}' for problem in problems])


def _loss_problems(loss: Any, num_labels: int, vocab_size: int) -> Iterator[str]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        yield f"returns {found} for tokens and labels; let it return the loss, a scalar"
    elif num_labels >= MIN_LABELS and loss < 0.5 * math.log(vocab_size) * num_labels:
        yield (
            f"returns {loss.item():.4g} for {num_labels} random labels, and the sum of their losses is about "
            f"{math.log(vocab_size) * num_labels:.4g} or more; return the sum over label tokens, not a mean: the "
            "trainer divides by the label tokens of the whole step"
        )


def _document_problems(model: Model, tokens_BN: Tensor, labels_BN: Tensor, seed: int) -> Iterator[str]:
    """Change the first half of the sequences, and look at the loss of the second half: as of two documents, and of one.

    A kernel may round otherwise where other tokens are beside its own.
    """
    num_first = tokens_BN.shape[1] // 2
    others_BN, labels_BN, two_BN = tokens_BN.clone(), labels_BN.clone(), torch.zeros_like(tokens_BN, dtype=torch.int32)
    others_BN[:, :num_first] = tokens_BN[:, :num_first].flip(1)
    labels_BN[:, :num_first], two_BN[:, num_first:] = IGNORE_LABEL, 1
    changes = []
    for document_ids_BN in (two_BN, torch.zeros_like(two_BN)):
        losses = []
        for x_BN in (tokens_BN, others_BN):
            torch.manual_seed(seed)  # of dropout that evaluation mode does not switch off
            loss = model(x_BN, labels_BN, document_ids_BN)
            losses.append(float(loss.sum()) if isinstance(loss, Tensor) else math.nan)
        changes.append(abs(losses[0] - losses[1]))
    if changes[0] > LARGEST_LEAK * changes[1]:
        yield (
            f"does not keep documents apart: tokens of one document change the loss of the next one by "
            f"{changes[0]:.3g}, and by {changes[1]:.3g} if both are one document; let its attention follow the "
            "document ids, or set data.document_attention = false"
        )
