"""A checkpoint is whole or absent, verified before use, and the last good one always loads."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from fitgpt.atomic import seal_json, unseal_json  # noqa: E402
from fitgpt.engine import checkpoint  # noqa: E402
from fitgpt.engine.checkpoint import (  # noqa: E402
    clean_leftovers,
    list_checkpoints,
    load,
    save,
    write_safetensors,
)
from fitgpt.errors import CheckpointError, SystemFault, UsageError  # noqa: E402
from fitgpt.runfolder import step_folders  # noqa: E402

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tensors(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {"transformer.wte.weight": torch.full((16, 4), float(step)), "transformer.ln_f.weight": torch.ones(4)}
    optimizer = {f"{name}.{part}": torch.full_like(value, step + 0.5)
                 for name, value in model.items() for part in ("exp_avg", "exp_avg_sq")}
    return model, optimizer | {"transformer.wte.weight.step": torch.tensor(float(step))}


def save_step(folder: Path, step: int, *, best: bool = False, keep_last: int = 3, **state: Any) -> Any:
    return save(folder, step, *tensors(step), {"of": step, **state}, best=best, keep_last=keep_last)


def steps(folder: Path) -> list[int]:
    return [found.step for found in list_checkpoints(folder)]


# ---- what goes in comes out

def test_weights_optimizer_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    optimizer = {"a.exp_avg": torch.randn(3, 5), "a.step": torch.tensor(3.0)}
    state = {"best_val_loss": math.inf, "scaler": {"scale": 65536.0}, "lr": 0.1 + 0.2, "config": {"n_layer": 2}}
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


def test_a_tied_head_is_not_stored_and_an_untied_one_is_refused(tmp_path: Path) -> None:
    model, optimizer = tensors(1)
    model["lm_head.weight"] = model["transformer.wte.weight"]
    save(tmp_path, 1, model, optimizer, {}, best=False, keep_last=2)
    assert "lm_head.weight" not in load(tmp_path).model
    model["lm_head.weight"] = model["transformer.wte.weight"] + 1
    with pytest.raises(CheckpointError, match="not tied"):
        save(tmp_path, 2, model, optimizer, {}, best=False, keep_last=2)
    assert steps(tmp_path) == [1]
    assert not list(tmp_path.glob(".tmp-*"))


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    loaded = load(tmp_path)
    size = (loaded.path / "model.safetensors").stat().st_size
    with open(loaded.path / "model.safetensors", "r+b") as file:
        file.write(b"\0" * size)
    assert torch.equal(loaded.model["transformer.wte.weight"], torch.full((16, 4), 1.0))


def test_weights_only_reads_neither_the_optimizer_nor_misses_it(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("keep_last", [1, 0, -1])
def test_fewer_than_two_kept_is_refused(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        save_step(tmp_path, 1, keep_last=keep_last)


def test_damaged_checkpoints_do_not_push_good_ones_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    save_step(tmp_path, 4, keep_last=2)
    assert steps(tmp_path) == [1, 4]


def test_going_back_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save_step(tmp_path, step, best=step == 100)
    assert load(tmp_path, 50).step == 50
    saved = save_step(tmp_path, 60)
    assert steps(tmp_path) == [50, 60]
    assert load(tmp_path).step == 60
    aside = tmp_path / "set-aside-by-step-00000060-2"
    assert sorted(path.name for path in aside.iterdir()) == ["step-00000100", "step-00000150"]
    assert "step 100, 150" in saved.notes[0]
    assert str(aside) in saved.notes[0]
    save_step(tmp_path, 100, new_branch=True)
    save_step(tmp_path, 150)
    assert steps(tmp_path) == [60, 100, 150]
    assert load(tmp_path, 100).state["new_branch"] is True
    assert load(aside).step == 150


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
    with pytest.raises(CheckpointError, match="step-00000002") as refusal:
        load(tmp_path, 2)
    assert "step 1" in refusal.value.fix
    harm(tmp_path / "step-00000001" / name)
    if name != "state.json" or harm is not truncate:
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path)


def test_every_bit_of_the_state_is_guarded(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1).path / "state.json"
    good = path.read_bytes()
    expected = load(tmp_path).state
    refusals = []
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1:])
        try:
            state = load(tmp_path, weights_only=True).state
        except CheckpointError as refusal:
            refusals.append(refusal.what)
        else:
            assert state == expected  # the flip only turned one white space into another
    assert all("state.json" in what for what in refusals)
    assert len(refusals) > 0.8 * len(good)


def test_a_foreign_file_is_named_and_does_no_harm(tmp_path: Path) -> None:
    (save_step(tmp_path, 1).path / ".DS_Store").write_text("x")
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert ".DS_Store" in loaded.notes[0]


def test_files_swapped_between_checkpoints_are_noticed(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    shutil.copy(tmp_path / "step-00000001/model.safetensors", tmp_path / "step-00000002/model.safetensors")
    assert load(tmp_path).step == 1


def test_a_newer_schema_is_refused_by_name_and_never_skipped(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2).path / "state.json"
    path.write_text(seal_json(unseal_json(path.read_text()) | {"schema": 99, "fitgpt": "9.1.0"}))
    with pytest.raises(CheckpointError, match=r"written by fitgpt v9\.1\.0") as refusal:
        load(tmp_path)
    assert "≥ v9.1.0" in refusal.value.fix


def test_no_checkpoint_and_an_unknown_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load(tmp_path / "nowhere")
    save_step(tmp_path, 5)
    for which in (7, "first"):
        with pytest.raises(CheckpointError, match="step 5"):
            load(tmp_path, which)


def test_one_that_is_let_go_while_being_read_gives_way_to_the_next(
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


# ---- disks that say no

@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_older_ones_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(SystemFault, match="step-00000004"):
            save_step(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]
    assert load(tmp_path).step == 3
    assert save_step(tmp_path, 4).step == 4


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_file_cut_short_by_the_system_fails_the_save(tmp_path: Path) -> None:
    import resource

    save_step(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"w": torch.zeros(1_000_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(SystemFault, match="too large"):
            save(tmp_path, 2, big, {}, {}, best=False, keep_last=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_failing_to_tidy_up_is_a_note_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, keep_last=2)

    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint, "_remove", refuse)
    saved = save_step(tmp_path, 3, keep_last=2)
    assert "Permission denied" in saved.notes[0]
    assert load(tmp_path).step == 3


# ---- crashes

def test_leftovers_of_dead_processes_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    pid = os.fork() if hasattr(os, "fork") else 2**30
    if pid == 0:
        os._exit(0)
    if pid < 2**30:
        os.waitpid(pid, 0)
    (tmp_path / f".tmp-500-{pid}").mkdir()
    (tmp_path / f".tmp-500-{pid}" / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".tmp-600-{os.getppid()}").mkdir()
    notes = clean_leftovers(tmp_path)
    assert len(notes) == 1
    assert f".tmp-500-{pid}" in notes[0]
    assert [path.name for path in tmp_path.iterdir()] == [f".tmp-600-{os.getppid()}"]
    assert clean_leftovers(tmp_path / "nowhere") == []


def in_a_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_sigkill_at_random_moments_the_last_acknowledged_one_loads(tmp_path: Path) -> None:
    chance = random.Random(7)
    step = 0
    for _ in range(30):
        read_end, write_end = os.pipe()

        def save_for_ever(first: int = step + 1, told: int = write_end) -> None:
            for number in range(first, first + 10_000):
                save_step(tmp_path, number, best=number % 3 == 0, keep_last=2)
                os.write(told, b"%d\n" % number)

        child = in_a_child(save_for_ever)
        os.close(write_end)
        acknowledged = os.read(read_end, 20)  # at least one save is through
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while chunk := os.read(read_end, 4096):
            acknowledged += chunk
        os.close(read_end)
        last_told = int(acknowledged.split()[-1])
        loaded = load(tmp_path)
        assert loaded.notes == ()
        assert loaded.step in (last_told, last_told + 1)  # the kill may fall between the rename and the telling
        assert torch.equal(loaded.model["transformer.wte.weight"], torch.full((16, 4), float(loaded.step)))
        assert torch.equal(loaded.optimizer["transformer.wte.weight.step"], torch.tensor(float(loaded.step)))
        best = load(tmp_path, "best")
        assert best.step % 3 == 0 or loaded.step < 3
        step = loaded.step
        clean_leftovers(tmp_path)
        assert not list(tmp_path.glob(".tmp-*"))


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("next_step", [4, 3, 2])
def test_a_death_at_any_disk_operation_of_a_save_loses_nothing(tmp_path: Path, next_step: int) -> None:
    """The child dies just before its nth operation on the disk, for every n until a save goes through."""
    template = tmp_path / "template"
    for step in (1, 2, 3):
        save_step(template, step, best=step == 1, keep_last=2)
    before = {slot.path.name for slot in step_folders(template)}
    for deadly in range(1, 200):
        folder = tmp_path / f"death-{deadly}"
        shutil.copytree(template, folder)

        def save_until_death(folder: Path = folder, deadly: int = deadly) -> None:
            done = 0

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal done
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync"):
                    done += 1
                    if done == deadly:
                        os._exit(9)

            fsync = os.fsync
            os.fsync = lambda descriptor: (count("fsync", ()), fsync(descriptor))[1]  # not an audited event
            sys.addaudithook(count)
            save_step(folder, next_step, keep_last=2, new=True)

        _, status = os.waitpid(in_a_child(save_until_death), 0)
        loaded = load(folder)
        assert loaded.notes == ()
        # from the rename on it is the new one, also when the run went back; until then the one before
        there = step_folders(folder)
        renamed = any(slot.path.name not in before for slot in there)
        assert (loaded.step, loaded.state.get("new", False)) == ((next_step, True) if renamed else (3, False))
        assert all(load(folder, slot.step).notes == () for slot in there)
        assert load(folder, "best").step == 1
        exit_code = os.waitstatus_to_exitcode(status)
        assert exit_code in (0, 9)
        if exit_code == 0:
            assert loaded.step == next_step
            break
        save_step(folder, next_step + 1, keep_last=2)
        assert load(folder).step == next_step + 1
        shutil.rmtree(folder)
    assert exit_code == 0
    assert deadly > 15  # the hook did count


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be synced there")
def test_everything_is_on_the_disk_before_the_name_is_and_the_name_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step, keep_last=2)
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace
    inodes: dict[int, str] = {}

    def watch_fsync(descriptor: int) -> None:
        for path in (tmp_path, *tmp_path.rglob("*")):
            inodes[path.stat().st_ino] = path.name
        happened.append(f"sync {inodes[os.fstat(descriptor).st_ino]}")
        fsync(descriptor)

    def watch_replace(source: Path, target: Path) -> None:
        happened.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    save_step(tmp_path, 3, keep_last=2)
    mine = f".tmp-3-{os.getpid()}"
    assert sorted(happened[:3]) == ["sync model.safetensors", "sync optimizer.safetensors", "sync state.json"]
    assert happened[3:] == [f"sync {mine}", f"rename {mine} step-00000003", f"sync {tmp_path.name}",
                            f"rename step-00000001 .tmp-step-00000001-{os.getpid()}"]


def test_state_is_plain_json_for_other_tools(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1, loss=math.nan).path
    document = json.loads((path / "state.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["step"] == 1
    assert math.isnan(load(tmp_path).state["loss"])
