"""Multi-token prediction of DeepSeek-V3 and GLM-4.5 comes in from Hugging Face and goes out, copies included.

transformers has no multi-token prediction. Its reference here is one of their decoder layers behind a join, as
DeepSeek-V3's README_WEIGHTS has it, with their names.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_twins import on_disk, ours_for, twin
from torch import Tensor, nn

from titan_moe.checkpoint.hf import load_hf, save_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.families import family_for
from titan_moe.checkpoint.hf_recipe import recipe_text
from titan_moe.checkpoint.hf_weights import pieces_of, weights_of
from titan_moe.config import load_recipe
from titan_moe.entry import export_hf, import_hf

safetensors = pytest.importorskip("safetensors.torch")

LAYER, WEIGHT = 3, 0.1
PREFIX = f"model.layers.{LAYER}."
COPIES = {
    f"{PREFIX}embed_tokens.weight": "model.embed_tokens.weight",
    f"{PREFIX}shared_head.head.weight": "lm_head.weight",
}


class Joined(nn.Module):
    """A model of theirs whose last layer is the block of the first depth."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.theirs = twin(name, num_hidden_layers=LAYER + 1).double()
        width, self.eps = self.theirs.config.hidden_size, self.theirs.config.rms_norm_eps
        torch.manual_seed(1)
        self.extra = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.2 + ("norm" in name))
                for name, shape in self.shapes(width).items()
            }
        )

    @staticmethod
    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        one = {name: (width,) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
        return {"eh_proj.weight": (width, 2 * width), **one}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.extra[name]

    def losses(self, tokens_BN: Tensor, labels_BN: Tensor) -> tuple[Tensor, Tensor]:
        """The main loss, and that of depth 1."""
        seen: list[Any] = []
        block, model = self.theirs.model.layers[LAYER], self.theirs.model
        hook = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        model(tokens_BN, use_cache=False)
        hook.remove()
        ((args, kwargs),) = seen
        kwargs = dict(kwargs)
        h_BND = model.norm(args[0] if args else kwargs.pop("hidden_states"))
        embedded_BND = model.embed_tokens(torch.cat([tokens_BN[:, 1:], torch.zeros_like(tokens_BN[:, :1])], 1))
        both = self.norm(embedded_BND, "enorm_weight"), self.norm(h_BND, "hnorm_weight")
        joined_BND = torch.cat(both, -1) @ self.extra["eh_proj_weight"].T
        out = block(joined_BND, **kwargs)
        ahead_BND = self.norm(out[0] if isinstance(out, tuple) else out, "shared_head_norm_weight")
        main, ahead = (
            nn.functional.cross_entropy(self.theirs.lm_head(x).flatten(0, 1), labels.flatten(), reduction="sum")
            for x, labels in ((h_BND, labels_BN), (ahead_BND[:, :-1], labels_BN[:, 1:]))
        )
        return main, ahead

    def tensors(self, part: str = "data") -> dict[str, Tensor]:
        """By their names on disk: values or gradients."""
        own = {name: getattr(p, part) for name, p in self.theirs.named_parameters() if getattr(p, part) is not None}
        if part == "data":
            own |= dict(self.theirs.named_buffers())
            own = {name: tensor for name, tensor in own.items() if name in self.theirs.state_dict()}
        found = on_disk(self.theirs, own)
        extra = {name: getattr(self.extra[name.replace(".", "_")], part) for name in self.shapes(1)}
        return found | {f"{PREFIX}{name}": tensor for name, tensor in extra.items()}


def saved(joined: Joined, folder: Path) -> dict[str, Tensor]:
    """Write what DeepSeek and Zhipu publish: the copies too."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in joined.tensors().items()}
    tensors |= {copy: tensors[original].clone() for copy, original in COPIES.items()}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = joined.theirs.config.to_dict() | {"num_hidden_layers": LAYER, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return tensors


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.load_file(file)
    return found


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_mtp_comes_in_and_goes_out(name: str, tmp_path: Path) -> None:
    joined = Joined(name)
    tensors = saved(joined, tmp_path / "source")
    ours = ours_for(tmp_path / "source").double()
    assert ours.config.mtp.num_depths == 1 and ours.config.num_layers == LAYER
    assert load_hf(ours, tmp_path / "source") == {}
    tokens_BN, labels_BN = torch.randint(61, (2, 2, 20), generator=torch.Generator().manual_seed(0)).unbind()
    main, ahead = joined.losses(tokens_BN, labels_BN)
    (main + WEIGHT * ahead).backward()
    loss = ours(tokens_BN, labels_BN)
    loss.backward()
    torch.testing.assert_close(loss, main, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.mtp_blocks["3"].losses.sums_K2[0, 0], ahead.detach(), rtol=1e-6, atol=0)
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    weights = weights_of(ours, None)._replace(tensors=gradients)
    own = pieces_of(family_for(ours.config), ours.config, {key: tuple(grad.shape) for key, grad in gradients.items()})
    boxes, expected = weights.boxes(own), joined.tensors("grad")
    assert {piece.name for piece in own if not piece.is_copy} == expected.keys()
    for piece in own:
        if not piece.is_copy:
            actual = next(iter(boxes[piece.name].chunks.values())).reshape(piece.shape)
            assert (actual - expected[piece.name]).abs().max() <= 1e-5 * expected[piece.name].abs().max(), piece.name

    save_hf(ours, tmp_path / "saved", source=tmp_path / "source")
    save_hf(ours, tmp_path / "recipe")
    import_hf(tmp_path / "source", tmp_path / "checkpoint")
    export_hf(tmp_path / "checkpoint", tmp_path / "exported")
    for folder in ("saved", "recipe", "exported"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
        out = loaded(tmp_path / folder)
        assert out.keys() == tensors.keys()
        assert all(torch.equal(out[key].double(), tensor.double()) for key, tensor in tensors.items())


def test_mtp_may_be_left_out_and_its_copies_are_copies(tmp_path: Path) -> None:
    tensors = saved(Joined("glm4_moe"), tmp_path / "source")
    (tmp_path / "recipe.toml").write_text(recipe_text(tmp_path / "source"))
    recipe = load_recipe(tmp_path / "recipe.toml", [])
    assert recipe.model.mtp.num_depths == 1 and recipe.checkpoint.load_without == ()
    skipped = import_hf(tmp_path / "source", tmp_path / "checkpoint", ["mtp"])
    assert len(skipped["mtp"]) == sum(key.startswith(PREFIX) for key in tensors)
    export_hf(tmp_path / "checkpoint", tmp_path / "exported")
    assert loaded(tmp_path / "exported").keys() == {key for key in tensors if not key.startswith(PREFIX)}
    ours = ours_for(tmp_path / "exported")
    assert ours.config.mtp.num_depths == 0 and load_hf(ours, tmp_path / "exported") == {}

    changed = tensors | {next(iter(COPIES)): tensors[next(iter(COPIES))] + 1}
    safetensors.save_file(changed, tmp_path / "source" / "model.safetensors")
    words = "shares embedding and head, but model.layers.3.embed_tokens.weight differs from model.embed_tokens.weight"
    with pytest.raises(HuggingFaceError, match=words):
        load_hf(ours_for(tmp_path / "source"), tmp_path / "source")
    del changed[f"{PREFIX}enorm.weight"]
    safetensors.save_file(changed, tmp_path / "source" / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="missing: model.layers.3.enorm.weight; set model.mtp.num_depths = 0"):
        load_hf(ours_for(tmp_path / "source"), tmp_path / "source")
