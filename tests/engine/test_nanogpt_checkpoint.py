"""nanoGPT's ckpt.pt comes in by name, whole or not at all, and nothing in it is run."""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fitgpt.config.architectures import GPTConfig, parameter_shapes
from fitgpt.core.errors import CheckpointError
from fitgpt.engine.nanogpt_checkpoint import read_nanogpt
from fitgpt.engine.weights import MAX_PICKLE_BYTES

ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 4, "block_size": 6, "bias": True, "vocab_size": 10, "dropout": 0.1}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_gpt(bias: bool, layers: int = 2) -> nn.Module:
    """A module with nanoGPT's parameter names, made from torch's own parts."""
    c = ARGS["n_embd"]

    def block() -> nn.Module:
        return nn.ModuleDict({
            "ln_1": nn.LayerNorm(c, bias=bias),
            "attn": nn.ModuleDict({"c_attn": nn.Linear(c, 3 * c, bias=bias), "c_proj": nn.Linear(c, c, bias=bias)}),
            "ln_2": nn.LayerNorm(c, bias=bias),
            "mlp": nn.ModuleDict({"c_fc": nn.Linear(c, 4 * c, bias=bias), "c_proj": nn.Linear(4 * c, c, bias=bias)}),
        })

    model = nn.ModuleDict({
        "transformer": nn.ModuleDict({
            "wte": nn.Embedding(10, c), "wpe": nn.Embedding(6, c), "h": nn.ModuleList(block() for _ in range(layers)),
            "ln_f": nn.LayerNorm(c, bias=bias)}),
        "lm_head": nn.Linear(c, 10, bias=False),
    })
    model["transformer"]["wte"].weight = model["lm_head"].weight
    return model


def groups_of_today(named: dict[str, Any]) -> list[list[Any]]:
    return [[p for p in named.values() if p.dim() >= 2], [p for p in named.values() if p.dim() < 2]]


def groups_until_2023(named: dict[str, Any]) -> list[list[Any]]:
    decayed = {name for name, p in named.items() if p.dim() >= 2 and "wte" not in name and "wpe" not in name}
    return [[named[name] for name in sorted(decayed)], [named[name] for name in sorted(set(named) - decayed)]]


def saved(path: Path, *, bias: bool = True, layers: int = 2, groups: Any = groups_of_today,
          prefix: str = "", **changes: Any) -> Any:
    """Trains two steps, saves as train.py does, and returns the module and its optimizer."""
    torch.manual_seed(0)
    model = tiny_gpt(bias, layers)
    decayed, others = groups(dict(model.named_parameters()))
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    content = {
        "model": {prefix + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(), "model_args": ARGS | {"bias": bias, "n_layer": layers}, "iter_num": 2,
        "best_val_loss": torch.tensor(1.5), "config": {"dataset": "x", "learning_rate": 6e-4},
    }
    for key, change in changes.items():
        content[key] = change(content[key])
    torch.save({key: value for key, value in content.items() if value is not None}, path)
    return model, optimizer


def without(*names: str) -> Any:
    return lambda mapping: {key: value for key, value in mapping.items() if key not in names}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [groups_of_today, groups_until_2023])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_weights_and_optimizer_are_loaded_by_name(tmp_path: Path, bias: bool, groups: Any, prefix: str) -> None:
    layers = 2 if prefix else 11  # with eleven, sorting by name (h.10 before h.2) is not the order of the layers
    model, optimizer = saved(tmp_path / "ckpt.pt", bias=bias, layers=layers, groups=groups, prefix=prefix)
    got = read_nanogpt(tmp_path / "ckpt.pt")
    assert got.gpt == GPTConfig(**ARGS | {"bias": bias, "n_layer": layers})
    assert (got.state["step"], got.state["best"]["mean"]) == (2, 1.5)
    assert got.config == {"dataset": "x", "learning_rate": 6e-4}
    named = dict(model.named_parameters())
    assert list(got.weights) == list(named)
    assert len(got.optimizer) == 3 * len(named)
    for name, parameter in named.items():
        assert torch.equal(got.weights[name], parameter)
        for part, tensor in optimizer.state[parameter].items():
            assert torch.equal(got.optimizer[f"{name}.{part}"], tensor)


@pytest.mark.parametrize("bias", [True, False])
def test_the_list_of_parameters_equals_that_of_the_module(bias: bool) -> None:
    config = GPTConfig(**ARGS | {"bias": bias})
    shapes = parameter_shapes(config)
    assert shapes == {name: tuple(p.shape) for name, p in tiny_gpt(bias).named_parameters()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == config.count_params()


def test_old_files_with_masks_without_bias_in_args_and_with_plain_step_numbers_are_read(tmp_path: Path) -> None:
    masks = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 6, 6) for n in range(2)}

    def plain_steps(optimizer: Any) -> Any:
        for entry in optimizer["state"].values():
            entry["step"] = int(entry["step"])
        return optimizer

    saved(tmp_path / "ckpt.pt", model=lambda model: model | masks, model_args=without("bias", "dropout"),
          optimizer=plain_steps, best_val_loss=float)
    got = read_nanogpt(tmp_path / "ckpt.pt")
    assert got.gpt.bias is True
    assert torch.equal(got.optimizer["transformer.wte.weight.step"], torch.tensor(2.0))
    assert not any(name.endswith(".attn.bias") for name in got.weights)


def test_the_form_torch_wrote_before_zip_is_read(tmp_path: Path) -> None:
    model, _ = saved(tmp_path / "zip.pt")
    torch.save(torch.load(tmp_path / "zip.pt"), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    got = read_nanogpt(tmp_path / "old.pt").weights
    assert torch.equal(got["transformer.wte.weight"], model["transformer"]["wte"].weight)


def test_an_optimizer_that_never_stepped_is_empty(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt.pt", optimizer=lambda stored: stored | {"state": {}})
    assert read_nanogpt(tmp_path / "ckpt.pt").optimizer == {}


def test_a_file_without_its_head_is_read_since_the_head_is_tied(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt.pt", model=without("lm_head.weight"))
    assert len(read_nanogpt(tmp_path / "ckpt.pt").weights) == len(parameter_shapes(GPTConfig(**ARGS)))


# ---- rejected files

class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Unknown:
    pass


def test_a_file_that_would_run_code_is_rejected_and_runs_nothing(tmp_path: Path) -> None:
    marker, bomb = tmp_path / "ran", Bomb(tmp_path / "ran")
    torch.save({"model": bomb}, tmp_path / "zip.pt")
    torch.save({"model": bomb}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"model": bomb}))
    saved(tmp_path / "nested.pt", config=lambda config: config | {"x": [bomb]})
    saved(tmp_path / "unknown.pt", config=lambda config: config | {"x": Unknown()})
    torch.save({"model": pickle.dumps(bomb)}, tmp_path / "wrapped.pt")
    for name in ("zip", "old", "raw", "nested", "unknown", "wrapped"):
        with pytest.raises(CheckpointError) as caught:
            read_nanogpt(tmp_path / f"{name}.pt")
        assert "weights_only" not in str(caught.value)  # torch's own advice is to open it anyway
    assert not marker.exists()
    with pytest.raises(CheckpointError, match=r"wants to call \w+\.system"):
        read_nanogpt(tmp_path / "zip.pt")


def test_files_that_are_no_torch_files_are_errors(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    saved(tmp_path / "ckpt.pt")
    whole = (tmp_path / "ckpt.pt").read_bytes()
    for number, content in enumerate((b"", b"junk", b"\0" * 5000, whole[:5000], whole[:-100], whole[3000:])):
        (path := tmp_path / f"{number}.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{number}.pt"):
            read_nanogpt(path)
    with pytest.raises(CheckpointError, match="no file"):
        read_nanogpt(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="no file"):
        read_nanogpt(tmp_path)
    assert not recwarn.list


def renamed(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("c_attn", "qkv"): value for key, value in mapping.items()}


def with_changed(key: str, value: Any) -> Any:
    return lambda mapping: mapping | {key: value}


def drop_one_state(optimizer: Any) -> Any:
    del optimizer["state"][3]
    return optimizer


def swap_two_numbers(optimizer: Any) -> Any:
    params = optimizer["param_groups"][0]["params"]
    params[0], params[2] = params[2], params[0]
    return optimizer


def one_group(optimizer: Any) -> Any:
    first, second = optimizer["param_groups"]
    return optimizer | {"param_groups": [first | {"params": first["params"] + second["params"]}]}


def amsgrad(optimizer: Any) -> Any:
    optimizer["state"][0]["max_exp_avg_sq"] = torch.zeros(10, 4)
    return optimizer


@pytest.mark.parametrize(("changes", "said"), [
    ({"model": lambda _: None}, "lacks model"),
    ({"optimizer": with_changed("param_groups", torch.ones(3))}, "is not the AdamW"),
    ({"optimizer": lambda _: None, "iter_num": lambda _: None}, "lacks optimizer, iter_num"),
    ({"best_val_loss": lambda _: None}, "lacks best_val_loss"),
    ({"best_val_loss": lambda _: "low"}, "lacks best_val_loss"),
    ({"model": renamed}, r"h\.0\.attn\.c_attn\.weight is missing.*and 3 more"),
    ({"model": without("transformer.ln_f.weight")}, r"transformer\.ln_f\.weight is missing"),
    ({"model": with_changed("transformer.wpe.weight", torch.zeros(7, 4))}, r"wpe\.weight is \[7, 4\] where \[6, 4\]"),
    ({"model": with_changed("transformer.wpe.weight", torch.zeros(6, 4).int())}, "holds torch.int32, and weights"),
    ({"model": with_changed("lm_head.weight", torch.zeros(11, 4).to(torch.float8_e5m2))}, "holds torch.float8_e5m2"),
    ({"model": with_changed("transformer.wpe.weight", "x")}, "no tensor as"),
    ({"model": with_changed("_orig_mod.transformer.wpe.weight", torch.zeros(6, 4))}, "twice"),
    ({"model": with_changed("lm_head.weight", torch.zeros(10, 4))}, "differs from transformer.wte.weight"),
    ({"model_args": with_changed("bias", False)}, "is no parameter of this shape"),
    ({"model_args": with_changed("n_layer", 10**12)}, "n_layer=1000000000000"),
    ({"model_args": with_changed("n_head", 3)}, "no multiple of n_head=3"),
    ({"model_args": with_changed("n_embd", 0)}, "n_embd=0"),
    ({"model_args": with_changed("vocab_size", None)}, "vocab_size=None"),
    ({"model_args": with_changed("dropout", float("nan"))}, "dropout=nan"),
    ({"optimizer": drop_one_state}, "optimizer"),
    ({"optimizer": swap_two_numbers}, "exp_avg of transformer.wte.weight"),
    ({"optimizer": one_group}, "optimizer"),
    ({"optimizer": amsgrad}, "max_exp_avg_sq"),
    ({"optimizer": without("state")}, "optimizer"),
])
def test_differences_from_the_expected_parameters_are_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    saved(tmp_path / "ckpt.pt", **changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_nanogpt(tmp_path / "ckpt.pt")
    assert caught.value.fix


# ---- damage, claims and values

def repacked(path: Path, compression: int, extra: int = 0) -> None:
    """Writes the records again, as an archiver does, with `extra` zeros after the pickle."""
    with zipfile.ZipFile(path) as opened:
        records = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(path, "w", compression) as out:
        for name, content in records.items():
            out.writestr(name, content + bytes(extra if name.endswith("data.pkl") else 0))


def test_a_damaged_weight_is_an_error_that_names_its_record(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    model, _ = saved(path)
    content = bytearray(path.read_bytes())
    place = content.find(model.state_dict()["transformer.wpe.weight"].numpy().tobytes())
    content[place + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its CRC-32"):
        read_nanogpt(path)


@pytest.mark.parametrize(("compression", "extra", "said"), [
    (zipfile.ZIP_DEFLATED, 0, "compressed records"), (zipfile.ZIP_DEFLATED, 2**20, "compressed records"),
    (zipfile.ZIP_STORED, MAX_PICKLE_BYTES, "the limit is 16.0 MiB")])
def test_a_file_that_was_packed_again_is_an_error(tmp_path: Path, compression: int, extra: int, said: str) -> None:
    path = tmp_path / "ckpt.pt"
    saved(path)
    repacked(path, compression, extra)
    with pytest.raises(CheckpointError, match=said):
        read_nanogpt(path)


def replaced(name: str, change: Any) -> Any:
    return lambda model: {key: change(value) if key == name else value for key, value in model.items()
                          if key != "lm_head.weight"}


def with_value(value: float) -> Any:
    return lambda tensor: tensor.clone().index_fill_(0, torch.tensor([1]), value)


def first_moment(key: str, value: float) -> Any:
    def change(optimizer: Any) -> Any:
        optimizer["state"][0][key] = torch.full_like(optimizer["state"][0][key], value)
        return optimizer
    return change


@pytest.mark.parametrize(("changes", "said"), [
    ({"model": replaced("transformer.wpe.weight", lambda t: t[:1, :1].expand(2**30, 2**8))}, "tensors of 1.00 TiB"),
    ({"model": replaced("transformer.wpe.weight", lambda t: t.to_sparse())}, "sparse, quantized or meta"),
    ({"model": replaced("transformer.wpe.weight", lambda t: t.to("meta"))}, "sparse, quantized or meta"),
    ({"model": replaced("transformer.wte.weight", with_value(math.nan))}, "wte.weight has values that are NaN"),
    ({"model": replaced("transformer.h.1.ln_2.weight", with_value(-math.inf))}, "ln_2.weight has values that are NaN"),
    ({"optimizer": first_moment("exp_avg", math.nan)}, "exp_avg has values that are NaN"),
    ({"optimizer": first_moment("exp_avg_sq", -1.0)}, "exp_avg_sq is negative"),
    ({"optimizer": first_moment("step", math.nan)}, "step has values that are NaN"),
    ({"iter_num": lambda _: -5}, "iter_num is -5"),
    ({"iter_num": lambda _: 2**62}, "iter_num is 4611686018427387904"),
])
def test_absurd_claims_and_values_are_errors(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "ckpt.pt"
    saved(path, **changes)
    with pytest.raises(CheckpointError, match=said):
        read_nanogpt(path)


def test_a_best_loss_that_is_not_finite_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    saved(path, best_val_loss=lambda _: torch.tensor(math.nan))
    assert read_nanogpt(path).state["best"] is None
