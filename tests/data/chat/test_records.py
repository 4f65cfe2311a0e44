"""Rows as conversations: the forms in which they are published, and what is none."""

from typing import Any

import pytest

from titan_moe.data.chat.records import RecordError, read_conversation

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
SHARE_GPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CALL_OF_NOTHING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("row", "messages", "num_prompt"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER], 0),
        ({"conversations": SHARE_GPT}, [USER, ANSWER], 0),
        ({"conversations": SHARE_GPT, "system": "s"}, [SYSTEM, USER, ANSWER], 0),
        ({"conversations": [USER, ANSWER], "messages": None}, [USER, ANSWER], 0),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "other"}, [SYSTEM, USER, ANSWER], 0),
        ({"prompt": "a", "completion": "b"}, [USER, ANSWER], 1),
        ({"prompt": "a", "completion": "b", "system": "s"}, [SYSTEM, USER, ANSWER], 2),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER], 2),
        ({"messages": [{**USER, "name": None, "id": 3}, CALL]}, [{**USER, "id": 3}, CALL], 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, [USER], 0),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]}]},
            [USER, CALL_OF_NOTHING],
            0,
        ),
        ({"messages": [USER, {**ANSWER, "weight": 0.0}]}, [USER, {**ANSWER, "weight": 0.0}], 0),
        ({"messages": [{"role": "human", "content": "a"}]}, [USER], 0),
    ],
)
def test_rows_are_read_in_every_form(row: dict[str, Any], messages: list[dict[str, Any]], num_prompt: int) -> None:
    chat = read_conversation(row)
    assert (chat.messages, chat.num_prompt, chat.tools, chat.options) == (messages, num_prompt, None, {})


def test_tools_and_variables_are_passed_on() -> None:
    tool = {"type": "function"}
    for tools in ([tool], '[{"type": "function"}]'):
        chat = read_conversation(
            {"messages": [USER], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
        )
        assert (chat.tools, chat.options) == ([tool], {"enable_thinking": False})
    assert read_conversation({"messages": [USER], "tools": ""}).tools is None


def test_keys_of_other_rows_of_a_table_reach_no_template() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "strict": None, "parameters": {"a": {"b": None}, "c": [None]}},
    }
    row = {"messages": [USER], "tools": [tool], "chat_template_kwargs": {"enable_thinking": None, "date": "x"}}
    chat = read_conversation(row)
    assert chat.tools == [{"type": "function", "function": {"name": "f", "parameters": {"a": {}, "c": [None]}}}]
    assert chat.options == {"date": "x"}
    assert read_conversation({**row, "tools": '[{"default": null}]'}).tools == [{"default": None}]


def test_an_answer_of_weight_0_is_none() -> None:
    messages = [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}, USER, {**ANSWER, "weight": None}]
    assert read_conversation({"messages": messages}).answers == [3, 5]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (["a"], "is list, not an object with messages"),
        ({"text": "a"}, "has the keys 'text', but not messages, conversations, or prompt and completion"),
        ({"prompt": "a"}, "but not messages"),
        ({"messages": []}, "no list of messages in 'messages'"),
        ({"messages": ["a"]}, "str as message 1 of 'messages'"),
        ({"messages": [USER, {"content": "b"}]}, "no role in message 2 of 'messages'; known are system"),
        ({"messages": [{"role": "narrator", "content": "b"}]}, "the role 'narrator' in message 1"),
        (
            {"messages": [USER, {**ANSWER, "weight": 0.5}]},
            "the weight 0.5 in message 2 of 'messages'; known are 0, which",
        ),
        ({"messages": [{"role": "user"}]}, "no content in message 1"),
        ({"messages": [{"role": "user", "content": 3}]}, "a content that is no text in message 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a content that is no text"),
        ({"prompt": "a", "completion": [ANSWER]}, "both must be texts, or lists of messages"),
        ({"messages": [USER], "tools": "[{"}, "`tools` that are not JSON"),
        ({"messages": [USER], "tools": ["f"]}, "no list of objects"),
        ({"messages": [USER], "system": 3}, "a `system` that is no text"),
        ({"messages": [USER], "chat_template_kwargs": 3}, "no object"),
    ],
)
def test_other_rows_say_what_is_wrong(row: Any, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        read_conversation(row)
