"""A goal, a config and a FitTarget → FitResult: the fastest settings, the largest model, the longest context, or the
smallest memory; and why each option differs from the given run. Each is a search over one or several shapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ..config.fields import shown
from ..config.memory_savers import SAVERS, loss_chunk_tokens
from ..config.optimizers import host_bytes
from ..config.run_config import RunConfig, resolve_run
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes, show_count
from ..hardware import gpus
from .budget import Budget, budget_for
from .fit_search import (
    Candidate,
    FitTarget,
    ScoredConfig,
    Search,
    describe_allow,
    flags,
    parse_allow,
    permission_notes,
    permitted,
)
from .speed import likely_efficiency, modelled
from .verdict import DESKTOP, Verdict

GIVEN_SHAPE_DOES_NOT_FIT = "nothing with the given shape fits"
OUTSIDE_ERROR = 128 * MiB   # of gpus.outside_by_rule: most of the OOM messages it was fitted to are within 110 MiB
TOKENS_PER_PARAMETER = 20   # compute-optimal training: Hoffmann et al. 2022


class Suggestion(NamedTuple):
    """Flags with which something fits, where nothing does."""

    flags: tuple[str, ...]        # "--allow=lossy"
    least: int                    # the smallest memory that is enough then
    text: str                     # what that means for the run


class Decision(NamedTuple):
    """Options that changed together, and why."""

    changes: dict[str, tuple[Any, Any]]  # option → (given, chosen)
    why: str


class FitResult(NamedTuple):
    """The settings that were chosen, how they differ from the given ones and why; or that nothing fits. `print` it for
    the text of `fitgpt fit`."""

    budget: Budget
    given: ScoredConfig
    chosen: ScoredConfig | None                   # None: nothing fits
    decisions: tuple[Decision, ...] = ()
    runners_up: tuple[ScoredConfig, ...] = ()     # these fit too
    step_up: ScoredConfig | None = None           # faster than the chosen one, and not taken
    error: float = 0.0                            # of the speed estimate: a smaller gain changes nothing
    frontier: tuple[tuple[int, float], ...] = ()  # (bytes, tokens per second): the fastest within that memory
    least: ScoredConfig | None = None  # the smallest memory the run can train in, where requested or nothing fits
    suggestions: tuple[Suggestion, ...] = ()      # where nothing fits: the smallest change first
    considered: int = 0                           # candidates
    replayed: int = 0                             # candidates whose tape was replayed
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """On the chosen settings."""
        return self.chosen.verdict if self.chosen is not None else Verdict.DOES_NOT_FIT

    def __str__(self) -> str:
        from ..show.fit_text import fit_text  # a result prints itself; nothing else here shows anything
        from ..show.terminal import columns

        return fit_text(self, "the run", width=columns()).rstrip("\n")

    def __repr__(self) -> str:
        from ..show.fit_text import verdict

        return f"<fitgpt.fit: {verdict(self)}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


# ---- the fastest settings


def find_fastest(config: RunConfig, target: FitTarget, allow: frozenset[str] = frozenset()) -> FitResult:
    """The fastest settings that fit; with a shorter block or a smaller model only if that is allowed and needed."""
    may = permitted(config, allow)
    search = target.search(config, may)
    found = _found(config, search, allow)
    if found is None and (smaller := largest_that_fits(smaller_shapes(config, may), target, may)):
        found = _found(config, smaller.search, allow, smaller.permission)
    return found or _nothing_fits(config, search, target, allow)


def _found(given: RunConfig, search: Search, allow: frozenset[str], permission: str = "",
           why_shape: str = GIVEN_SHAPE_DOES_NOT_FIT) -> FitResult | None:
    """The result of a search; None if nothing fits. `given`: the config before the shape changed; `permission` and
    `why_shape`: what that took, and why it did."""
    chosen = search.choose()
    if chosen is None:
        return None
    config, step_up = search.config_of(chosen), search.step_up(chosen)

    def scored(candidate: Candidate) -> ScoredConfig:
        found = search.scored(search.config_of(candidate), candidate.savers.permission)
        changed = flags(given, found.config)
        return found._replace(flags=changed, permission=(permission if changed else "") or found.permission)

    notes = permission_notes(given, allow)
    if search.target.safe and search.target.budget.desktop and config != given:
        notes += f"{show_bytes(DESKTOP)} of the GPU is left to a desktop: --others=0 where there is none.",
    return FitResult(search.target.budget, search.scored(given, "free"), scored(chosen),
                     decisions(search, given, config, why_shape), tuple(map(scored, search.runners_up(chosen))),
                     scored(step_up) if step_up else None, search.error, search.frontier(),
                     considered=len(search.candidates), replayed=search.replays, notes=notes)


def decisions_for(given: RunConfig, chosen: RunConfig, target: FitTarget) -> tuple[Decision, ...]:
    """Why each option differs, for a config that was chosen by timing."""
    return decisions(target.search(chosen), given, chosen, GIVEN_SHAPE_DOES_NOT_FIT)


# ---- where nothing fits


def _nothing_fits(config: RunConfig, search: Search, target: FitTarget, allow: frozenset[str]) -> FitResult:
    """The smallest memory of the run, and what would help."""
    least = search.scored(*search.least())
    return FitResult(target.budget, search.scored(config, "free"), None, least=least, frontier=search.frontier(),
                     considered=len(search.candidates), replayed=search.replays,
                     suggestions=() if target.safe else tuple(_suggestions(config, least.needs, target, allow)),
                     notes=permission_notes(config, allow))


def _suggestions(config: RunConfig, least: int, target: FitTarget, allow: frozenset[str]) -> Iterator[Suggestion]:
    """Flags that make something fit, each tried: more of the GPU, one more permission, all of them, another GPU."""
    budget = target.budget
    free, needed = budget.usable - budget.others, least + budget.outside
    if budget.budget < free >= needed:  # the user keeps the run from memory that is free
        budgeted = min(needed + OUTSIDE_ERROR, free)
        flag = f"--leave={(free - budgeted) // MiB}MiB" if config.leave else f"--budget={-(-budgeted // MiB)}MiB"
        yield Suggestion((flag,), least, "as allowed, in more of the GPU's memory")

    permissions = {"lossy": "the same model and block, with lossy savers", "context": "a shorter block",
                   "model": "a smaller model", "lossy,context,model": "a smaller model"}
    is_enough = False
    for words, text in permissions.items():
        more = permitted(config, allow | parse_allow(words))
        if more == permitted(config, allow) or (is_enough and "," in words):
            continue
        shapes = smaller_shapes(config, permitted(config, parse_allow(words)))
        if fitting := largest_that_fits([Shapes("lossy", [config])] if words == "lossy" else shapes, target, more):
            is_enough, search = True, fitting.search
            yield Suggestion((f"--allow={describe_allow(allow | parse_allow(words))}",),
                             search.needs(search.least()[0]),
                             text if words == "lossy" else f"{text}: {describe_shape(search.given)}")

    enough = [card for card in gpus.load() if card.capability and card.capability >= (8, 0) and card.memory_gb
              and "Laptop" not in card.name and budget_for(card).reserve_limit - OUTSIDE_ERROR >= least]
    if enough and not (config.budget or config.leave):
        smallest = min(enough, key=lambda card: card.memory_gb or 0)
        yield Suggestion((f"--gpu={smallest.name}",), least,
                         "as allowed: the smallest GPU of the table with enough memory")


def describe_suggestions(result: FitResult) -> str:
    """A sentence on what would fit."""
    texts = [f"{' '.join(each.flags)} ({each.text})" for each in result.suggestions]
    return f"It fits with {'; or with '.join(texts)}." if texts else "No permission makes it fit."


def describe_too_small(result: FitResult) -> str:
    """A sentence on why nothing fits."""
    assert result.least is not None  # always known where nothing fits
    return (f"Nothing fits: the smallest memory this run can be trained in is {show_bytes(result.least.needs)}, and "
            f"{show_bytes(result.budget.reserve_limit)} may be reserved.")


# ---- the largest model, the longest context


def largest_model(config: RunConfig, target: FitTarget, allow: frozenset[str]) -> FitResult:
    """The largest of GPT-2's sizes and sizes between them; the rest of the run as given."""
    def describe(run: RunConfig) -> str:
        return (f"{run.n_layer} layers, {run.n_head} heads, width {run.n_embd:,}: "
                f"{show_count(run.gpt_config().count_params())} parameters")

    shapes = Shapes("model", gpt2_sizes()[::-1], lambda size: with_size(config, size))
    return _largest(config, target, allow, "largest-model", shapes, describe)


def longest_context(config: RunConfig, target: FitTarget, allow: frozenset[str]) -> FitResult:
    """The longest block, in steps of 128 tokens, one sequence per micro-batch."""
    def describe(run: RunConfig) -> str:
        return f"a block of {run.block_size:,} tokens, {run.tokens_per_step:,} tokens per step"

    shapes = Shapes("context", range(LONGEST, 0, -BLOCK_STEP), lambda block: with_block(config, block))
    return _largest(config, target, allow, "longest-context", shapes, describe)


def _largest(config: RunConfig, target: FitTarget, allow: frozenset[str], goal: str, shapes: Shapes,
             describe: Callable[[RunConfig], str]) -> FitResult:
    if config.init_from != "scratch":
        raise UsageError(f"--goal {goal} changes the model, and init_from={config.init_from} names one that exists.",
                         "--init_from=scratch")
    may = permitted(config, allow)
    fitting = largest_that_fits([shapes], target, may)
    why_shape = "the largest that can be trained there"
    found = fitting and _found(config, fitting.search, allow, shapes.permission, why_shape)
    if fitting is None or found is None or found.chosen is None:
        smallest = shapes.make(shapes.sizes[-1])
        return _nothing_fits(smallest, target.search(smallest, may), target, allow)
    note = f"The largest that can be trained there: {describe(fitting.search.given)}"
    if fitting.larger is not None:
        why = "does not fit"
        if target.host_bytes is not None and target._replace(host_bytes=None).search(fitting.larger, may).may_fit():
            why = f"needs more than {show_bytes(target.host_bytes)} of CPU RAM"
        note += f"; {describe(fitting.larger)} {why}"
    notes = [f"{note}.{_training_time(found.chosen)}"]
    if found.chosen.config.offload != config.offload:  # the largest that needs no CPU RAM is often many times faster
        alone = largest_that_fits([shapes], target._replace(host_bytes=0), may)
        if alone and (chosen := alone.search.choose()):
            scored = alone.search.scored(alone.search.config_of(chosen), "free")
            notes.append(f"The largest without offload: {describe(scored.config)}.{_training_time(scored)}")
    return found._replace(notes=(*found.notes, *notes))


def _training_time(scored: ScoredConfig) -> str:
    """A sentence on how long a compute-optimal training takes."""
    if scored.speed is None:
        return ""
    config = scored.config
    params = config.gpt_config().count_params() - config.block_size * config.n_embd  # without position embeddings
    tokens = TOKENS_PER_PARAMETER * params
    hours = [tokens / speed / 3600 for speed in (scored.speed.high, scored.speed.low)]
    unit, hours_per_unit = ("days", 24) if hours[1] > 48 else ("hours", 1)
    least, most = (f"{each / hours_per_unit:,.0f}" if each / hours_per_unit >= 10 else f"{each / hours_per_unit:.1f}"
                   for each in hours)
    low, high = (show_count(round(speed)) for speed in (scored.speed.low, scored.speed.high))
    return (f" At {low} to {high} tokens/s, {TOKENS_PER_PARAMETER} tokens per parameter ({show_count(tokens)}, about "
            f"compute-optimal) take {least} to {most} {unit}.")


# ---- the smallest memory


def smallest_memory(config: RunConfig, target: FitTarget, allow: frozenset[str]) -> FitResult:
    """The settings that need least memory, whatever their speed; and the least without offload, if they offload."""
    search = target.search(config, permitted(config, allow))
    least = search.scored(*search.least())
    notes, enough = list(permission_notes(config, allow)), least.headroom >= 0
    if enough:
        process = least.needs + target.budget.outside
        notes.append(f"nvidia-smi will show about {show_bytes(process)}, which includes the CUDA context: "
                     f"--budget={-(-(process + OUTSIDE_ERROR) // MiB)}MiB is enough.")
    if least.config.offload != config.offload:
        on_gpu = target._replace(host_bytes=0).search(config, permitted(config, allow))
        alone = on_gpu.scored(*on_gpu.least())
        notes.append(f"Without more in CPU RAM: {show_bytes(alone.needs)}, by "
                     f"{' '.join(alone.flags) or 'the given settings'}.")
    return FitResult(target.budget, search.scored(config, "free"), least if enough else None,
                     decisions(search, config, least.config, "") if enough else (), frontier=search.frontier(),
                     error=search.error, least=least, considered=len(search.candidates), replayed=search.replays,
                     notes=tuple(notes))


# ---- other sizes of model and block


class Shapes(NamedTuple):
    """Runs with another model or block, the largest first."""

    permission: str                                          # that it takes to use one
    sizes: Sequence[Any]
    make: Callable[[Any], RunConfig] = lambda config: config  # size → run


class FittingShape(NamedTuple):
    search: Search
    permission: str
    larger: RunConfig | None  # the next larger shape, which does not fit


def largest_that_fits(shapes: Sequence[Shapes], target: FitTarget, may: frozenset[str]) -> FittingShape | None:
    """The largest shape that fits, of the first shapes that have one. None if the last one of all, which is the
    smallest, does not fit."""
    def fits(config: RunConfig) -> bool:
        return target.search(config, may).may_fit()

    if not shapes or not fits(shapes[-1].make(shapes[-1].sizes[-1])):
        return None
    for permission, sizes, make in shapes:
        place = bisect_left(sizes, True, key=lambda size: fits(make(size)))
        if place < len(sizes):
            larger = make(sizes[place - 1]) if place else None
            return FittingShape(target.search(make(sizes[place]), may), permission, larger)
    return None


def smaller_shapes(config: RunConfig, allow: frozenset[str]) -> list[Shapes]:
    """What is allowed: a shorter block, a smaller model, then both."""
    blocks, models = list(shorter_blocks(config)), list(smaller_models(config))
    found = [Shapes("context", blocks)] if "context" in allow else []
    if "model" in allow:
        found.append(Shapes("model", models))
    if {"context", "model"} <= allow:
        found += [Shapes("model", list(smaller_models(short))) for short in blocks]
    return [each for each in found if each.sizes]


HEAD_WIDTH = 64         # of GPT-2, whatever its size
GPT2 = ((1, 1), (12, 12), (16, 24), (20, 36), (25, 48), (64, 142))  # (heads, layers): its sizes, interpolated
LARGEST_HEADS = 64      # width 4,096, 142 layers: 28.8 billion parameters, too large for any single GPU
SHORTEST, BLOCK_STEP, LONGEST = 64, 128, 1 << 20  # tokens of a block


class ModelSize(NamedTuple):
    n_layer: int
    n_head: int
    n_embd: int


def describe_shape(config: RunConfig) -> str:
    params = show_count(config.gpt_config().count_params())
    return (f"n_layer {config.n_layer}, n_head {config.n_head}, n_embd {config.n_embd}, block_size "
            f"{config.block_size}, {params} parameters")


def gpt2_sizes() -> list[ModelSize]:
    """From the smallest up: one per number of heads, as deep as interpolation between GPT-2's sizes says."""
    sizes = []
    for heads in range(2, LARGEST_HEADS + 1):
        low, high = next((a, b) for a, b in pairwise(GPT2) if heads <= b[0])
        layers = low[1] + round((heads - low[0]) * (high[1] - low[1]) / (high[0] - low[0]))
        sizes.append(ModelSize(layers, heads, HEAD_WIDTH * heads))
    return sizes


def with_size(config: RunConfig, size: ModelSize) -> RunConfig:
    """The run with another model; every layer keeps what it keeps by default."""
    return replace(config, **size._asdict(), saved_activations=RunConfig.saved_activations, grad_checkpoint=False)


def smaller_models(config: RunConfig) -> Iterator[RunConfig]:
    """Fewer heads of the same width, and fewer layers in proportion: the largest first."""
    width = config.n_embd // config.n_head
    for heads in range(config.n_head - 1, 0, -1):
        layers = max(round(config.n_layer * heads / config.n_head), 1)
        yield with_size(config, ModelSize(layers, heads, heads * width))


def shorter_blocks(config: RunConfig) -> Iterator[RunConfig]:
    """Half the block and twice the micro-batches, repeatedly: the tokens per step stay."""
    while config.block_size % 2 == 0 and config.block_size // 2 >= SHORTEST:
        half = config.block_size // 2
        config = replace(config, block_size=half, eval_block_size=min(config.eval_block_size, half),
                         gradient_accumulation_steps=2 * config.gradient_accumulation_steps)
        yield config


def with_block(config: RunConfig, block: int) -> RunConfig:
    """Micro-batches of one sequence of that length, with about as many tokens per step and per evaluation."""
    sequences = max(round(config.tokens_per_step / block), 1)
    windows = max(config.eval_iters * config.batch_size * config.block_size // block, 1)
    return replace(config, block_size=block, eval_block_size=0, eval_batch_size=0, batch_size=1, eval_iters=windows,
                   gradient_accumulation_steps=sequences)


# ---- why each option differs from the given run: what would happen if it alone had its given value

SHAPE_OPTIONS = ("n_layer", "n_head", "n_embd")
BLOCK_OPTIONS = ("block_size", "eval_block_size")
# Options that change together, and the effect on training; the other memory savers follow by their permission.
GROUPS: dict[tuple[str, ...], str] = {
    SHAPE_OPTIONS: "another model: its loss does not compare with that of the given one",
    BLOCK_OPTIONS: "a shorter context: a loss at another block size does not compare",
    ("batch_size", "gradient_accumulation_steps", "eval_iters"): "the same sequences in every step, in the same order",
    ("saved_activations", "grad_checkpoint"): "the same arithmetic",
    ("loss_chunk",): "the same loss, in other chunks",
    ("eval_batch_size",): "the same loss, in other batches",
    ("compile",): "the same arithmetic in fewer kernels",
    ("cuda_graphs",): "the same kernels, launched one by one",
}
EFFECTS = {"free": "the same arithmetic", "places": "the same arithmetic, on the CPU", "lossy": "lossy: values are "
           "rounded", "rules": "another training rule"}
MIN_SPEED = 0.001      # relative difference that is mentioned
MIN_MEMORY = 16 * MiB  # difference that is mentioned


def decisions(search: Search, given: RunConfig, chosen: RunConfig, why_shape: str) -> tuple[Decision, ...]:
    """One decision per group of options that differ. `why_shape`: why the shape changed, if it did."""
    found = []
    for options, effect in _groups(chosen).items():
        changes = {option: (getattr(given, option), getattr(chosen, option)) for option in options
                   if getattr(given, option) != getattr(chosen, option)}
        if changes:
            why = why_shape if options in (SHAPE_OPTIONS, BLOCK_OPTIONS) else ""
            found.append(Decision(changes, _reason(search, given, chosen, changes, options[0], why, effect)))
    return tuple(found)


def _groups(chosen: RunConfig) -> dict[tuple[str, ...], str]:
    """GROUPS, and one group per option of the other memory savers, with the effect of the value that was chosen."""
    grouped = {option for options in GROUPS for option in options}
    of_savers = dict.fromkeys(saver.option for saver in SAVERS if saver.permission in EFFECTS)
    groups = dict(GROUPS)
    for option in of_savers:
        if option in grouped:
            continue
        savers = [saver for saver in SAVERS if saver.option == option]
        required = dict.fromkeys(each for saver in savers for each in saver.settings
                                 if each not in of_savers and each not in grouped)
        effect = next((EFFECTS[saver.permission] for saver in savers if saver.is_on(chosen)), EFFECTS["free"])
        groups[option, *required] = effect
    return groups


def _counterfactual(search: Search, chosen: RunConfig, given: dict[str, Any]) -> str:
    """What would happen with the given values of these options."""
    first = "grad_checkpoint" if given.get("grad_checkpoint") else next(iter(given))
    before = f"{first}={shown(given[first])}"
    try:
        other = replace(chosen, **given)
    except UsageError:
        return f"{before} does not work with the other settings"
    needs = search.estimated_needs(other)
    if not search.fits(other):
        return f"with {before} it would need about {show_bytes(needs)}, and {show_bytes(search.limit)} may be reserved"
    now, then = (modelled(resolve_run(config, search.platform), search.ranked_on, search.platform,
                          likely_efficiency(search.ranked_on)) for config in (chosen, other))
    faster, less = now / then - 1, needs - search.estimated_needs(chosen)
    if faster > MIN_SPEED:
        price = f", for {show_bytes(-less)} more" if less < -MIN_MEMORY else ""
        return f"{100 * faster:.1f} % faster than with {before}{price}"
    return f"{show_bytes(less)} less than with {before}" if less > 0 else f"no slower than with {before}"


def _reason(search: Search, given: RunConfig, chosen: RunConfig, changes: dict[str, tuple[Any, Any]], option: str,
            why: str, effect: str) -> str:
    """"why: what makes the difference; the effect on training", for the group that begins with `option`. `why` is empty
    where the given values are compared with the chosen ones."""
    mechanism = ""  # where it is not obvious
    if option == "block_size" and chosen.block_size > given.block_size:
        effect = "a longer context: a loss at another block size does not compare"
    elif option == "batch_size":
        if chosen.step_in_backward and chosen.gradient_accumulation_steps == 1:
            why = "step_in_backward excludes accumulation, so one micro-batch has all sequences of a step"
        mechanism = ("fewer sequences are in memory at once" if chosen.batch_size <= given.batch_size else
                     "gradients leave the GPU less often" if chosen.offload == "gradients" else
                     "larger matmuls use the GPU better")
        if chosen.block_size != given.block_size:
            effect = f"{chosen.tokens_per_step:,} tokens per step instead of {given.tokens_per_step:,}"
        effect += ", with other dropout masks" if chosen.dropout else ""
        before, now = (each.eval_iters * each.batch_size for each in (given, chosen))
        effect += f"; evaluations cover {now:,} windows instead of {before:,}" if now != before else ""
    elif option == "eval_batch_size" and chosen.eval_batch == given.eval_batch:
        why = "the evaluation stays as it was, whatever the micro-batch"
    elif option == "loss_chunk":
        before = loss_chunk_tokens(chosen.batch_size * chosen.block_size, chosen.vocab_size, given.loss_chunk)
        mechanism = ("the gradient of the head's weights is summed in fewer rounds" if chosen.loss_chunk > before else
                     "fewer logits exist at once")
    elif option == "cuda_graphs" and chosen.cuda_graphs is False:
        mechanism = "CUDA graphs keep a memory pool of their own"
    elif option == "compile" and chosen.compile is True:
        mechanism = "fused kernels move fewer bytes"
    elif option == "saved_activations" and set(chosen.policies) == {"all"}:
        effect += ", and nothing is recomputed: there is enough memory"
    elif option == "offload" and chosen.offload != "none":
        effect += f", with {show_bytes(host_bytes(chosen))} of CPU RAM"
    why = why or _counterfactual(search, chosen, {name: old for name, (old, _) in changes.items()})
    why += f": {mechanism}" if mechanism else ""
    if option == "saved_activations" and search.is_maximal(chosen):
        why += "; as little recomputation as fits: if any single layer kept more, it would not fit"
    return f"{why}; {effect}"


# By the goal of command_options.FitQuestions. The config needs a vocabulary; for what is allowed see parse_allow.
GOALS: dict[str, Callable[[RunConfig, FitTarget, frozenset[str]], FitResult]] = {
    "fastest": find_fastest, "largest-model": largest_model, "longest-context": longest_context,
    "smallest-memory": smallest_memory}


def fit_to_goal(goal: str, config: RunConfig, target: FitTarget, allow: frozenset[str]) -> FitResult:
    """The settings that a goal chooses; tight ones only where no others fit."""
    found = GOALS[goal](config, target._replace(safe=True), allow)
    return found if found.chosen is not None else GOALS[goal](config, target, allow)
