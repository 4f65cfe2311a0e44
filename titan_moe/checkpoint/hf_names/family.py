"""A model family of Hugging Face: how its config.json says what `[model]` says, and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from titan_moe.checkpoint.hf_names.names import Names
from titan_moe.config.attention import AttentionConfig
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.rules.ranges import LAYERS

Values = dict[str, Any]
"""Key -> value: dotted fields of `[model]` such as `attention.num_heads`, or keys of a config.json."""
FREE = {"class_", "table", "name", "init_std", "embedding_init_std"}
FREE |= {"attention.longrope_applies", "moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_speed"}
FREE |= {"moe.aux_losses", "moe.bias_update", "moe.bias_ema", "moe.router_dtype", "moe.input_jitter"}
FREE |= {f"moe.{name}" for name in ("capacity_factor", "drop_policy", "drop_over", "pad_to_capacity")}
FREE |= {"mtp.loss_weight"}
"""Fields that say how a model is built or trained, not what it computes."""


ALIASES = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
"""Keys of config.json -> another name that transformers 5 gives them."""


class Settings:
    """A config.json that is read key by key."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values, self.defaults = values, defaults
        self.used: set[str] = set()
        self.assumed: Values = {}
        """Keys that config.json lacks, with the values of the family."""

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        if key not in self.values and ALIASES.get(key) in self.values:
            key = ALIASES[key]
            self.used.add(key)
        if key in self.values:
            return self.values[key]
        if key not in self.defaults:
            raise ValueError(f"config.json has no {key}, which this family needs; add it")
        self.assumed[key] = self.defaults[key]
        return self.defaults[key]


class Part(NamedTuple):
    """Keys of a config.json that are not fields of `[model]` one to one: how they are read, and written."""

    read: Callable[[Settings], Values]
    write: Callable[[ModelConfig], Values]


class NoWords(ValueError):
    """A family has no words for fields of a model."""

    def __init__(self, model_type: str, fields: list[str]) -> None:
        super().__init__(f"{model_type} has no words for {', '.join(fields)}")
        self.fields = fields


@dataclass(frozen=True)
class Family:
    """One model family. It is data: new keys are rows, and new layers are fields of `[model]`."""

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    """Key of config.json -> field of `[model]` with the same value."""
    names: Callable[[ModelConfig], Names]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `[model]` that are the same in all models of the family."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the only value that our layers compute. It is also what a missing key means."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that a config.json may lack -> what the family then takes."""
    parts: tuple[Part, ...] = ()
    not_built: Mapping[str, Callable[[ModelConfig], tuple[str, ...]]] = field(default_factory=dict)
    """Name of a part that our models lack -> the first letters of the names of its tensors."""
    built: frozenset[str] = frozenset()
    """Of these, those that our models have where `[model]` says so, and may lack."""
    without: Mapping[str, Values] = field(default_factory=dict)
    """Name of a part that is left out -> what config.json then says."""

    def read(self, config: Mapping[str, Any]) -> tuple[ModelConfig, Settings]:
        """The `[model]` of a config.json.

        Raises: ValueError for what our layers do not compute.
        """
        settings = Settings(config, {**self.only, **self.defaults})
        try:
            return _checked(self._values(settings)), settings
        except (TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
            words = f"config.json is not as {self.model_type} writes it: {type(error).__name__}: {error}"
            raise ValueError(words) from error

    def _values(self, settings: Settings) -> Values:
        for key, value in self.only.items():
            if (found := settings[key]) != value:
                raise ValueError(f"{key} = {found!r} in config.json: of {self.model_type} only {value!r} is built here")
        values = {**self.fixed, **{ours: settings[key] for key, ours in self.fields.items()}}
        if (number := _checked(values).num_layers) > LAYERS:
            raise ValueError(f"config.json gives {number:,} for model.num_layers, which is at most {LAYERS:,}")
        for part in self.parts:
            values |= part.read(settings)
        return values

    def write(self, model: ModelConfig) -> Values:
        """The config.json of a `[model]`.

        Raises: NoWords if the family has none for fields, and ValueError for what else it does not say.
        """
        values = {"architectures": [self.architecture], "model_type": self.model_type, **self.only}
        own = flat(model)
        values |= {key: own[ours] for key, ours in self.fields.items()}
        for part in self.parts:
            values |= part.write(model)
        read = flat(_meant(self.read(values)[0]))
        if lost := [f"model.{key} = {value!r}" for key, value in flat(_meant(model)).items() if read[key] != value]:
            raise NoWords(self.model_type, lost)
        return values


def flat(model: ModelConfig) -> Values:
    """All fields of a `[model]` by dotted key, without those of adapters, which no family has."""
    values: dict[str, Any] = {}
    for section in ("attention", "moe", "mtp"):
        own = getattr(model, section)
        values |= {f"{section}.{one.name}": getattr(own, one.name) for one in fields(own)}
    others = (one.name for one in fields(model) if one.name not in ("attention", "moe", "mtp", "adapter"))
    return values | {name: getattr(model, name) for name in others}


def of_flat(values: Mapping[str, Any]) -> ModelConfig:
    """A `[model]` of fields by dotted key. Lists may be those of JSON."""
    of: dict[str, Values] = {"": {}, "attention": {}, "moe": {}, "mtp": {}}
    for dotted, value in values.items():
        section, _, name = dotted.rpartition(".")
        of[section][name] = tuple(value) if isinstance(value, list) else value
    attention, moe, mtp = AttentionConfig(**of["attention"]), MoEConfig(**of["moe"]), MTPConfig(**of["mtp"])
    return ModelConfig(**of[""], attention=attention, moe=moe, mtp=mtp)


def _checked(values: Values) -> ModelConfig:
    """The same as a `[model]`, if every value is of its field's type."""
    defaults = flat(ModelConfig())
    for key, value in values.items():
        wanted = type(defaults[key])
        if type(value) is int and wanted is float:
            values[key] = float(value)
        elif type(value) is not wanted:
            raise ValueError(f"config.json gives {value!r} for model.{key}, which is of type {wanted.__name__}")
    return of_flat(values)


def different_fields(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The fields in which two models differ, other than in training, in words."""
    theirs = flat(_meant(other))
    return [
        f"model.{key} = {value!r}, not {theirs[key]!r}"
        for key, value in flat(_meant(one)).items()
        if theirs[key] != value
    ]


def _meant(model: ModelConfig) -> ModelConfig:
    """The same model, with fields at their defaults that do not change what it computes."""
    unread = set(FREE)
    attention, moe = model.attention, model.moe
    of_norm = {"qk_norm_over", "qk_norm_is_after_rope", "qk_norm_has_weights", "qk_norm_layers"}
    of_gqa = {"num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "out_bias", "sinks", "clip_qkv", "output_gate"}
    of_gqa |= of_norm | {"partial_rotary_factor"}
    of_mla = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_eps"}
    if not attention.longrope_short_factor:
        unread |= {f"attention.{one.name}" for one in fields(attention) if one.name.startswith("longrope_")}
    unread |= {f"attention.{name}" for name in (of_mla if attention.kind == "gqa" else of_gqa)}
    if not attention.qk_norm:
        unread |= {f"attention.{name}" for name in of_norm}
    if attention.yarn_factor == 1.0:
        unread |= {f"attention.{one.name}" for one in fields(attention) if one.name.startswith("yarn_")}
    if attention.llama3_factor == 1.0:
        unread |= {f"attention.{one.name}" for one in fields(attention) if one.name.startswith("llama3_")}
    if attention.of_windows == replace(attention, window_rope_theta=0.0) or not attention.sliding_window:
        unread |= {"attention.window_rope_theta"}
    if not attention.attn_scale:
        unread |= {"attention.floor_scale"}
    if moe.score_fn != "sparsemixer":
        unread |= {"moe.sparsemixer_jitter"}
    if moe.group_score == "top_share_sum" and (share := moe.top_k / max(moe.top_k_groups, 1)) in (1, 2):
        moe = replace(moe, group_score="max" if share == 1 else "top2_sum")
        model = replace(model, moe=moe)
    if moe.num_groups == 1:
        unread |= {"moe.group_score", "moe.top_k_groups"}
    if model.mtp.num_depths < 2:
        unread |= {"mtp.repeats_layer"}
    if not len(model.layers_by_kind[0]):
        unread |= {"ffn_hidden_size"}
    if attention.scale == replace(attention, softmax_scale=0.0).scale:
        unread |= {"attention.softmax_scale"}
    layers = range(model.num_layers)
    has_window, has_rope = ([has(layer) for layer in layers] for has in (attention.has_window, attention.has_rope))
    attention = attention.with_windows(has_window)
    if all(has_rope) or has_rope == has_window:
        attention = replace(attention, nope_every=0, rope_layers="all" if all(has_rope) else "windowed")
    model = replace(model, attention=attention)
    values, defaults = flat(model.with_layers(range(model.num_blocks))), flat(ModelConfig())
    return of_flat(values | {key: defaults[key] for key in unread})
