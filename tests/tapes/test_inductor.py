"""Inductor's plan of a graph's buffers: overwritten inputs, reuse of freed buffers."""

from __future__ import annotations

from fitgpt.tapes.inductor import Buffer, GraphKernel, KernelGraph, PlanStep, plan_buffers


def half(name: str, nbytes: int = 100) -> Buffer:
    return Buffer(name, "activations", nbytes, "half")


def chain(*kernels: GraphKernel, output: str = "end") -> list[PlanStep]:
    """The plan of a graph whose one output is `output`."""
    return plan_buffers(KernelGraph(kernels, frozenset({output}))).steps


def test_output_overwrites_an_input_at_its_last_use() -> None:
    steps = chain(GraphKernel((half("fc"),)), GraphKernel((half("gelu"),), ("fc",), inplace={"gelu": ("fc",)}),
                  GraphKernel((half("end", 8),), ("gelu",)))
    assert [(step.do, step.name) for step in steps] == [("alloc", "fc"), ("alloc", "end"), ("free", "fc")]


def test_output_does_not_overwrite_an_input_that_is_read_later() -> None:
    steps = chain(GraphKernel((half("fc"),)), GraphKernel((half("gelu"),), ("fc",), inplace={"gelu": ("fc",)}),
                  GraphKernel((half("end", 8),), ("gelu", "fc")))
    assert [step.name for step in steps if step.do == "alloc"] == ["fc", "gelu", "end"]


def reuse_after(last: int) -> list[PlanStep]:
    """`a` is free two kernels before `c`, of the same size, is made; `d` has `last` bytes."""
    return chain(GraphKernel((half("a"),)), GraphKernel((half("b", 8),), ("a",)), GraphKernel((half("b2", 8),), ("b",)),
                 GraphKernel((half("c"),), ("b2",)), GraphKernel((half("d", last),), ("c",)),
                 GraphKernel((half("end", 8),), ("d",)))


def test_freed_buffer_is_reused_if_keeping_it_does_not_raise_the_peak() -> None:
    assert [step.name for step in reuse_after(300) if step.do == "alloc"].count("c") == 0
    assert PlanStep("alloc", "c", "activations", 100) in reuse_after(4)


def test_graph_with_large_outputs_reuses_little() -> None:
    """Inductor's estimate counts outputs as freed at the start, so large logits hide every earlier peak."""
    def steps(output_bytes: int) -> list[PlanStep]:
        return chain(GraphKernel((half("early", 300),)), GraphKernel((half("a"),), ("early",)),
                     GraphKernel((half("b", 8),), ("a",)), GraphKernel((half("b2", 8),), ("b",)),
                     GraphKernel((half("c"),), ("b2",)), GraphKernel((half("d", 8),), ("c",)),
                     GraphKernel((half("end", output_bytes),), ("d",)))

    assert PlanStep("alloc", "c", "activations", 100) not in steps(8)
    assert PlanStep("alloc", "c", "activations", 100) in steps(10**6)


def test_block_is_named_after_the_output_it_ends_up_with() -> None:
    steps = chain(GraphKernel((half("x"),)), GraphKernel((half("end"),), ("x",), inplace={"end": ("x",)}))
    assert steps == [PlanStep("alloc", "end", "activations", 100)]
