"""Load a tokenizer from a folder with torchtitan, with the ids that its files define for a text of any length."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_moe.titan.import_guard import import_torchtitan

if TYPE_CHECKING:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(folder: str, *, split_special_tokens: bool) -> "HuggingFaceTokenizer":
    """Load the tokenizer files of a folder: torchtitan reads them, and the ids are those of transformers.

    A truncation or a padding that is saved in `tokenizer.json` belongs to the program that saved it. Both are turned
    off. With `split_special_tokens` a text that spells a control token is encoded as text. The BOS and EOS of a
    post-processor are added in any case.
    """
    loaded = import_torchtitan("components.tokenizer").HuggingFaceTokenizer(folder)
    config = loaded.config or {}
    if (file := Path(folder) / "tokenizer.json").is_file():
        loaded.tokenizer = _read_with_kinds(file, config, loaded.tokenizer)
    tokenizer = loaded.tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos, eos = _content(config.get("bos_token")), _content(config.get("eos_token"))  # torchtitan misses an EOS = BOS
    loaded.bos_id = None if bos is None else tokenizer.token_to_id(bos)
    loaded.eos_id = None if eos is None else tokenizer.token_to_id(eos)
    added = tokenizer.encode("").ids  # torchtitan has looked at a padded and truncated one
    loaded.hf_adds_bos, loaded.hf_adds_eos = loaded.bos_id in added, loaded.eos_id in added
    tokenizer.encode_special_tokens = split_special_tokens
    return loaded


def _read_with_kinds(file: Path, config: dict[str, Any], loaded: Any) -> Any:
    """Read `tokenizer.json` again and add the tokens that torchtitan has added from the configuration.

    torchtitan makes a control token of every token in `added_tokens_decoder`, also of runs of spaces. Here each token
    keeps the kind that the files give it.
    """
    from tokenizers import AddedToken, Tokenizer

    named = {_content(config.get(key)) for key in _NAMED_TOKENS}
    entries = [entry for entry in config.get("added_tokens_decoder", {}).values() if isinstance(entry, dict)]
    plain = {entry["content"] for entry in entries if "content" in entry and not entry.get("special", True)} - named
    tokenizer = Tokenizer.from_file(str(file))
    own = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in sorted(loaded.get_added_tokens_decoder().items()):  # in the order of their new ids
        if (before := own.get(token.content)) is not None:
            if token.content in named and not before.special:
                tokenizer.add_special_tokens([before])
        elif token.content in plain:
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            tokenizer.add_tokens([AddedToken(token.content, special=False, **flags)])
        else:
            tokenizer.add_special_tokens([token])
    return tokenizer


def _content(token: Any) -> Any:
    """The text of a token in the configuration, which is a string, or an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token
