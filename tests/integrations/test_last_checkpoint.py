"""A trainer that was killed inside a save goes on from the checkpoint before."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerograph.integrations.state import last_complete


def write(folder: Path, number: int, text: str | None) -> str:
    path = folder / f"checkpoint-{number}"
    path.mkdir()
    (path / "model.safetensors").touch()
    if text is not None:
        (path / "trainer_state.json").write_text(text)
    return str(path)


@pytest.mark.parametrize("cut", [None, '{"global_step": 1'])
def test_the_last_complete_checkpoint_is_taken_with_a_warning(tmp_path: Path, cut: str | None) -> None:
    write(tmp_path, 4, "{}")
    wanted = write(tmp_path, 8, "{}")
    write(tmp_path, 12, cut)
    with pytest.warns(UserWarning, match="checkpoint-12 is not complete"):
        assert last_complete(tmp_path) == wanted


def test_there_is_none_where_no_save_has_ended(tmp_path: Path) -> None:
    assert last_complete(tmp_path / "missing") is None
    write(tmp_path, 4, None)
    assert last_complete(tmp_path) is None
