"""A reading of nvidia-smi: where each MiB is, with the config and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import UsageError
from fitgpt.core.units import MiB
from fitgpt.diagnosis import explain
from fitgpt.diagnosis.case import ExplainedRun, ExplainRequest
from fitgpt.diagnosis.nvidia_smi import SmiGpu, SmiProcess, parse_fragment, parse_nvidia_smi
from fitgpt.diagnosis.reading import Reading, card_of, explain_reading, reading_of
from fitgpt.hardware import gpus
from fitgpt.planning.budget import platform_for

ROOT = Path(__file__).parent.parent.parent
CARD = gpus.find("4070")


def notes_30m(trainer: str = "nanogpt", *flags: str) -> ExplainedRun:
    path = str(ROOT / "config" / "notes_30m.py")
    config = build(RunConfig, walk([path, *flags], RunConfig))
    return ExplainedRun(config, trainer, platform_for(CARD, torch="2.11"), "config/notes_30m.py")


# The shape of the screen as driver 550 prints it; the figures of the notes, on the GPU of the notes.
SCREEN = """Sat Nov 15 10:00:00 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.163.01             Driver Version: 550.163.01     CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 4070        Off |   00000000:01:00.0  On |                  N/A |
| 40%   62C    P2            187W /  200W |    6582MiB /  12282MiB |     98%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A      2163      G   /usr/lib/xorg/Xorg                            642MiB |
|    0   N/A  N/A      2391      G   /usr/bin/gnome-shell                          120MiB |
|    0   N/A  N/A      4711      C   .../envs/gpt/bin/python                      4464MiB |
|    0   N/A  N/A      5822    C+G   ...irefox/5889/usr/lib/firefox/firefox       1310MiB |
+-----------------------------------------------------------------------------------------+
"""
# From github.com/karpathy/minGPT/issues/1, an older driver.
OLD_SCREEN = """+-----------------------------------------------------------------------------+
| NVIDIA-SMI 450.57       Driver Version: 418.67       CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  Tesla P100-PCIE...  Off  | 00000000:00:04.0 Off |                    0 |
| N/A   38C    P0    31W / 250W |  16273MiB / 16280MiB |      0%      Default |
|                               |                      |                 ERR! |
+-------------------------------+----------------------+----------------------+
"""


# ---- the notes: 30M, 6582 MiB on the GPU, 4464 by the process


def test_a_reading_is_attributed_to_the_mib() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, 4464 * MiB), notes_30m(), CARD)
    shares = {share.what: share.nbytes for share in diagnosis.shares}
    assert sum(shares.values()) == 6582 * MiB
    assert shares["other processes"] == 2118 * MiB
    assert shares["this process outside PyTorch"] == CARD.outside_mib * MiB  # type: ignore[operator]
    assert shares["logits"] == 16 * 512 * 50304 * 6
    assert max((owner for owner in shares if owner != "other processes"), key=lambda owner: shares[owner]) == "logits"
    assert "nanoGPT's train.py in the training phase" in diagnosis.what


def test_a_process_smaller_than_its_context_keeps_its_size() -> None:
    diagnosis = explain_reading(Reading(300 * MiB, 100 * MiB), notes_30m(), CARD)
    assert sum(share.nbytes for share in diagnosis.shares) == 300 * MiB


def test_more_than_the_card_has_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is more than the RTX 4070 has"):
        explain_reading(Reading(20 * 1024 * MiB, 4464 * MiB), notes_30m(), CARD)


def test_without_a_process_figure_the_trainer_that_leaves_least_to_others_is_taken() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, None), notes_30m("fitgpt"), CARD, "auto")
    assert diagnosis.title == ("6,582 MiB of the GPU are used: 4,496 by this process, according to the forecast, 2,086 "
                               "by others.")
    assert any("fitgpt would hold 1,360 MiB and leave 5,222 to others: --trainer=fitgpt." in note
               for note in diagnosis.notes)
    small = explain_reading(Reading(3000 * MiB, None), notes_30m("nanogpt"), CARD, "auto")  # nanoGPT would hold more
    assert "1,360 by this process" in small.title
    given = explain_reading(Reading(6582 * MiB, None), notes_30m("fitgpt"), CARD, "fitgpt")
    assert "1,360 by this process" in given.title
    assert not any("--trainer" in note for note in given.notes)


def test_a_forecast_above_the_reading_is_not_taken() -> None:
    diagnosis = explain_reading(Reading(900 * MiB, None), notes_30m("fitgpt"), CARD, "auto")
    assert any("holds 1,360 MiB, more than is used" in note for note in diagnosis.notes)
    assert sum(share.nbytes for share in diagnosis.shares) == 900 * MiB


def test_a_reading_ends_with_changes_and_the_nearest_recorded_run() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, 4464 * MiB), notes_30m(), CARD)
    assert [remedy.todo for remedy in diagnosis.remedies][:1] == ["fitgpt train config/notes_30m.py"]
    assert all("less" in remedy.effect for remedy in diagnosis.remedies)
    assert diagnosis.notes[-1].startswith("Nearest recorded run: 30.14M parameters, batch 16 × 512, float16, compiled, "
                                          "H200: measured 3.56 GiB allocated, 4.17 GiB reserved; forecast")
    assert explain_reading(Reading(6582 * MiB, None)).remedies  # without a config, too


def test_the_process_close_to_the_forecast_is_the_run() -> None:
    runs = [SmiProcess(44021, "python", 4464 * MiB),
            SmiProcess(44022, "python", 6464 * MiB)]
    gpu = SmiGpu(0, "NVIDIA GeForce RTX 4070", 11500 * MiB, 12282 * MiB, tuple(runs))
    chosen = {sizes: reading_of(gpu, None, sizes) for sizes in ((), (4496 * MiB,), (9000 * MiB, 4496 * MiB))}
    assert [each.process for each in chosen.values()] == [6464 * MiB, 4464 * MiB, 4464 * MiB]
    assert [each.pid for each in chosen[4496 * MiB,].processes] == [44022]


def test_an_eager_run_does_not_match_a_compiled_reading() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, 4464 * MiB), notes_30m("nanogpt", "--compile=False"), CARD)
    assert "The run has another config or trainer" in diagnosis.what


def test_the_reading_selects_the_clearly_closer_trainer() -> None:
    run = notes_30m("fitgpt")
    diagnosis = explain_reading(Reading(6582 * MiB, 4464 * MiB), run, CARD, "auto")
    assert "under nanoGPT's train.py in the training phase" in diagnosis.what
    assert {share.what: share.nbytes for share in diagnosis.shares}["logits"] == 16 * 512 * 50304 * 6
    assert diagnosis.notes[-2] == (
        "The trainer was not given. nanoGPT's forecast, 4,496 MiB, 0.7% more than was read, is the closer one; "
        "fitgpt's is 1,360 MiB, 70% less than was read. --trainer=fitgpt selects it.")
    own = run.forecast.reserved + 196 * MiB
    ours = explain_reading(Reading(own, own), run, CARD, "auto")
    assert "under fitgpt in the training phase" in ours.what
    assert ours.notes[-2].endswith("--trainer=nanogpt selects it.")


def test_two_distant_trainers_are_not_distinguished() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, 2500 * MiB), notes_30m("fitgpt"), CARD, "auto")
    assert "config under fitgpt holds" in diagnosis.what
    assert "not clearly closer. --trainer=nanogpt selects it" in diagnosis.notes[-2]


def test_a_given_trainer_is_kept_and_the_excess_is_shown() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, 4464 * MiB), notes_30m("fitgpt"), CARD, "fitgpt")
    assert "1,360 MiB, 70% less than was read" in diagnosis.what
    shares = {share.what: share.nbytes for share in diagnosis.shares}
    assert shares["more than the forecast"] == (4464 - 1360) * MiB
    assert sum(shares.values()) == 6582 * MiB
    assert not any("trainer" in note for note in diagnosis.notes)


def test_a_run_in_its_first_evaluation_is_recognised() -> None:
    run = notes_30m()
    held = run.forecast.phases["first_eval"].reserved + 196 * MiB
    diagnosis = explain_reading(Reading(held, held), run, CARD)
    assert "in the first evaluation phase" in diagnosis.what
    assert sum(share.nbytes for share in diagnosis.shares) == held


@pytest.mark.parametrize("run", [notes_30m("fitgpt"), notes_30m("fitgpt", "--compile=False", "--cuda_graphs=False")])
def test_of_two_matching_phases_the_longer_one_is_taken(run: ExplainedRun) -> None:
    phases = run.forecast.phases
    assert phases["first_train"].reserved == phases["train"].reserved
    held = phases["train"].reserved + 196 * MiB
    diagnosis = explain_reading(Reading(held + 3 * MiB, held + 3 * MiB), run, CARD)
    assert "under fitgpt in the training phase" in diagnosis.what
    assert "about the same in the first step phase" in diagnosis.what
    shares = {share.what: share.nbytes for share in diagnosis.shares}
    assert shares["logits"] > 0  # recorded work holds them in memory that stays reserved
    assert sum(shares.values()) == held + 3 * MiB


def test_less_than_the_forecast_is_not_split_into_owners() -> None:
    diagnosis = explain_reading(Reading(4000 * MiB, 3000 * MiB), notes_30m(), CARD)
    assert "logits" not in {share.what for share in diagnosis.shares}
    assert sum(share.nbytes for share in diagnosis.shares) == 4000 * MiB


def test_two_figures_without_a_config_give_shares() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, 4464 * MiB))
    assert [(share.what, round(share.nbytes / MiB)) for share in diagnosis.shares] == [
        ("this process", 4464), ("other processes", 2118)]
    assert len(diagnosis.needed) == 2


def test_without_a_process_figure_the_forecast_is_taken() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, None), notes_30m(), CARD)
    assert any("the config's forecast is taken" in note for note in diagnosis.notes)
    assert sum(share.nbytes for share in diagnosis.shares) == 6582 * MiB


# ---- screens


def test_nvidia_smi_lists_gpus_and_processes() -> None:
    gpu = parse_nvidia_smi(SCREEN)[0]
    assert (gpu.name, gpu.used, gpu.total) == ("NVIDIA GeForce RTX 4070", 6582 * MiB, 12282 * MiB)
    assert [(each.pid, each.nbytes and each.nbytes // MiB) for each in gpu.processes] == [
        (2163, 642), (2391, 120), (4711, 4464), (5822, 1310)]
    assert card_of(gpu) == CARD
    diagnosis = explain_reading(reading_of(gpu), notes_30m(), card_of(gpu))
    shares = {share.what: share.nbytes // MiB for share in diagnosis.shares}
    assert shares["process 5822"] == 1310
    assert shares["free"] == 12282 - 6582
    assert sum(share.nbytes for share in diagnosis.shares) == 12282 * MiB


def test_memory_in_no_listed_process_is_not_called_all_processes() -> None:
    gpu = parse_nvidia_smi(SCREEN.replace(".../envs/gpt/bin/python", "/usr/bin/blender       "))[0]
    last = explain_reading(reading_of(gpu)).shares[-2]
    assert (last.what, last.nbytes) == ("in no listed process", (6582 - 642 - 120 - 4464 - 1310) * MiB)


@pytest.mark.parametrize(("text", "used", "total", "process"), [
    ("6582MiB / 12282MiB", 6582, 12282, None), ("6582 / 12282", 6582, 12282, None),
    ("6.5 GiB of 12GiB", 6656, 12288, None), ("6,5/12 GB", 6656, 12288, None),
    ("６５８２MiB / １２２８２MiB", 6582, 12282, None),
    (SCREEN.splitlines()[9], 6582, 12282, None), (SCREEN.splitlines()[20], None, None, 4464),
    ("C   .../envs/gpt/bin/python                      4464MiB |", None, None, 4464),
    ("4711, /usr/bin/python3, 4464 MiB", None, None, 4464),
    ("6582, 12282", 6582, 12282, None), ("12282, 6582", 6582, 12282, None), ("6582 MiB, 12282 MiB", 6582, 12282, None),
    ("0, NVIDIA GeForce RTX 4070, 6582, 12282", 6582, 12282, None), ("6582MiB", 6582, None, None),
    ("6582", 6582, None, None),
])
def test_a_row_or_a_cell_is_enough(text: str, used: int | None, total: int | None, process: int | None) -> None:
    gpu = parse_fragment(text)
    assert gpu is not None
    found = (gpu.used, gpu.total, gpu.processes[0].nbytes if gpu.processes else None)
    assert found == tuple(None if each is None else each * MiB for each in (used, total, process))


@pytest.mark.parametrize("text", ["", "step 12/4000, loss 3.1", "187W /  200W", "epoch 3 of 10", "12 / 400", "3 fans"])
def test_other_text_is_not_a_row(text: str) -> None:
    assert parse_fragment(text) is None


def test_contexts_of_other_ranks_are_named() -> None:
    row = SCREEN.splitlines()[20]
    ranks = "\n".join(row.replace("4711", str(pid)).replace("4464MiB", " 530MiB") for pid in (4712, 4713, 4714))
    gpu = parse_nvidia_smi(SCREEN.replace(row, f"{row}\n{ranks}"))[0]
    diagnosis = explain_reading(reading_of(gpu))
    assert diagnosis.causes[0].what.startswith("3 other processes hold about 530.0 MiB each, 1.55 GiB together: the "
                                               "CUDA contexts of other ranks")
    assert diagnosis.remedies[0].todo == "torch.cuda.set_device(local_rank)"
    assert not explain_reading(reading_of(parse_nvidia_smi(SCREEN)[0])).causes


def test_older_nvidia_smi_with_a_truncated_name_is_parsed() -> None:
    gpu = parse_nvidia_smi(OLD_SCREEN)[0]
    assert (gpu.name, gpu.used, gpu.total) == ("Tesla P100-PCIE...", 16273 * MiB, 16280 * MiB)
    card = card_of(gpu)
    assert card is not None
    assert card.name == "P100 PCIe 16GB"


def test_na_for_processes_on_wsl_is_noted() -> None:
    gpu = parse_nvidia_smi(SCREEN.replace("4464MiB", "    N/A").replace("642MiB", "   N/A"))[0]
    reading = reading_of(gpu)
    assert reading.process is None
    assert any("WSL" in note for note in reading.notes)
    assert explain_reading(reading).shares


def test_the_largest_python_process_is_taken_for_the_run() -> None:
    second = "|    0   N/A  N/A      9999      C   python                                        100MiB |"
    gpu = parse_nvidia_smi(SCREEN.rstrip("+-\n") + "\n" + second + "\n")[0]
    reading = reading_of(gpu)
    assert reading.process == 4464 * MiB
    assert any("2 Python processes" in note for note in reading.notes)


def test_nvidia_smi_csv_is_parsed_in_any_column_order() -> None:
    text = """index, name, memory.total [MiB], utilization.gpu [%], memory.used [MiB]
0, NVIDIA GeForce RTX 4070, 12282 MiB, 97 %, 6582 MiB
1, NVIDIA GeForce RTX 3060, 12288 MiB, 0 %, [N/A]
"""
    first, second = parse_nvidia_smi(text)
    assert (first.name, first.used, first.total) == ("NVIDIA GeForce RTX 4070", 6582 * MiB, 12282 * MiB)
    assert (second.index, second.used) == (1, None)
    bare, = parse_nvidia_smi("memory.used, memory.total\n6582, 12282\n6600, 12282\n".replace("6600, 12282", "later"))
    assert (bare.used, bare.name) == (6582 * MiB, "")
    assert parse_nvidia_smi("memory.used and memory.total\nare explained, below\n") == ()


def test_gpustat_is_parsed_with_its_processes() -> None:
    text = """host  Sun Nov 15 20:00:00 2026  550.54
[0] NVIDIA GeForce RTX 4070 | 61'C,  97 % |  6582 / 12282 MB | alice:python/2211(4464M) alice:Xorg/977(642M)
"""
    gpu, = parse_nvidia_smi(text)
    assert gpu.used == 6582 * MiB
    assert [(each.pid, each.name, each.nbytes) for each in gpu.processes] == [
        (2211, "python", 4464 * MiB), (977, "Xorg", 642 * MiB)]
    answer = explain_reading(reading_of(gpu), notes_30m(), card_of(gpu))
    assert sum(share.nbytes for share in answer.shares) == 12282 * MiB
    assert 642 * MiB in [share.nbytes for share in answer.shares]
    of_users = parse_nvidia_smi(text.replace("alice:python/2211", "alice").replace("alice:Xorg/977", "bob"))[0]
    assert [(each.name, each.nbytes) for each in of_users.processes] == [("alice", 4464 * MiB), ("bob", 642 * MiB)]


@pytest.mark.parametrize(("text", "title"), [
    ("    FB Memory Usage\n        Total                             : 12282 MiB\n        Reserved                   "
     "       : 305 MiB\n        Used                              : 6582 MiB\n        Free         : 5394 MiB\n",
     "6,582 MiB of the GPU are used."),
    ("GPU[0]\t\t: VRAM Total Memory (B): 17163091968\nGPU[0]\t\t: VRAM Total Used Memory (B): 8581545984\n",
     "8,184 MiB of the GPU are used."),
    ("    PID  USER DEV    TYPE  GPU        GPU MEM    CPU  HOST MEM Command\n"
     "   4711 alice   0 Compute  97%   4464MiB  36%   101%   2212MiB python train.py",
     "This process holds 4,464 MiB of the GPU."),
    ("|    0   N/A  N/A   4711      C   ./train.par        4464MiB |", "This process holds 4,464 MiB of the GPU."),
])
def test_other_tools_are_read(text: str, title: str) -> None:
    assert explain(text).title == title


def test_a_process_that_computes_may_be_the_run_whatever_its_name() -> None:
    row = "|    0   N/A  N/A   {}      C   [xarexec] ./train.par      {}MiB |\n"
    screen = row.format(2695172, 26167) + "".join(row.format(pid, 871) for pid in range(2695173, 2695180))
    answer = explain(screen)
    assert answer.title == "This process holds 26,167 MiB of the GPU."
    assert [cause.code for cause in answer.causes] == ["OOM-RANKS"]


@pytest.mark.parametrize(("shared", "codes"), [("5.0", ["OOM-SPILL"]), ("0.3", [])])
@pytest.mark.parametrize("text", [
    "Dedicated GPU memory 11.8/12.0 GB\nShared GPU memory {}/31.9 GB", "Shared GPU memory\n{}/31.9 GB\n"
    "Dedicated GPU memory\n11.8/12.0 GB", "Dedizierter GPU-Speicher 11,8/12,0 GB\n"
    "Gemeinsam genutzter GPU-Speicher {}/31,9 GB", "专用 GPU 内存 11.8/12.0 GB\n共享 GPU 内存 {}/31.9 GB"])
def test_shared_memory_in_the_task_manager_is_a_gpu_that_spills(text: str, shared: str, codes: list[str]) -> None:
    answer = explain(text.format(shared))
    assert answer.title == "12,083 MiB of the GPU are used."
    assert [cause.code for cause in answer.causes] == codes


def test_a_memory_summary_shows_what_is_reserved_beside_the_tensors() -> None:
    folder = Path(__file__).parent / "messages"
    answer = explain((folder / "pytorch-35901-summary.txt").read_text(encoding="utf-8"))
    assert [share.nbytes // MiB for share in answer.shares] == [1062, 12420 - 1062]
    assert [cause.code for cause in answer.causes] == ["OOM-FRAGMENTED"]
    assert "4.76 GiB were allocated" in answer.what
    assert not explain((folder / "pytorch-35901-summary.txt").read_text(encoding="utf-8").replace(
        "OOMs: 1            |        cudaMalloc retries: 1", "OOMs: 0 | cudaMalloc retries: 0")).causes


def test_an_unknown_process_is_not_counted_twice() -> None:
    gpu = parse_nvidia_smi(SCREEN.replace("python", "trains"))[0]
    answer = explain_reading(reading_of(gpu), notes_30m(), card_of(gpu))
    assert sum(share.nbytes for share in answer.shares) == 12282 * MiB


def test_only_the_first_of_repeated_outputs_counts() -> None:
    again = SCREEN.replace("6582MiB", "9999MiB")
    assert parse_nvidia_smi(SCREEN + again)[0].used == 6582 * MiB


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
                                  "| a | b |", "0 1 2 3 MiB / 4 MiB"])
def test_other_text_is_not_nvidia_smi_output(text: str) -> None:
    assert parse_nvidia_smi(text) == ()


# As driver 580 prints a GPU divided by MIG: the GPU's own figure does not count what its instances hold.
CUT = """|   0  NVIDIA A100-SXM4-40GB          On  |   00000000:00:04.0 Off |                   On |
| N/A   30C    P0             45W /  400W |      87MiB /  40960MiB |     N/A      Default |
|                                         |                        |              Enabled |
| MIG devices:                                                                            |
| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |
|==================+==================================+===========+=======================|
|  0    7   0   0  |            4500MiB /  4864MiB    | 14      0 |  1   0    0    0    0 |
|                  |                 0MiB /  8191MiB  |           |                       |
|  0    8   0   1  |              12MiB /  4864MiB    | 14      0 |  1   0    0    0    0 |
| Processes:                                                                              |
|    0    7    0    123456      C   python                                       4464MiB |
"""


def test_the_mig_device_with_the_process_is_explained() -> None:
    first, second = parse_nvidia_smi(CUT)
    assert (first.used, first.total, [each.pid for each in first.processes]) == (4500 * MiB, 4864 * MiB, [123456])
    assert (second.gpu_instance, second.processes) == (8, ())
    diagnosis = explain_reading(reading_of(first), notes_30m(), card_of(first))
    assert diagnosis.title == "4,500 MiB of the GPU are used: 4,464 by this process, 36 by others."
    assert any("GPU instance 7" in note for note in diagnosis.notes)


def test_a_forecast_is_marked_as_such() -> None:
    diagnosis = explain_reading(Reading(6582 * MiB, None), notes_30m(), CARD)
    assert "according to the forecast" in diagnosis.title
    assert "read 4" not in diagnosis.what
    assert diagnosis.what.startswith("By its forecast")


@pytest.mark.parametrize("text", [
    "index, name, memory.used [MiB], memory.total [MiB]\n0, RTX, {0} MiB, {0} MiB\n", "{0}MiB / {0}MiB", "{0}, {0}",
    "[0] NVIDIA GeForce RTX 4070 | 50'C, 30 % | {0} / {0} MB | a:python/2211({0}M)", "python x {0} MiB",
    "index, name, memory.used [MiB], memory.total [MiB]\n²{1}, RTX, 1 MiB, 2 MiB\n"])
def test_figures_of_hundreds_of_digits_are_none(text: str) -> None:
    pasted = text.format("9" * 400, "")
    assert all((gpu.total or 0) < 2**40 for gpu in parse_nvidia_smi(pasted))
    assert parse_fragment(pasted) is None


@pytest.mark.parametrize("card", [CARD, None])
def test_a_run_is_forecast_with_the_installed_torch(card: gpus.GpuModel | None,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.diagnosis.case.torch_version", lambda given: given or "2.12")
    run = ExplainRequest(RunConfig()).run_on(card)
    assert run is not None
    assert run.platform.torch == "2.12"
    named = ExplainRequest(RunConfig(), torch="2.13").run_on(card)
    assert named is not None
    assert named.platform.torch == "2.13"
