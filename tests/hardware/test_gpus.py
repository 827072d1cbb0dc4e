"""gpus.csv: a name finds its GPU model, the figures agree, and each has a source."""

from __future__ import annotations

import pytest

from fitgpt.core.errors import UsageError
from fitgpt.hardware import gpus

SOURCES = {"", "seen", "vendor", "formula", "recalled"}


@pytest.mark.parametrize(("name", "meant"), [
    ("4070", "RTX 4070"),
    ("RTX 4070", "RTX 4070"),
    ("rtx4070ti", "RTX 4070 Ti"),
    ("NVIDIA GeForce RTX 4070", "RTX 4070"),
    ("rtx-4070-ti-super", "RTX 4070 Ti SUPER"), ("4070tis", "RTX 4070 Ti SUPER"), ("4070S", "RTX 4070 SUPER"),
    ("3060m", "RTX 3060 Laptop"), ("RTX 4070 Mobile", "RTX 4070 Laptop"), ("l40s", "L40S"),
    ("4070tisuper", "RTX 4070 Ti SUPER"),
    ("4060 laptop", "RTX 4060 Laptop"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
    ("4060 Ti", "RTX 4060 Ti 8GB"),
    ("4060 ti 16 GB", "RTX 4060 Ti 16GB"),
    ("h200", "H200"),
    ("NVIDIA H200", "H200"),
    ("a100", "A100 40GB"),
    ("a100 40", "A100 40GB"),
    ("A100-80", "A100 SXM 80GB"),
    ("4060 ti 16", "RTX 4060 Ti 16GB"),
    ("4080", "RTX 4080"),
    ("A100-SXM4-80GB", "A100 SXM 80GB"),
    ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
    ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("Tesla T4", "T4"),
    ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
    ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
    ("titan rtx", "TITAN RTX"),
    ("m1", "Apple M1"),
    ("colab t4", "T4"), ("Kaggle T4", "T4"), ("kaggle p100", "P100 PCIe 16GB"), ("Tesla P40", "P40"),
    ("titan xp", "TITAN Xp"), ("NVIDIA TITAN V", "TITAN V"), ("1650", "GTX 1650"),
    ("DGX Spark", "GB10"), ("NVIDIA GB10", "GB10"), ("dgx spark gb10", "GB10"),
    ("jetson agx orin", "Jetson AGX Orin 32GB"), ("AGX Orin 64GB", "Jetson AGX Orin 64GB"),
    ("orin nx", "Jetson Orin NX 16GB"), ("Jetson Orin Nano", "Jetson Orin Nano 8GB"),
])
def test_a_name_finds_its_model(name: str, meant: str) -> None:
    assert gpus.find(name).name == meant


def test_every_model_is_found_by_its_name_and_by_its_device_name() -> None:
    for card in gpus.load():
        assert gpus.find(card.name) is card
        assert gpus.match_device(f"NVIDIA GeForce {card.name}", card.driver_mib) is card


@pytest.mark.parametrize("requested", ["4071", "RTX 4090 D", "A100 7GB"])
def test_an_unknown_name_is_an_error_with_the_nearest_names(requested: str) -> None:
    with pytest.raises(UsageError) as raised:
        gpus.find(requested)
    assert repr(requested) in raised.value.what
    named = raised.value.what.partition("The nearest: ")[2].removesuffix(".").split(", ")
    assert all(gpus.find(name).name == name for name in named)
    assert raised.value.fix == f"--gpu '{named[0]}'"


@pytest.mark.parametrize(("name", "may_be"), [
    ("RTX 6000", ["RTX 6000 Ada", "RTX PRO 6000 Blackwell"]),
    ("7900", ["RX 7900 XTX"]),
    ("h1", ["H100 SXM", "H100 PCIe"]),
    ("a1", ["A10", "A10G", "A100 40GB", "A100 SXM 80GB", "A100 PCIe 80GB"]),
    ("laptop 30", ["RTX 3060 Laptop", "RTX 3070 Laptop", "RTX 3080 Laptop 8GB", "RTX 3080 Laptop 16GB",
                   "RTX 3080 Ti Laptop"]),
])
def test_an_ambiguous_name_is_an_error_with_the_models_it_may_mean(name: str, may_be: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        gpus.find(name)
    assert raised.value.what.endswith(f"One of: {', '.join(may_be)}.")
    assert raised.value.fix == f"--gpu '{may_be[0]}'"


def test_a_long_list_of_models_is_cut_short() -> None:
    with pytest.raises(UsageError) as raised:
        gpus.find("rtx")
    assert "fitgpt cards rtx lists" in raised.value.what
    assert raised.value.what.count(",") == gpus.MAX_LISTED - 1


@pytest.mark.parametrize("name", ["", "geforce", "xx", "?", "m2"])
def test_a_name_without_similar_ones_refers_to_the_list(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        gpus.find(name)
    assert "`fitgpt cards` lists" in raised.value.what


def test_search_lists_models_with_these_words() -> None:
    assert [card.name for card in gpus.search("m1")] == ["Apple M1"]
    assert {card.name for card in gpus.search("ti")} >= {"RTX 4070 Ti", "GTX 1080 Ti"}
    assert "TITAN RTX" not in {card.name for card in gpus.search("ti")}
    assert len(gpus.search("4070")) == 5
    assert gpus.search("") == list(gpus.load())


def test_a_typo_is_corrected() -> None:
    with pytest.raises(UsageError) as raised:
        gpus.find("rtx 407O")
    assert raised.value.fix == "--gpu 'RTX 4070'"


@pytest.mark.parametrize(("name", "total_mib", "meant"), [
    ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX 4060 Ti 16GB"),
    ("NVIDIA GeForce RTX 4060 Ti", 8188, "RTX 4060 Ti 8GB"),
    ("NVIDIA GeForce RTX 3080", 12288, "RTX 3080 12GB"),
    ("NVIDIA GeForce RTX 3080", 9900, "RTX 3080 10GB"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX 6000 Ada"),  # ECC off
    ("NVIDIA GeForce RTX 4070", None, "RTX 4070"),
])
def test_models_of_one_name_are_distinguished_by_memory(name: str, total_mib: int | None, meant: str) -> None:
    found = gpus.match_device(name, total_mib)
    assert found is not None
    assert found.name == meant


@pytest.mark.parametrize(("name", "total_mib"), [
    ("NVIDIA GeForce GTX 1060 3GB", 3072),
    ("NVIDIA GeForce RTX 4070", 24564),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887),
    ("llvmpipe", None),
])
def test_a_device_that_is_not_in_the_table_has_no_model(name: str, total_mib: int | None) -> None:
    assert gpus.match_device(name, total_mib) is None


def test_usable_memory_is_below_the_drivers_total_which_is_near_the_advertised() -> None:
    for card in gpus.load():
        if card.vendor == "nvidia":
            assert card.usable_mib is not None
            assert card.memory_gb is not None
            if card.shares_memory:
                assert card.driver_mib is None
                assert 0.9 * 1000**3 / 2**20 * card.memory_gb < card.usable_mib < 1024 * card.memory_gb, card.name
                continue
            assert card.driver_mib is not None
            assert 0.94 * card.driver_mib < card.usable_mib < card.driver_mib, card.name
            assert 0.92 < card.driver_mib / (card.memory_gb * 1024) <= 1.01, card.name


def test_formulas_agree_with_figures_that_were_seen() -> None:
    """The formulas are for models without a reading: they must be close where there is one."""
    for card in gpus.load():
        if card.usable_src == "seen" and card.driver_mib and card.name != "H200":  # beyond the rule's 80 GB
            assert card.usable_mib is not None
            assert abs(gpus.usable_by_rule(card.driver_mib) - card.usable_mib) <= 120, card.name
        if card.outside_src == "seen" and card.name != "H200":  # measured with more kernels loaded than the others
            assert card.sms is not None
            assert card.outside_mib is not None
            assert abs(gpus.outside_by_rule(card.sms) - card.outside_mib) <= 120, card.name


def test_tflops_are_multiprocessors_times_clock_times_a_known_width() -> None:
    for card in gpus.load():
        if card.tflops and card.sms and card.boost_mhz:
            width = card.tflops * 1e6 / (card.sms * card.boost_mhz)
            assert any(abs(width / known - 1) < 0.015 for known in (128, 256, 512, 1024, 2048, 4096)), card.name
        elif card.tflops_src == "formula":
            pytest.fail(f"{card.name}: a formula needs its terms")


def test_bf16_follows_from_the_compute_capability() -> None:
    for card in gpus.load():
        if card.vendor == "nvidia":
            assert card.capability is not None
            assert card.bf16 is (card.capability >= (8, 0)), card.name


def test_every_figure_has_a_source() -> None:
    for card in gpus.load():
        for figure, source in ((card.driver_mib, card.driver_src), (card.usable_mib, card.usable_src),
                               (card.outside_mib, card.outside_src), (card.tflops, card.tflops_src)):
            assert source in SOURCES, card.name
            assert (figure is None) == (source == ""), card.name


def test_names_are_unique() -> None:
    names = [card.name for card in gpus.load()]
    assert len(names) == len(set(names))


def test_the_4090s_peak_counts_float32_accumulation() -> None:
    peak, source = gpus.peak_flops(gpus.find("4090"), "bfloat16")
    assert peak == 165.2e12
    assert source == "RTX 4090, 165.2 TFLOP/s dense half precision (vendor)"


def test_no_figure_for_a_dtype_means_no_peak() -> None:
    assert gpus.peak_flops(None, "bfloat16")[0] is None
    assert gpus.peak_flops(gpus.find("4090"), "float32")[0] is None
    assert gpus.peak_flops(gpus.find("Apple M4 Max"), "float32")[0] is None
    assert gpus.peak_flops(gpus.find("1080 ti"), "float32")[0] == 11.3e12
