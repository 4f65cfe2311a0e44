"""A tokenizer's folder gives the ids of transformers, whatever else its files save."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from titan_moe.titan import load_tokenizer

TEXT = "the end<|end|> of <s>a text<tool>    for  </doc> all <mask> words"


@pytest.fixture
def inner() -> Tokenizer:
    """Control tokens, and added tokens that are none: a word and a run of spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<s>", "<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the words of a text"] * 4, trainer)
    plain = ("<tool>", "  ", "</doc>")
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> str:
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = tokenizer.get_added_tokens_decoder()
    entries = {str(id): {flag: getattr(token, flag) for flag in flags} for id, token in added.items()}
    named = {"bos_token": "<s>", "eos_token": "<|end|>", "mask_token": "<mask>", "unk_token": "</doc>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": entries, **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("split", [True, False])
def test_ids_and_text_are_those_of_transformers(inner: Tokenizer, tmp_path: Path, split: bool) -> None:
    folder = save(inner, tmp_path)
    loaded, reference = load_tokenizer(folder, split_special_tokens=split), AutoTokenizer.from_pretrained(folder)
    expected = reference(TEXT, split_special_tokens=split)["input_ids"]
    assert loaded.tokenizer.encode(TEXT).ids == loaded.tokenizer.encode_batch([TEXT])[0].ids == expected
    control = {inner.token_to_id(token) for token in ("<s>", "<|end|>", "<mask>", "</doc>")}
    assert control.isdisjoint(expected) if split else control < set(expected)
    assert {inner.token_to_id("<tool>"), inner.token_to_id("  ")} < set(expected), "these are text"
    ids = [*expected, inner.token_to_id("<|end|>")]
    assert loaded.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("split", [True, False])
def test_tokens_that_only_the_configuration_has_are_added(inner: Tokenizer, tmp_path: Path, split: bool) -> None:
    known = json.loads(Path(save(inner, tmp_path), "tokenizer_config.json").read_text())["added_tokens_decoder"]
    new = {"content": "<more>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    size = inner.get_vocab_size()
    entries = {**known, str(size): {**new, "special": False}, str(size + 1): {**new, "content": "<act>"}}
    entries[str(size + 1)]["special"] = True
    folder, text = save(inner, tmp_path, added_tokens_decoder=entries), "a <more> <act> text"
    reference = AutoTokenizer.from_pretrained(folder)(text, split_special_tokens=split)["input_ids"]
    assert load_tokenizer(folder, split_special_tokens=split).tokenizer.encode(text).ids == reference
    assert size in reference and (size + 1 in reference) is not split


def test_saved_truncation_and_padding_change_nothing(inner: Tokenizer, tmp_path: Path) -> None:
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 0), ("<|end|>", 1)]
    )
    ids, short = inner.encode(TEXT * 9).ids, inner.encode("a").ids
    assert (ids[0], ids[-1]) == (0, 1)
    inner.enable_truncation(16)
    inner.enable_padding(length=32, pad_id=1, pad_token="<|end|>")
    loaded = load_tokenizer(save(inner, tmp_path), split_special_tokens=False)
    assert loaded.tokenizer.encode(TEXT * 9).ids == ids
    assert [encoding.ids for encoding in loaded.tokenizer.encode_batch(["a", TEXT * 9])] == [short, ids]
    split = load_tokenizer(str(tmp_path), split_special_tokens=True).tokenizer.encode(TEXT).ids
    assert [split.count(0), split.count(1)] == [1, 1], "BOS and EOS of the post-processor"


def test_padding_with_the_end_token_is_no_end_token(inner: Tokenizer, tmp_path: Path) -> None:
    inner.enable_padding(length=32, pad_id=1, pad_token="<|end|>")
    loaded = load_tokenizer(save(inner, tmp_path), split_special_tokens=True)
    assert (loaded.hf_adds_bos, loaded.hf_adds_eos) == (False, False)


def test_one_token_can_begin_and_end_documents(inner: Tokenizer, tmp_path: Path) -> None:
    loaded = load_tokenizer(save(inner, tmp_path, bos_token="<|end|>"), split_special_tokens=True)
    assert (loaded.bos_id, loaded.eos_id) == (1, 1)
