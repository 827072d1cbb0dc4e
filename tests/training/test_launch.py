"""Which ranks a `fitgpt train` starts: from --gpus, or from what torchrun has set. Nothing here loads torch."""

from __future__ import annotations

import pytest

from fitgpt.config.fields import Assignment
from fitgpt.config.run_config import RunConfig, config_from
from fitgpt.core.errors import DeviceError, UsageError
from fitgpt.hardware import nvidia
from fitgpt.hardware.nvidia import GpuReading, Survey
from fitgpt.training import launch

PAIR = Survey((GpuReading(0, "RTX 4070", "GPU-a"), GpuReading(1, "RTX 3060", "GPU-b")))
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda: PAIR)


def test_all_gpus_and_numbers_become_one_rank_each_with_torchruns_variables(two_gpus: None) -> None:
    for given in ("all", "0,1"):
        config = launch.with_ranks(RunConfig(gpus=given), {})
        assert (config.gpus, config.ranks, launch.devices(config, {})) == ("0,1", 2, ["cuda:0", "cuda:1"])
    started = launch.rank_environments(config.to_dict(), {})
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in started] == [("0", "0", "2"),
                                                                                           ("1", "1", "2")]
    assert len({each["MASTER_PORT"] for each in started}) == 1


def test_a_single_gpu_is_a_device_without_ranks(two_gpus: None) -> None:
    config = launch.with_ranks(RunConfig(gpus="1"), {})
    assert (config.gpus, config.device, config.ranks) == ("", "cuda:1", 1)
    assert launch.rank_environments(config.to_dict(), {}) == [{}]


def test_under_torchrun_each_process_starts_one_worker_on_the_gpu_of_its_local_rank() -> None:
    config = launch.with_ranks(RunConfig(), TORCHRUN)
    assert (config.ranks, launch.devices(config, TORCHRUN)) == (4, ["cuda:1"])
    assert launch.rank_environments(config.to_dict(), TORCHRUN) == [{}]


@pytest.mark.parametrize(("options", "environment", "what", "fix"), [
    (dict(gpus="0,2"), {}, "More ranks than GPUs: --gpus=0,2 names GPU 2", "--gpus=all"),
    (dict(gpus="2x4070"), {}, "names GPUs to plan for", "--gpus=all"),
    (dict(gpus="0,1", device="cpu"), {}, "contradict each other", "--device=auto"),
    (dict(gpus="0,1"), TORCHRUN, "under torchrun, which has started 4 ranks already", "Leave out --gpus"),
    (dict(gradient_accumulation_steps=6), TORCHRUN, "cannot be divided over 4 ranks", "accumulation_steps=8"),
])
def test_what_cannot_be_started_is_rejected_with_a_fix(two_gpus: None, options: dict[str, object],
                                                      environment: dict[str, str], what: str, fix: str) -> None:
    with pytest.raises(UsageError) as error:
        launch.with_ranks(RunConfig(**options), environment)
    assert what in error.value.what
    assert fix in error.value.fix


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda: Survey(reason="no NVIDIA driver is installed"))
    with pytest.raises(DeviceError, match="no NVIDIA driver is installed"):
        launch.with_ranks(RunConfig(gpus="all"), {})


def test_the_rank_that_failed_for_a_reason_of_its_own_is_named_not_those_that_lost_it() -> None:
    lost, own = {"what": "Another rank has ended.", "lost_rank": True}, {"what": "The disk is full.", "code": 7}
    config = RunConfig(gpus="0,1,2", gradient_accumulation_steps=6)
    rank = launch.culprit([0, 2, 1], [7, 7, 7], [lost, own, lost])
    assert rank == 1
    assert launch.named(own, rank, config.to_dict(), {})["where"] == "Rank 1 of 3 (cuda:1): "
    assert launch.culprit([0, 1], [7, -9], [lost, {}]) == 1


def test_a_resumed_run_keeps_its_sequences_per_step_on_any_number_of_ranks_and_says_where_it_was() -> None:
    recorded = RunConfig(gpus="0,1", batch_size=12, gradient_accumulation_steps=40).to_dict()
    resumed = [Assignment("init_from", "resume", "--resume")]
    config, notes = config_from(resumed, recorded)
    assert config.ranks == 1
    assert "gpus=0,1 before" in notes[0]
    with pytest.raises(UsageError) as error:
        config_from([*resumed, Assignment("gpus", "3xcpu", "--gpus=3xcpu")], recorded)
    assert error.value.fix == "--batch_size=10 --gradient_accumulation_steps=48"
