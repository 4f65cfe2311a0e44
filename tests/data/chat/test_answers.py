"""Answers of ten templates: as transformers marks them, and by prefixes without its marks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import ENDS, TEMPLATES, make_tokenizer, without_marks
from transformers import AutoTokenizer

from titan_moe.config.chat import ChatConfig
from titan_moe.data.chat.answers import find_answers
from titan_moe.data.chat.records import Conversation, RecordError, read_conversation
from titan_moe.data.chat.template import ChatTemplate

SYSTEM = {"role": "system", "content": "be brief"}
SHORT = [{"role": "user", "content": " what is it? "}, {"role": "assistant", "content": "it is the answer\n"}]
LONG = [
    *SHORT,
    {"role": "user", "content": "<|im_end|> and that"},
    {"role": "assistant", "content": "that  too,\n\nnaïve 数"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
]
CHATS = {"short": SHORT, "system": [SYSTEM, *SHORT], "long": [SYSTEM, *LONG], "no last answer": LONG[:-1]}
THINKING = "thinking of earlier turns stripped, as Qwen 3"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


@pytest.fixture(scope="module", params=TEMPLATES)
def templates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Of one form: its name, transformers' tokenizer, and ours with its template and with one without marks."""
    folders = [tmp_path_factory.mktemp("tokenizer") for _ in range(2)]
    template = TEMPLATES[request.param]
    for folder, text in zip(folders, (template, without_marks(template)), strict=True):
        make_tokenizer(folder, text)
    marked, plain = (ChatTemplate(str(folder), "", begins_with_bos=True) for folder in folders)
    assert (marked.has_answers, plain.has_answers) == (True, False)
    return request.param, AutoTokenizer.from_pretrained(folders[0]), marked, plain


def expected(reference: Any, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
    out = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
    return out["input_ids"], out["assistant_masks"]


def found(template: ChatTemplate, conversation: Conversation, **chat: Any) -> tuple[list[int], list[int]]:
    ids, is_learned = find_answers(template, conversation, ChatConfig(**chat))
    return ids.tolist(), is_learned.astype(int).tolist()


def texts(reference: Any, ids: list[int], marks: list[int]) -> list[str]:
    """The texts of what is marked without a gap."""
    runs: list[list[int]] = [[]]
    for id, mark in zip(ids, marks, strict=True):
        if mark:
            runs[-1].append(id)
        elif runs[-1]:
            runs.append([])
    return [reference.decode(run) for run in runs if run]


def test_answers_are_those_of_transformers(templates: tuple[Any, ...]) -> None:
    name, reference, marked, plain = templates
    for messages in CHATS.values():
        chat, answers = Conversation(messages), [m["content"] for m in messages if m["role"] == "assistant"]
        ids, marks = expected(reference, messages)
        assert [text.strip() for text in texts(reference, ids, marks)] == [
            f"{answer.strip() if name[:5] in ('heade', 'turns') else answer}{ENDS[name]}" for answer in answers
        ]
        assert found(marked, chat) == found(plain, chat, answers="prefixes") == (ids, marks)
        for template, way in ((marked, "template"), (plain, "prefixes")):
            _, last = found(template, chat, answers=way, train_on="last_answer")
            assert texts(reference, ids, last) == texts(reference, ids, marks)[-1:]
            assert sum(found(template, chat, answers=way, train_on="all")[1]) == len(ids)


def test_an_answer_to_nothing_is_learned_without_what_a_template_writes_before_it(templates: tuple[Any, ...]) -> None:
    name, reference, marked, plain = templates
    chat = Conversation([{"role": "assistant", "content": "hello"}, *SHORT])
    if name == "[INST], as Mistral":
        with pytest.raises(RecordError, match="must take turns"):
            found(plain, chat, answers="prefixes")
        return
    ids, marks = expected(reference, chat.messages)
    assert texts(reference, ids, marks)[0] == f"hello{ENDS[name]}"
    assert found(marked, chat) == found(plain, chat, answers="prefixes") == (ids, marks)


def test_answers_of_weight_0_are_not_learned(templates: tuple[Any, ...]) -> None:
    _, reference, marked, plain = templates
    ids, marks = expected(reference, LONG)
    answers = texts(reference, ids, marks)
    for left_out in ((1,), (3,), (5,), (1, 5)):
        chat = Conversation([{**m, "weight": int(n not in left_out)} for n, m in enumerate(LONG)])
        learned = [answer for number, answer in enumerate(answers) if 2 * number + 1 not in left_out]
        for template, way in ((marked, "template"), (plain, "prefixes")):
            assert texts(reference, *found(template, chat, answers=way)) == learned
            assert texts(reference, *found(template, chat, answers=way, train_on="last_answer")) == learned[-1:]
    with pytest.raises(RecordError, match="no answer: no message of the assistant of a weight above 0"):
        found(plain, Conversation([SHORT[0], {**SHORT[1], "weight": 0}]), answers="prefixes")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Any, ChatTemplate]]:
    """Make transformers' tokenizer and ours of a template."""

    def make_(template: str) -> tuple[Any, ChatTemplate]:
        make_tokenizer(tmp_path, template)
        return AutoTokenizer.from_pretrained(tmp_path), ChatTemplate(str(tmp_path), "", begins_with_bos=True)

    return make_


def test_tools_and_calls_reach_the_template(make: Callable[..., tuple[Any, ChatTemplate]]) -> None:
    template = TEMPLATES["tools, as Qwen"]
    chat = read_conversation({"messages": CALLS, "tools": TOOLS})
    reference, ours = make(template)
    ids, marks = expected(reference, CALLS, tools=TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert texts(reference, ids, marks) == [call, "It is 3.<|im_end|>"]
    assert '"parameters": {"type": "object"}' in reference.decode(ids)
    assert found(ours, chat) == (ids, marks)
    _, plain = make(without_marks(template))
    assert found(plain, chat, answers="prefixes") == (ids, marks)


def test_thinking_of_earlier_turns_is_learned_where_it_is_rendered(make: Callable[..., Any]) -> None:
    turns = [[user, {**answer, "content": f"<think>so</think>\n\n{answer['content']}"}] for user, answer in [SHORT] * 2]
    chat, template = Conversation([message for turn in turns for message in turn]), TEMPLATES[THINKING]
    reference, ours = make(template)
    ids, marks = expected(reference, chat.messages)
    thought = "<think>so</think>\n\nit is the answer\n<|im_end|>"
    assert texts(reference, ids, marks) == ["it is the answer\n<|im_end|>", thought]
    assert found(ours, chat) == (ids, marks)
    assert texts(reference, *found(ours, chat, train_on="last_answer")) == [thought]
    _, plain = make(without_marks(template))
    assert texts(reference, *found(plain, chat, answers="prefixes", train_on="last_answer")) == [thought]
    with pytest.raises(RecordError, match=r'first 2 messages are rendered as "<think>so.*last_answer"$'):
        found(plain, chat, answers="prefixes")
    prompt = chat._replace(messages=[*chat.messages, chat.messages[0], {**chat.messages[1], "weight": 0}])
    with pytest.raises(RecordError, match=r'where the whole .* take a template with .* = "template"$'):
        found(plain, prompt, answers="prefixes", train_on="last_answer")


@pytest.mark.parametrize("chat", [{"train_on": "all"}, {"answers": "prefixes"}, {}])
def test_half_of_a_pair_is_a_bad_row(make: Callable[..., Any], chat: dict[str, Any]) -> None:
    _, ours = make(TEMPLATES["chatml"])
    with pytest.raises(RecordError, match="TextEncodeInput"):
        found(ours, Conversation([SHORT[0], {**SHORT[1], "content": "a\ud83d"}]), **chat)


def test_reasoning_is_a_part_of_its_answer(make: Callable[..., Any]) -> None:
    messages = [SHORT[0], {**SHORT[1], "reasoning_content": "so"}, SHORT[0], {**SHORT[1], "reasoning_content": "thus"}]
    reference, ours = make(TEMPLATES["reasoning apart"])
    answer = "it is the answer\n<|end|>"
    ids, marks = found(ours, Conversation(messages))
    assert texts(reference, ids, marks) == [f"<think>so</think>{answer}", f"<think>thus</think>{answer}"]
    _, plain = make(without_marks(TEMPLATES["reasoning apart"]))
    assert found(plain, Conversation(messages), answers="prefixes") == (ids, marks)


def test_completions_are_learned_and_prompts_are_not(make: Callable[..., Any]) -> None:
    reference, ours = make(TEMPLATES["chatml"])
    chat = read_conversation({"prompt": [*SHORT, SHORT[0]], "completion": LONG[3:]})
    answers = ["that  too,\n\nnaïve 数<|im_end|>", "!<|im_end|>"]
    assert texts(reference, *found(ours, chat)) == answers
    assert texts(reference, *found(ours, chat, answers="prefixes")) == answers
    texts_only = read_conversation({"prompt": "what?", "completion": "that"})
    assert texts(reference, *found(ours, texts_only)) == ["that<|im_end|>"]


def test_an_answer_to_nothing_without_a_prompt_for_it_is_refused(make: Callable[..., Any]) -> None:
    _, ours = make("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(RecordError, match="begins with an answer, and the prompt for one is not found"):
        found(ours, Conversation([SHORT[1], *SHORT]), answers="prefixes")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([SHORT[0]], "has no answer: no message of the assistant"),
        (
            [SHORT[0], SHORT[0], SHORT[1]],
            "refused by the chat template: TemplateError: user and assistant must take turns",
        ),
    ],
)
def test_conversations_without_answers_or_order_are_refused(
    make: Callable[..., Any], messages: list[dict[str, Any]], words: str
) -> None:
    _, ours = make(TEMPLATES["[INST], as Mistral"])
    with pytest.raises(RecordError, match=words):
        found(ours, Conversation(messages))
