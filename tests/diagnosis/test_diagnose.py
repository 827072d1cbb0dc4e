"""Messages computed from a replay: the diagnosis must find the allocation that failed, and what would fit."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, MiB
from fitgpt.diagnosis.case import ExplainedRun, build_case, card_with, guess_logits, is_segment_size, usage_in
from fitgpt.diagnosis.diagnose import Diagnosis, diagnose
from fitgpt.diagnosis.oom_message import OomMessage, parse_oom_message
from fitgpt.hardware import gpus
from fitgpt.memory.tape import Event
from fitgpt.planning.budget import Budget, budget_for, platform_for
from fitgpt.planning.changes import fits
from fitgpt.planning.forecast import tensor_formula
from tests.diagnosis.simulated_oom import SimulatedOom, simulate_oom

ROOT = Path(__file__).parent.parent.parent
CARD = gpus.find("4070")
SETTING = platform_for(CARD, torch="2.11")  # the version that was measured


def notes_77m(trainer: str = "nanogpt", *flags: str) -> ExplainedRun:
    """The run of the notes: 12 layers, width 576, batch 16 × 1024, float16."""
    path = str(ROOT / "config" / "notes_77m.py")
    return ExplainedRun(build(RunConfig, walk([path, *flags], RunConfig)), trainer, SETTING, "config/notes_77m.py")


def shallow(trainer: str = "nanogpt", *flags: str) -> ExplainedRun:
    """The run of the notes with 4 layers: without compile it fails at the same tensor, and is replayed faster."""
    return notes_77m(trainer, "--n_layer=4", *flags)


def message(text: str) -> OomMessage:
    found = parse_oom_message(text)
    assert found is not None
    return found


def run_out(run: ExplainedRun, others_mib: int = 0) -> tuple[SimulatedOom, Budget]:
    budget = budget_for(CARD, others=others_mib * MiB)
    found = simulate_oom(run, budget)
    assert found is not None
    return found, budget


def codes(diagnosis: Diagnosis) -> list[str]:
    return [cause.code for cause in diagnosis.causes]


# ---- the notes: 77M on a 4070, in evaluation


def test_an_oom_in_nanogpts_evaluation_names_the_tensor() -> None:
    run = notes_77m("nanogpt", "--compile=False")
    found, _ = run_out(run, others_mib=2118)
    diagnosis = diagnose(message(found.text), run, CARD)
    assert diagnosis.what.startswith("16 × 1,024 × 50,304 × 4 bytes: the float32 copy of the log-probabilities")
    assert "in the first evaluation phase" in diagnosis.what
    assert "the forecast runs out of memory at exactly this allocation" in diagnosis.what
    assert codes(diagnosis) == ["OOM-EVAL", "OOM-LOGITS", "OOM-FRAGMENTED", "OOM-NEIGHBOUR"]  # those that decide first
    assert diagnosis.causes[-1].what.endswith("hold 2.07 GiB of the GPU. Without them the run would still not fit.")
    assert {share.what: round(share.nbytes / MiB, -1) for share in diagnosis.shares}["other processes"] == 2120


def test_remedies_have_flags_and_fit() -> None:
    run = shallow("nanogpt", "--compile=False")
    found, budget = run_out(run, others_mib=2118)
    diagnosis = diagnose(message(found.text), run, CARD)
    computed = {remedy.todo: remedy for remedy in diagnosis.remedies if remedy.fits}
    assert "fitgpt train config/notes_77m.py" in computed
    smaller = next(todo for todo in computed if todo.startswith("--batch_size"))
    again = shallow("nanogpt", "--compile=False", *smaller.split())
    assert fits(again.resolved, SETTING, budget.reserve_limit, "nanogpt")
    assert again.config.tokens_per_step == run.config.tokens_per_step
    assert "less" in computed[smaller].effect


def test_a_run_that_fits_without_other_processes_names_them_first() -> None:
    run = notes_77m()
    found, _ = run_out(run, others_mib=2118)
    diagnosis = diagnose(message(found.text), run, CARD)
    assert codes(diagnosis)[0] == "OOM-NEIGHBOUR"
    assert "Without them the run would fit." in diagnosis.causes[0].what
    assert "With expandable_segments the run would still not fit." in diagnosis.causes[-1].what
    assert simulate_oom(run, budget_for(CARD)) is None


def test_without_a_config_the_tensor_is_marked_as_a_guess() -> None:
    found, _ = run_out(notes_77m("nanogpt", "--compile=False"), others_mib=2118)
    diagnosis = diagnose(message(found.text))
    assert diagnosis.what.startswith("A guess: ")
    assert "16,384 tokens in float32 (16,384 × 50,304 × 4 bytes)" in diagnosis.what
    assert any("config" in each for each in diagnosis.needed)


# ---- any run, any GPU


@pytest.mark.parametrize(("trainer", "shape", "gpu", "others"), [
    ("nanogpt", dict(n_embd=768, batch_size=12, compile=False), "3060", 0),
    ("nanogpt", dict(n_embd=768, batch_size=12, compile=True), "4060", 0),
    ("nanogpt", dict(n_embd=768, batch_size=12, compile=False, dtype="float32"), "4070", 0),
    ("nanogpt", dict(n_layer=24, n_head=16, n_embd=1024, batch_size=8, compile=True), "4070", 2118),
    ("fitgpt", dict(n_layer=24, n_head=16, n_embd=1024, batch_size=16, compile=False), "4060", 0),
    ("fitgpt", dict(n_layer=24, n_head=16, n_embd=1024, batch_size=32, compile=True), "4070", 0),
])
def test_the_failed_allocation_is_found(trainer: str, shape: dict[str, Any], gpu: str, others: int) -> None:
    card = gpus.find(gpu)
    config = RunConfig(**{"gradient_accumulation_steps": 4, "dtype": "float16", **shape})
    run = ExplainedRun(config, trainer, platform_for(card))
    found = simulate_oom(run, budget_for(card, others=others * MiB))
    assert found is not None
    for text in (found.text, found.old_text):  # with and without the process's own figure
        facts = build_case(message(text), run, card)
        assert facts.match is not None
        assert (facts.match.event.name, facts.match.phase) == (found.event.name, found.phase)
        assert facts.plan is not None
        assert not facts.plan.fits


def test_every_remedy_that_claims_to_fit_fits() -> None:
    run = shallow("fitgpt", "--batch_size=256", "--compile=False")
    found, budget = run_out(run)
    diagnosis = diagnose(message(found.text), run, CARD)
    promised = [remedy for remedy in diagnosis.remedies if remedy.fits]
    assert len(promised) >= 2
    for remedy in promised:
        again = shallow("fitgpt", "--batch_size=256", "--compile=False", *remedy.todo.split())
        assert fits(again.resolved, SETTING, budget.reserve_limit, "fitgpt"), remedy.todo


def test_a_size_that_the_config_never_requests_is_reported() -> None:
    run = shallow("nanogpt", "--compile=False")
    found, _ = run_out(run, others_mib=2118)
    diagnosis = diagnose(message(found.text.replace("3.07 GiB", "3.33 GiB")), run, CARD)
    assert "No allocation of this config" in diagnosis.what
    assert "OOM-LOGITS" not in codes(diagnosis)


def test_a_config_that_fits_gets_no_promised_fix() -> None:
    """The message is of a program that holds more than the config's tape: said, and nothing promised."""
    run = shallow("nanogpt", "--batch_size=2", "--compile=False")
    found, _ = run_out(shallow("nanogpt", "--compile=False"))
    diagnosis = diagnose(message(found.text), run, CARD)
    assert any("would have fitted" in note for note in diagnosis.notes)
    assert all(remedy.fits is None for remedy in diagnosis.remedies)


# ---- sizes that do not show the tensor


ALMOST_FULL = ("CUDA out of memory. Tried to allocate {size} (GPU 0; 11.65 GiB total capacity; 11.20 GiB already "
               "allocated; 10.00 MiB free; 11.30 GiB reserved in total by PyTorch)")


@pytest.mark.parametrize(("requested", "message_part"), [("20.00 MiB", "1 to 10 MiB"), ("2.00 MiB", "up to 1 MiB")])
def test_a_segment_size_does_not_name_a_tensor(requested: str, message_part: str) -> None:
    found = message(ALMOST_FULL.format(size=requested))
    assert is_segment_size(found)
    assert message_part in diagnose(found).what
    assert build_case(found, shallow("nanogpt", "--compile=False"), CARD).match is None


@pytest.mark.parametrize("requested", ["384.00 MiB", "512.00 MiB", "1.53 GiB", "17.37 GiB", "88.00 MiB", "246.00 MiB"])
def test_other_sizes_are_not_guessed_to_be_logits(requested: str) -> None:
    """Attention scores, and shapes of other models, as threads have them."""
    guess = guess_logits(message(ALMOST_FULL.format(size=requested)))
    assert guess == "" or requested == "1.53 GiB"  # 8 × 1024 × 50257 × 4 bytes: it is


def test_memory_within_the_context_size_is_not_attributed_to_others() -> None:
    fill = usage_in(message(ALMOST_FULL.format(size="148.00 MiB")))
    assert fill is not None
    assert fill.others is None
    assert fill.others_at_least == 0
    assert fill.not_pytorch == pytest.approx((11.65 - 11.30) * 1024 * MiB - 10 * MiB, abs=MiB)


def test_a_card_is_identified_by_usable_memory_only_if_unique() -> None:
    usable = {card.name: card.usable_mib for card in gpus.load() if card.usable_mib}
    assert card_with(usable["T4"] * MiB) == gpus.find("T4")
    assert card_with(usable["RTX 4070"] * MiB) is None  # the Ti and the SUPER have as much
    assert card_with(3 * MiB) is None


# ---- messages that are cut

CUT = ("torch.OutOfMemoryError: {} out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
       "of which 1.20 GiB is free.")


def test_a_truncated_message_does_not_attribute_used_memory() -> None:
    diagnosis = diagnose(message(CUT.format("CUDA")))
    assert codes(diagnosis) == ["OOM-CUT"]
    assert "22.49 GiB of the GPU's 23.69 GiB are in use, and the message does not say by which process" in (
        diagnosis.causes[0].what)
    assert [(share.what, round(share.nbytes / GiB, 2)) for share in diagnosis.shares] == [
        ("in use", 22.49), ("free", 1.2)]
    assert [remedy.todo for remedy in diagnosis.remedies][:2] == ["the message to its end", "nvidia-smi"]


def test_a_truncated_message_names_the_listed_process() -> None:
    diagnosis = diagnose(message(f"{CUT.format('CUDA')} Process 411 has 5.00 GiB memory in use."))
    assert diagnosis.shares[0].note == "process 411: 5,120 MiB; of the rest the message does not say by which process"


def test_a_truncated_message_uses_its_traceback() -> None:
    traced = ('File "train.py", line 310, in <module>\n    scaler.scale(loss).backward()\n'
              "RuntimeError: CUDA out of memory.")
    assert codes(diagnose(message(traced))) == ["OOM-BACKWARD", "OOM-CUT"]


@pytest.mark.parametrize("text", [
    CUT.format("HIP"), "RuntimeError: HIP error: out of memory", "HIP error: HIPBLAS_STATUS_ALLOC_FAILED",
    f"{CUT.format('HIP')} Of the allocated memory 1.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved by "
    "PyTorch but unallocated.", CUT.format("HIP").replace("1.20 GiB", "2.20 GiB")])
def test_amd_users_get_amd_tools(text: str) -> None:
    diagnosis = diagnose(message(text))
    said = [*(remedy.todo for remedy in diagnosis.remedies), *diagnosis.needed]
    assert any("rocm-smi" in each for each in said)
    assert not any("nvidia-smi" in each or "CUDA_" in each for each in said)


SHORT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.07 GiB."


@pytest.mark.parametrize("text", [SHORT, "RuntimeError: CUDA out of memory.", "CUBLAS_STATUS_ALLOC_FAILED",
                                  CUT.format("CUDA").replace("23.69", "11.65")])
def test_a_short_message_with_config_and_card_gets_forecast_remedies(text: str) -> None:
    run = shallow("nanogpt", "--compile=False")
    diagnosis = diagnose(message(text), run, CARD)
    computed = {remedy.todo: remedy for remedy in diagnosis.remedies if remedy.fits}
    assert "fitgpt train config/notes_77m.py" in computed
    smaller = next(todo for todo in computed if todo.startswith("--batch_size"))
    again = shallow("nanogpt", "--compile=False", *smaller.split())
    assert fits(again.resolved, SETTING, budget_for(CARD).reserve_limit, "nanogpt")
    assert all("allocated at the peak" in remedy.effect for remedy in computed.values())
    assert not any("half the --batch_size" in remedy.todo or "…" in remedy.todo for remedy in diagnosis.remedies)
    assert any("on the RTX 4070 with no other processes" in note for note in diagnosis.notes)


def test_given_memory_of_other_processes_reduces_the_budget() -> None:
    facts = build_case(message(SHORT), shallow("nanogpt", "--compile=False"), CARD, others=2118 * MiB)
    assert facts.plan is not None
    assert facts.plan.budget == budget_for(CARD, others=2118 * MiB)


def test_a_run_that_fits_its_card_asks_for_others() -> None:
    card = gpus.find("4090")
    diagnosis = diagnose(message(SHORT), shallow("nanogpt", "--compile=False"), card)
    assert any("it would have fitted. Either other processes held some of the GPU" in note for note in diagnosis.notes)


def test_a_card_without_figures_gets_no_plan() -> None:
    assert build_case(message(SHORT), notes_77m(), gpus.find("7900 XTX")).plan is None


# ---- the size of a tensor, by what it is


def test_a_loss_chunk_is_described_by_its_rows() -> None:
    path = str(ROOT / "config" / "gpt2_774m.py")
    run = ExplainedRun(build(RunConfig, walk([path], RunConfig)), "fitgpt", SETTING, path)
    short = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 198.00 MiB."
    assert diagnose(message(short), run).what.startswith("2,048 × 50,304 × 2 bytes: the logits of one chunk")
    assert "logits: 2,048 × 50,304 × 2 bytes" in {  # as `plan` has it
        f"{share.owner}: {share.formula}" for share in run.forecast.owners_at_peak}


@pytest.mark.parametrize(("owner", "name", "sides"), [
    ("weights", "wte", (50304, 576)), ("gradients", "3.c_attn.grad", (576, 3 * 576)),
    ("optimizer", "3.mlp.c_proj.weight.exp_avg", (4 * 576, 576)), ("casts", "3.c_fc.weight.cast", (576, 4 * 576)),
    ("activations", "3.qkv", (16, 1024, 576)), ("activations", "d_positions", (1024, 576)),
    ("data", "X1", (16, 1024)), ("workspace", "attention sums", ()), ("optimizer", "3.down.bias.exp_avg", ())])
def test_the_formula_of_a_tensor_has_its_dimensions(owner: str, name: str, sides: tuple[int, ...]) -> None:
    nbytes = prod(sides or (16, 1024, 576)) * 4
    formula = tensor_formula(Event(True, name, owner, nbytes), notes_77m().resolved, "nanogpt", "train")
    assert formula == (" × ".join(f"{side:,}" for side in (*sides, 4)) + " bytes" if sides else "36.0 MiB")
