"""A checkpoint is whole or absent, verified before use, and the last good one always loads."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fitgpt.core.errors import CheckpointError
from fitgpt.core.files import seal_json, unseal_json
from fitgpt.training import checkpoint
from fitgpt.training.checkpoint import load, save, write_safetensors
from tests.checkpoints import save_step, steps, tensors

# ---- what goes in comes out

def test_weights_optimizer_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    optimizer = {"a.exp_avg": torch.randn(3, 5), "a.step": torch.tensor(3.0)}
    state = {"best_val_loss": math.inf, "lr": 0.1 + 0.2, "config": {"n_layer": 2}}
    save(tmp_path, 500, model, optimizer, state, best=True, keep_last=2)
    loaded = load(tmp_path)
    assert (loaded.step, loaded.state, loaded.notes) == (500, state, ())
    assert loaded.path == tmp_path / "step-00000500"
    for given, got in ((model, loaded.model), (optimizer, loaded.optimizer)):
        assert given.keys() == got.keys()
        assert all(torch.equal(given[name], got[name]) and given[name].dtype == got[name].dtype for name in given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
                                   torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
                                   torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_dtype_is_written_as_the_library_reads_it(tmp_path: Path, dtype: Any) -> None:
    value = torch.tensor([[0, 1, 2], [1, 0, 1]]).to(dtype)
    write_safetensors(tmp_path / "x", {"t": value})
    got = load_file(tmp_path / "x")["t"]
    assert got.dtype == dtype
    assert torch.equal(got.double(), value.double())


def test_odd_shapes_and_layouts_are_written_in_row_major_order(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    odd = {"transposed": base.t(), "strided": base[:, ::2], "scalar": torch.tensor(7.0), "none": torch.empty(0, 3),
           "bytes": torch.arange(3, dtype=torch.uint8), "é \"": base[1], "grad": base.clone().requires_grad_()}
    write_safetensors(tmp_path / "x", odd, {"format": "pt"})
    got = load_file(tmp_path / "x")
    assert got.keys() == odd.keys()
    assert all(got[name].shape == odd[name].shape and torch.equal(got[name], odd[name].detach()) for name in odd)


def test_an_empty_optimizer_is_saved_and_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1, tensors(1)[0], {}, {}, best=False, keep_last=2)
    assert load(tmp_path).optimizer == {}


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    loaded = load(tmp_path)
    size = (loaded.path / "model.safetensors").stat().st_size
    with open(loaded.path / "model.safetensors", "r+b") as file:
        file.write(b"\0" * size)
    assert torch.equal(loaded.model["transformer.wte.weight"], torch.full((16, 4), 1.0))


def test_weights_only_does_not_read_the_optimizer(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1).path
    (path / "optimizer.safetensors").unlink()
    loaded = load(tmp_path, weights_only=True)
    assert loaded.optimizer == {}
    assert loaded.notes == ()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        load(tmp_path)


# ---- which are kept

def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_step(tmp_path, step, best=step == 2, keep_last=3)
    assert steps(tmp_path) == [2, 5, 6, 7]
    assert load(tmp_path, "best").step == 2
    save_step(tmp_path, 8, best=True, keep_last=3)
    assert steps(tmp_path) == [6, 7, 8]
    assert load(tmp_path, "best").step == load(tmp_path, "last").step == 8
    assert load(tmp_path, 7).state == {"of": 7}
    assert not list(tmp_path.glob(".tmp-*"))


def test_damaged_checkpoints_do_not_replace_good_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    save_step(tmp_path, 4, keep_last=2)
    assert steps(tmp_path) == [1, 4]


def test_going_back_to_an_earlier_step_moves_later_checkpoints_away(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save_step(tmp_path, step, best=step == 100)
    assert load(tmp_path, 50).step == 50
    saved = save_step(tmp_path, 60)
    assert steps(tmp_path) == [50, 60]
    assert load(tmp_path).step == 60
    moved_to = tmp_path / "set-aside-by-step-00000060-2"
    assert sorted(path.name for path in moved_to.iterdir()) == ["step-00000100", "step-00000150"]
    assert "step 100, 150" in saved.notes[0]
    assert str(moved_to) in saved.notes[0]
    save_step(tmp_path, 100, new_branch=True)
    save_step(tmp_path, 150)
    assert steps(tmp_path) == [60, 100, 150]
    assert load(tmp_path, 100).state["new_branch"] is True
    assert load(moved_to).step == 150


def test_a_step_saved_again_is_replaced_only_once_the_new_one_is_there(tmp_path: Path) -> None:
    save_step(tmp_path, 10, first=True)
    save_step(tmp_path, 10, first=False)
    assert steps(tmp_path) == [10]
    assert load(tmp_path).state["first"] is False
    assert load(tmp_path / "set-aside-by-step-00000010-2").state["first"] is True


def test_best_falls_back_to_the_last_with_a_note(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    loaded = load(tmp_path, "best")
    assert loaded.step == 1
    assert "marked best" in loaded.notes[0]


# ---- damage

def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def zero_the_middle(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 3)
        file.write(b"\0" * min(4096, size // 3))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def make_it_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("harm", [flip_a_bit, zero_the_middle, truncate, empty, Path.unlink, make_it_a_folder])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    harmed = tmp_path / "step-00000002" / name
    if name == "state.json" and harm is truncate:
        os.truncate(harmed, harmed.stat().st_size - 2)  # the very last character is only a newline
    else:
        harm(harmed)
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert torch.equal(loaded.model["transformer.wte.weight"], torch.full((16, 4), 1.0))
    assert len(loaded.notes) == 1
    assert str(harmed) in loaded.notes[0]
    with pytest.raises(CheckpointError, match="step-00000002") as caught:
        load(tmp_path, 2)
    assert "step 1" in caught.value.fix
    harm(tmp_path / "step-00000001" / name)
    if name != "state.json" or harm is not truncate:
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path)


def test_any_flipped_bit_of_the_state_is_noticed(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1).path / "state.json"
    good = path.read_bytes()
    expected = load(tmp_path).state
    errors_seen = []
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1:])
        try:
            state = load(tmp_path, weights_only=True).state
        except CheckpointError as caught:
            errors_seen.append(caught.what)
        else:
            assert state == expected  # the flip only turned one white space into another
    assert all("state.json" in what for what in errors_seen)
    assert len(errors_seen) > 0.8 * len(good)


def test_an_unknown_file_in_a_checkpoint_is_named_and_ignored(tmp_path: Path) -> None:
    (save_step(tmp_path, 1).path / ".DS_Store").write_text("x")
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert ".DS_Store" in loaded.notes[0]


def test_files_swapped_between_checkpoints_are_noticed(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    shutil.copy(tmp_path / "step-00000001/model.safetensors", tmp_path / "step-00000002/model.safetensors")
    assert load(tmp_path).step == 1


def test_a_newer_schema_is_an_error_that_names_it_and_is_never_skipped(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2).path / "state.json"
    path.write_text(seal_json(unseal_json(path.read_text()) | {"schema": 99, "fitgpt": "9.1.0"}))
    with pytest.raises(CheckpointError, match=r"written by fitgpt v9\.1\.0") as caught:
        load(tmp_path)
    assert "≥ v9.1.0" in caught.value.fix


@pytest.mark.parametrize("wrong", [
    {"schema": "1"}, {"best": None}, {"step": "2"}, {"state": []}, {"files": 7}, {"files": {}},
    {"files": {"model.safetensors": 1, "optimizer.safetensors": {}}}], ids=str)
def test_a_state_with_wrong_types_is_skipped(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2).path / "state.json"
    path.write_text(seal_json(unseal_json(path.read_text()) | wrong))
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert "not the state of a checkpoint" in loaded.notes[0]
    save_step(tmp_path, 3)


def test_a_checkpoint_is_read_under_any_name(tmp_path: Path) -> None:
    copy = tmp_path / "my best one"
    shutil.copytree(save_step(tmp_path, 7).path, copy)
    assert checkpoint.load_folder(copy).step == 7
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"my best one/model\.safetensors has 0 bytes"):
        checkpoint.load_folder(copy)


def test_no_checkpoint_and_an_unknown_step_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load(tmp_path / "nowhere")
    save_step(tmp_path, 5)
    for which in (7, "first"):
        with pytest.raises(CheckpointError, match="step 5"):
            load(tmp_path, which)


def test_a_checkpoint_removed_while_being_read_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1)
    verify = checkpoint._verify

    def trainer_moves_on(file: Path, seal: Any) -> None:
        if "step-00000001" in str(file):
            save_step(tmp_path, 2)
            shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True)
        verify(file, seal)

    monkeypatch.setattr(checkpoint, "_verify", trainer_moves_on)
    assert load(tmp_path).step == 2


def test_state_is_plain_json_for_other_tools(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1, loss=math.nan).path
    document = json.loads((path / "state.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["step"] == 1
    assert math.isnan(load(tmp_path).state["loss"])


@pytest.mark.parametrize(("part", "value", "said"), [
    ("transformer.wte.weight", math.nan, "wte.weight has values that are NaN"),
    ("transformer.wte.weight.exp_avg", math.inf, "exp_avg has values that are NaN or infinite"),
    ("transformer.ln_f.weight.exp_avg_sq", -1.0, "exp_avg_sq is negative"),
    ("transformer.wte.weight.step", math.nan, "step has values that are NaN")])
def test_a_checkpoint_with_impossible_values_is_not_used(tmp_path: Path, part: str, value: float, said: str) -> None:
    save_step(tmp_path, 1)
    model, optimizer = tensors(2)
    (model if part in model else optimizer)[part].view(-1)[0] = value
    save(tmp_path, 2, model, optimizer, {}, best=False, keep_last=3)
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert said in loaded.notes[0]


@pytest.mark.parametrize("wrong", [
    {"step": "x"}, {"step": -1}, {"step": 2**70}, {"best": 5}, {"best": {"a": 1}}, {"gpt": None},
    {"gpt": {"n_layer": 2**80}}, {"scaler": None}, {"scaler": {"scale": math.nan}},
    {"scaler": {"scale": 1.0, "good_steps": 0, "skipped": 1e300, "skipped_in_a_row": 0}}, {"config": []}, {"data": 7},
    {"evaluated_at": 1.5}, {"evaluation_status": "fine"},
    {"last_good": {"split": "val", "mean": math.nan, "stderr": 0.0, "windows": 1, "block": 1}}])
def test_a_checkpoint_with_a_state_that_no_run_has_is_not_used(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save_step(tmp_path, 1)
    save(tmp_path, 2, *tensors(2), wrong, best=False, keep_last=3)
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert f"{next(iter(wrong))} = " in loaded.notes[0]
