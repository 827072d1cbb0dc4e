"""CPU RAM that a run certainly needs is compared with what is available before anything is allocated."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import SystemFault
from fitgpt.core.units import GiB
from fitgpt.engine.batches import DEPTH
from fitgpt.planning.host_memory import IN_FLIGHT, check, needs
from fitgpt.training import memory_check


def test_batches_in_flight_are_those_of_the_prefetcher() -> None:
    assert IN_FLIGHT == DEPTH + 1
    config = RunConfig(batch_size=4, block_size=1024)
    assert needs(config, on_cpu=True)["batches read ahead"] == 4 * 8 * 4 * 1025
    assert needs(config, on_cpu=False)["batches read ahead"] == 4 * 2**16  # pinned: powers of two


@pytest.mark.parametrize(("options", "on_cpu"), [
    (dict(batch_size=4_000_000, gradient_accumulation_steps=1), True),
    (dict(batch_size=2_000_000), False),
    (dict(n_layer=48, n_embd=1600, n_head=25, offload="optimizer"), False),
], ids=["batch on a CPU", "pinned batch", "offload"])
def test_a_run_that_needs_more_is_rejected_with_its_figures_and_a_fix_that_works(options: dict[str, Any],
                                                                                on_cpu: bool) -> None:
    config = RunConfig(**options)
    with pytest.raises(SystemFault, match=r"needs at least [\d.]+ [GT]iB of CPU RAM .*, and 8.00 GiB is") as raised:
        check(config, 8 * GiB, on_cpu=on_cpu)
    changes: dict[str, Any] = {key: int(value) if value.isdigit() else value
                               for key, value in re.findall(r"--(\w+)=(\w+)", raised.value.fix)}
    fixed = replace(config, **changes)
    check(fixed, 8 * GiB, on_cpu=on_cpu)
    assert fixed.tokens_per_step == config.tokens_per_step


def test_a_resumed_run_reads_its_checkpoint_into_cpu_ram() -> None:
    config = RunConfig(vocab_size=50304, init_from="resume")
    assert sum(needs(config, on_cpu=False).values()) >= 12 * config.gpt_config().count_params()


def test_unknown_memory_rejects_nothing_and_train_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = RunConfig(batch_size=4_000_000, device="cpu")
    check(huge, None, on_cpu=True)
    monkeypatch.setattr(memory_check, "available_memory", lambda: GiB)
    with pytest.raises(SystemFault, match="CPU RAM"):
        memory_check.check(huge)
