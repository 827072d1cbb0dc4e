"""Exports open in transformers with the same logits; GPT-2 folders are read, or rejected with a message."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fitgpt.config.architectures import GPTConfig, parameter_shapes
from fitgpt.core.errors import DataError, SystemFault, UsageError
from fitgpt.core.extras import install_command
from fitgpt.engine.huggingface import find_gpt2, read_folder, write_folder
from fitgpt.engine.model import build_model
from fitgpt.engine.weights import fill

SHAPE = GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=2, n_embd=8)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [39, 0, 11, 7, 7, 7, 30, 2]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def random_model(config: GPTConfig) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    # larger than an initialization: GELU's forms and misplaced biases must show in the logits
    return {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}


def logits(config: GPTConfig, model: dict[str, Any], tokens: Any, gelu: str = "none") -> Any:
    """nanoGPT's arithmetic from its parameter names alone."""
    c, heads = config.n_embd, config.n_head
    length = tokens.shape[1]

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, model[f"{name}.weight"], model.get(f"{name}.bias"))

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (c,), model[f"{name}.weight"], model.get(f"{name}.bias"), 1e-5)

    x = model["transformer.wte.weight"][tokens] + model["transformer.wpe.weight"][:length]
    hidden = torch.ones(length, length).triu(1).bool()
    for number in range(config.n_layer):
        block = f"transformer.h.{number}"
        q, k, v = (part.unflatten(-1, (heads, c // heads)).transpose(1, 2)
                   for part in linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(c, dim=-1))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(c // heads)).masked_fill(hidden, -math.inf).softmax(-1)
        x = x + linear((weights @ v).transpose(1, 2).flatten(-2), f"{block}.attn.c_proj")
        up = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate=gelu)
        x = x + linear(up, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ model["transformer.wte.weight"].t()


# ---- out

@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "chars"])
def test_an_export_opens_in_transformers_with_the_same_logits(
    tmp_path: Path, transformers: Any, bias: bool, tokenizer: str
) -> None:
    config = GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=2, n_embd=8, bias=bias, dropout=0.1)
    model = random_model(config)
    write_folder(tmp_path / "out", config, model | {"lm_head.weight": model["transformer.wte.weight"]},
                 tokenizer=tokenizer)
    opened, loading_info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert not loading_info["mismatched_keys"]
    with torch.no_grad():
        got = opened.eval()(TOKENS).logits
    assert torch.allclose(got, logits(config, model, TOKENS), atol=1e-4, rtol=0)
    assert opened.config.eos_token_id == {"gpt2": 50256, "bytes": 256, "chars": None}[tokenizer]
    assert opened.generation_config.eos_token_id == {"gpt2": 50256, "bytes": 256, "chars": None}[tokenizer]
    assert (tmp_path / "out" / "generation_config.json").exists() is (tokenizer != "chars")


def test_the_exported_activation_is_the_exact_gelu_and_another_differs(tmp_path: Path) -> None:
    model = random_model(SHAPE)
    exact, by_tanh = (logits(SHAPE, model, TOKENS, gelu) for gelu in ("none", "tanh"))
    assert (exact - by_tanh).abs().max() > 3e-4  # so the test above would notice the wrong one
    written = write_folder(tmp_path / "out", SHAPE, model) / "config.json"
    assert json.loads(written.read_text())["activation_function"] == "gelu"


def test_an_export_reads_back_as_it_was(tmp_path: Path) -> None:
    model = random_model(SHAPE)
    write_folder(tmp_path / "out", SHAPE, model)
    back = read_folder(tmp_path / "out")
    assert (back.gpt, back.notes) == (SHAPE, ())
    assert back.weights.keys() == model.keys()
    assert all(torch.equal(back.weights[name], model[name]) for name in model)


def test_an_earlier_export_is_replaced_and_an_empty_folder_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    model = random_model(SHAPE)
    for shift in (0, 1):
        shifted = {name: tensor + shift for name, tensor in model.items()}
        write_folder(tmp_path / "out", SHAPE, shifted, tokenizer="gpt2")
        weight = read_folder(tmp_path / "out").weights["transformer.ln_f.weight"]
        assert torch.equal(weight, model["transformer.ln_f.weight"] + shift)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def a_file(out: Path) -> None:
    out.write_text("mine")


def a_folder_with_notes(out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def anothers_model(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "gpt2"}')


def an_export_with_additions(out: Path) -> None:
    write_folder(out, SHAPE, random_model(SHAPE))
    (out / "tokenizer.json").write_text("mine")


def a_dangling_link(out: Path) -> None:
    out.symlink_to(out.parent / "gone")


@pytest.mark.parametrize("occupy", [a_file, a_folder_with_notes, anothers_model, an_export_with_additions,
                                    a_dangling_link])
def test_nothing_else_is_overwritten(tmp_path: Path, occupy: Any) -> None:
    occupy(tmp_path / "out")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(UsageError, match="not overwritten"):
        write_folder(tmp_path / "out", SHAPE, random_model(SHAPE))
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_an_invalid_name_and_an_unwritable_place_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a name"):
        write_folder(tmp_path / "a\0b", SHAPE, random_model(SHAPE))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemFault, match="Not a directory"):
        write_folder(tmp_path / "file" / "out", SHAPE, random_model(SHAPE))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_export_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    model = random_model(SHAPE)
    write_folder(tmp_path / "out", SHAPE, model)
    real = getattr(os, failing)

    def fail(*given: Any) -> None:
        if failing == "replace" and not str(given[0]).endswith(str(os.getpid())):
            return real(*given)  # moving the earlier one out of the way and back works
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        patched.setattr("fitgpt.core.files._exchange", lambda one, other: False)  # as on most other systems than Linux
        with pytest.raises(SystemFault, match="No space left"):
            write_folder(tmp_path / "out", SHAPE, {name: tensor + 1 for name, tensor in model.items()})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(read_folder(tmp_path / "out").weights["transformer.wte.weight"], model["transformer.wte.weight"])


# ---- in

@pytest.fixture(scope="module")
def gpt2(transformers: Any) -> Any:
    torch.manual_seed(2)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shard", ["10GB", "4KB"])
def test_a_folder_by_save_pretrained_loads_with_the_same_logits(tmp_path: Path, gpt2: Any, shard: str) -> None:
    gpt2.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard == "4KB")
    got = read_folder(tmp_path)
    assert got.gpt == SHAPE
    with torch.no_grad():
        theirs = gpt2(TOKENS).logits
    assert torch.allclose(logits(SHAPE, got.weights, TOKENS, gelu="tanh"), theirs, atol=1e-4, rtol=0)
    assert "gelu_new" in got.notes[0]
    assert "exact GELU" in got.notes[0]


def the_hubs_names(gpt2: Any) -> dict[str, Any]:
    """As in OpenAI's own upload: no `transformer.` prefix, mask buffers inside, no head."""
    bare = {name.removeprefix("transformer."): tensor.detach().clone() for name, tensor in gpt2.state_dict().items()
            if name != "lm_head.weight"}
    for number in range(2):
        bare[f"h.{number}.attn.bias"] = torch.ones(1, 1, 16, 16)
        bare[f"h.{number}.attn.masked_bias"] = torch.tensor(-1e4)
    return bare


def bin_folder(path: Path, gpt2: Any, **changes: Any) -> Path:
    gpt2.config.save_pretrained(path)
    torch.save(the_hubs_names(gpt2) | changes, path / "pytorch_model.bin")
    return path


def test_parameter_names_of_the_hub_in_a_bin_file_are_read(tmp_path: Path, gpt2: Any) -> None:
    got = read_folder(bin_folder(tmp_path, gpt2))
    with torch.no_grad():
        assert torch.allclose(logits(SHAPE, got.weights, TOKENS, gelu="tanh"), gpt2(TOKENS).logits, atol=1e-4, rtol=0)


def test_half_precision_weights_are_read_as_such_and_become_float32_in_the_model(tmp_path: Path,
                                                                                 gpt2: Any) -> None:
    bin_folder(tmp_path, gpt2, **{name: tensor.half() for name, tensor in the_hubs_names(gpt2).items()})
    source = read_folder(tmp_path)
    tensors = source.weights
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    model = build_model(source.gpt, torch.device("cpu"), 0)
    fill(model, tensors, "")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[name].float())


@pytest.mark.parametrize(("changes", "said"), [
    ({"wte.weight": torch.zeros(41, 8)}, r"wte\.weight is \[41, 8\] where \[40, 8\]"),
    ({"h.0.attn.c_attn.weight": torch.zeros(24, 8)}, "c_attn"),
    ({"h.2.ln_1.weight": torch.zeros(8)}, "no parameter"),
    ({"lm_head.weight": torch.zeros(40, 8)}, "differs"),
    ({"wte.weight": "text"}, "named tensors"),
])
def test_weights_that_do_not_match_are_named(tmp_path: Path, gpt2: Any, changes: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_folder(bin_folder(tmp_path, gpt2, **changes))


@pytest.mark.parametrize(("key", "value"), [
    ("model_type", "llama"), ("n_embd", 9), ("n_layer", 0), ("n_layer", "two"), ("n_layer", 10**9), ("n_inner", 9),
    ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6), ("scale_attn_weights", False),
    ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True), ("tie_word_embeddings", False),
])
def test_a_model_that_is_not_this_gpt_is_an_error_that_names_the_setting(
    tmp_path: Path, gpt2: Any, key: str, value: Any
) -> None:
    bin_folder(tmp_path, gpt2)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(DataError, match=key):
        read_folder(tmp_path)


def test_a_bin_file_that_would_run_code_is_rejected(tmp_path: Path, gpt2: Any) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with pytest.raises(DataError, match="wants to call"):
        read_folder(bin_folder(tmp_path, gpt2, bomb=Bomb()))
    assert not (tmp_path / "ran").exists()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json is missing"):
        read_folder(tmp_path / "nowhere")
    folder = write_folder(tmp_path / "x", SHAPE, random_model(SHAPE))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", b"junk", whole[:100], whole[:-1], b"\xff" * 8 + whole[8:]):
        weights.write_bytes(content)
        with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
            read_folder(folder)
    weights.unlink()
    with pytest.raises(DataError, match="holds no weights"):
        read_folder(folder)
    (tmp_path / "secret.safetensors").write_bytes(whole)
    for index in ({"weight_map": {"a": "../secret.safetensors"}}, {"weight_map": {"a": "gone.safetensors"}}, {}, []):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(DataError, match=r"index\.json names"):
            read_folder(folder)


def test_numbers_of_a_kind_that_no_gpt_has_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "x", SHAPE, random_model(SHAPE))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["transformer.ln_f.weight"].update(dtype="F4", shape=[64])  # 64 × 4 bits in place of 8 × 32
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
    with pytest.raises(DataError, match=r"ln_f\.weight holds torch\.float4_e2m1fn_x2, and weights are one of"):
        read_folder(folder)


# ---- GPT-2 by name

@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No weights anywhere and no hub library."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


SNAPSHOT = "models--openai-community--gpt2-xl/snapshots/abc"


@pytest.mark.parametrize(("variable", "value", "place"), [
    (None, "", "gpt2-xl"),
    (None, "", "models/gpt2-xl"),
    (None, "", f"home/.cache/huggingface/hub/{SNAPSHOT}"),
    (None, "", "home/.cache/huggingface/hub/models--gpt2-xl/snapshots/abc"),
    ("HF_HUB_CACHE", "cache", f"cache/{SNAPSHOT}"),
    ("HF_HOME", "hf", f"hf/hub/{SNAPSHOT}"),
    ("XDG_CACHE_HOME", "xdg", f"xdg/huggingface/hub/{SNAPSHOT}"),
])
def test_weights_are_found_in_the_usual_folders(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, value: str, place: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(bare_machine / value))
    put_weights(bare_machine / place)
    assert find_gpt2("gpt2-xl").resolve() == (bare_machine / place).resolve()
    with pytest.raises(DataError):
        find_gpt2("gpt2")


def test_the_current_snapshot_is_preferred_and_an_incomplete_one_skipped(bare_machine: Path) -> None:
    cached = bare_machine / "home/.cache/huggingface/hub/models--openai-community--gpt2"
    for commit in ("aaa", "bbb"):
        put_weights(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("bbb\n")
    assert find_gpt2("gpt2").name == "bbb"
    (cached / "snapshots" / "bbb" / "model.safetensors").unlink()
    assert find_gpt2("gpt2").name == "aaa"


def test_without_weights_and_hub_library_the_error_names_the_pip_command(bare_machine: Path) -> None:
    with pytest.raises(DataError, match="gpt2-medium are not on this machine") as caught:
        find_gpt2("gpt2-medium")
    assert f"{install_command('hub')} and run this again" in caught.value.fix
    assert "hf download openai-community/gpt2-medium config.json model.safetensors" in caught.value.fix


def test_only_what_is_needed_is_fetched(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download: dict[str, Any] = {}

    def snapshot_download(repository: str, *, allow_patterns: list[str]) -> str:
        download.update(repository=repository, files=allow_patterns)
        return str(put_weights(bare_machine / "fetched"))

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert find_gpt2("gpt2-large") == bare_machine / "fetched"
    assert download == {"repository": "openai-community/gpt2-large", "files": ["config.json", "model.safetensors"]}


def test_an_unreachable_hub_is_an_error_without_traceback(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route to the hub\nand a long story")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=unreachable))
    with pytest.raises(DataError, match="no route to the hub") as caught:
        find_gpt2("gpt2")
    assert "long story" not in caught.value.what
    assert "hf download" in caught.value.fix
