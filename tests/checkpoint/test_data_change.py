"""Other data than a checkpoint's is accepted after the repair of its own data, or where the recipe asks for it."""

from pathlib import Path

from titan_moe.checkpoint.data_change import BAD_DATA_FILE, reason_to_accept, record_bad_data


def test_only_the_bad_data_may_become_other_data(tmp_path: Path) -> None:
    assert reason_to_accept(tmp_path, "100 tokens", False) == ""
    record_bad_data(tmp_path, "100 tokens", "ids.bin, token 3")
    assert reason_to_accept(tmp_path, "100 tokens", False) == "the run has ended because of it (ids.bin, token 3)"
    assert reason_to_accept(tmp_path, "101 tokens", False) == ""
    assert reason_to_accept(tmp_path, "101 tokens", True) == "checkpoint.accept_changed_data = true"


def test_a_broken_note_accepts_nothing(tmp_path: Path) -> None:
    for contents in ("", "[]", "[" * 50, '{"data": "100 tokens"}', '{"data": ["100 tokens"], "problem": 1}'):
        (tmp_path / BAD_DATA_FILE).write_text(contents)
        assert reason_to_accept(tmp_path, "100 tokens", False) == ""
