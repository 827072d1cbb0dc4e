"""What a rule says of the case before it: a sentence or two, with the case's own figures."""

from __future__ import annotations

from ..core.units import show_bytes, show_count
from .facts import Facts
from .filling import OUTSIDE_AT_MOST

# ---- the machine's memory, not the card's


def killed(facts: Facts) -> str:
    host = facts.run.forecast.host_bytes if facts.run else 0
    offload = f" This config keeps {show_bytes(host)} there (offload)." if host else ""
    return ("The system ended the process (signal 9). Nearly always the machine's RAM ran out, not the card's "
            f"memory.{offload}")


def host(facts: Facts) -> str:
    if facts.message.wording == "Windows":
        return ("Windows could not promise the RAM that a program asked for as it loaded: the paging file is too "
                "small. The card's memory has nothing to do with it.")
    asked = f" of {show_bytes(facts.asked)}" if facts.asked else ""
    return f"An allocation{asked} in the machine's RAM failed. The card's memory has nothing to do with it."


def mps(facts: Facts) -> str:
    message = facts.message
    if message.allowed is None or message.allocated is None:
        return "PyTorch on Apple's GPU reached the share of the machine's memory that it allows itself."
    others = sum(size for _, size in message.others)
    return (f"PyTorch on Apple's GPU allows itself {show_bytes(message.allowed)} of the machine's memory; "
            f"{show_bytes(message.allocated)} are in tensors and {show_bytes(others)} in other allocations, so "
            f"{show_bytes(facts.asked)} more had no room.")


# ---- the card, without figures


def library(facts: Facts) -> str:
    library = facts.message.wording
    if "NOT_INITIALIZED" in facts.message.words:
        return (f"{library} could not begin to work. Most often it found no memory for itself: it asks the driver, not "
                "PyTorch's allocator, so there are no figures. Otherwise it does not suit the driver, or an earlier "
                "kernel failed.")
    return (f"{library} could not get memory for itself. It asks the driver, not PyTorch's allocator, so there are no "
            "figures: the card was full, or nearly, when it was first used.")


def driver(facts: Facts) -> str:
    return ("The driver refused memory outside PyTorch's allocator, for a context, a kernel or pinned host memory, so "
            "there are no figures. The line of the traceback may not be the one that asked.")


def cut(facts: Facts) -> str:
    if facts.fill is None:
        return "The message is cut: it says that the card's memory ran out, and gives none of its figures."
    return (f"{show_bytes(facts.fill.taken)} of the card's {show_bytes(facts.fill.total)} are taken, and the message "
            "does not say by whom: what this process holds, and PyTorch of that, would stand after what is free.")


# ---- the card


def larger(facts: Facts) -> str:
    total = facts.fill.total if facts.fill else 0
    return (f"One tensor of {show_bytes(facts.asked)} is more than the whole card has, {show_bytes(total)}: nothing "
            "that is freed elsewhere can help.")


def spilled(facts: Facts) -> str:
    total = facts.fill.total if facts.fill else 0
    return (f"PyTorch holds {show_bytes(facts.reserved)} on a card of {show_bytes(total)}: the Windows driver (in WSL "
            "too) moved the rest into the machine's RAM, over the bus. A run that gets by like this is many times "
            "slower.")


def capped(facts: Facts) -> str:
    return (f"The process allows itself {show_bytes(facts.message.allowed or 0)} (set_per_process_memory_fraction, or "
            f"the allocator's environment) and holds {show_bytes(facts.reserved)} of it. The card itself has room.")


def had_room(facts: Facts) -> str:
    free = facts.fill.free if facts.fill else 0
    return (f"{show_bytes(free)} were free when the message was written, more than the {show_bytes(facts.asked)} asked "
            "for: so they were not free, or not to be had, a moment before. Another process (a second rank on the "
            "same card, say) took memory and gave it back, or the driver could not serve it.")


def fragmented(facts: Facts) -> str:
    free = facts.fill.free if facts.fill else 0
    told = (f"PyTorch holds {show_bytes(facts.unallocated)} that no tensor uses, and {show_bytes(free)} were free: "
            f"together more than the {show_bytes(facts.asked)} asked for, but nowhere in one piece.")
    if facts.plan is None or facts.run is None or facts.run.expandable:
        return told
    fits = facts.run.fits_without_pieces(facts.plan.budget.reserve_limit)
    return f"{told} With expandable segments the run would {'fit' if fits else 'still not fit'}."


def neighbour(facts: Facts) -> str:
    fill = facts.fill
    assert fill is not None
    if fill.others is None:
        who = (f"{show_bytes(fill.beside)} of the card are neither free nor PyTorch's. This process's own context is "
               f"at most about {show_bytes(OUTSIDE_AT_MOST)} of that; the rest belongs to other processes.")
    else:
        who = f"Other processes hold {show_bytes(fill.others)} of the card."
    if facts.plan is None:
        return f"{who} Without them the {show_bytes(facts.asked)} would have been there."
    enough = facts.plan.headroom + fill.others_at_least >= 0
    return f"{who} Without them the run would {'fit' if enough else 'still not fit'}."


def states(facts: Facts) -> str:
    assert facts.run is not None
    assert facts.plan is not None
    return (f"Weights, gradients and AdamW's moments take 16 bytes a parameter: {show_bytes(facts.run.state_bytes)} "
            f"for {show_count(facts.run.forecast.params)} parameters, where PyTorch could reserve "
            f"{show_bytes(facts.plan.budget.reserve_limit)}. No smaller batch makes that fit.")


def loading(facts: Facts) -> str:
    return ("Memory ran out while the model was put on the card, before any batch: what is held then is weights, and "
            "no batch size changes them.")


def optimizer_step(facts: Facts) -> str:
    here = f", {show_bytes(8 * facts.run.forecast.params)} here," if facts.run else ""
    return (f"The optimizer's step asked for it. AdamW makes its two moments, 8 bytes a parameter,{here} at the first "
            "step; and its variant for many tensors at once (foreach, the default) copies them again while it steps. "
            "The passes before the step do not show that.")


def evaluating(facts: Facts) -> str:
    later = ", with the last `logits` of training still alive" if facts.in_phase == "eval" else ""
    theirs = f" nanoGPT evaluates at the batch and block it trains at{later}." if facts.of_nanogpt else ""
    return ("Memory ran out in evaluation. It keeps no graph and no gradients: what it holds besides the model is the "
            f"logits of its batch and what the loss makes of them.{theirs}")


def logits(facts: Facts) -> str:
    share = ""
    if facts.run is not None:
        forecast = facts.run.forecast
        held = next((each.nbytes for each in forecast.owners_at_peak if each.owner == "logits"), 0)
        if held:
            share = (f" At the run's highest point they are {show_bytes(held)} of the {show_bytes(forecast.allocated)} "
                     "in tensors.")
    return ("It is the logits, a number for every token and every word of the vocabulary, which the loss holds several "
            f"times over.{share}")


def backward(facts: Facts) -> str:
    return ("Memory ran out in the backward pass. It begins with everything that the forward pass kept, and adds the "
            "gradients: here a training step holds most.")


def activations(facts: Facts) -> str:
    return ("It is an activation: what a layer computes and keeps until the backward pass. They grow with batch × "
            "block × width × layers.")


def context(facts: Facts) -> str:
    outside = (facts.fill.outside if facts.fill else None) or 0
    return (f"This process holds {show_bytes(outside)} outside PyTorch's allocator, where context and kernels usually "
            "take 100 to 800 MiB: other libraries in the same process, NCCL's buffers, or a virtual machine's driver.")


def full(facts: Facts) -> str:
    fill, message = facts.fill, facts.message
    if fill is None and message.total is not None and message.reserved is not None:
        others = (": it is not this run's own tensors that fill the card" if message.total - message.reserved
                  >= facts.asked else "")
        return (f"PyTorch held {show_bytes(message.reserved)} of the card's {show_bytes(message.total)}, and the "
                f"message does not say how much was free{others}.")
    if fill is None:
        return "The card's memory ran out, and the message does not say how it was filled."
    if fill.reserved is not None and fill.beside > fill.reserved:
        return (f"{show_bytes(fill.beside)} of {show_bytes(fill.total)} are neither free nor PyTorch's: this process's "
                f"context and other processes leave too little for a run that has {show_bytes(fill.reserved)} and "
                f"wanted {show_bytes(facts.asked)} more.")
    held, what = (fill.process or 0, "holds") if fill.allocated is None else (fill.allocated, "has in tensors")
    return (f"The run itself fills the card: this process {what} {show_bytes(held)} of {show_bytes(fill.total)}, and "
            f"wanted {show_bytes(facts.asked)} more.")
