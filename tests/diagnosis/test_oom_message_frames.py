"""Tracebacks of Python, notebooks and pytest: frames, phase, trainer, compile mode."""

from __future__ import annotations

import pytest

from fitgpt.diagnosis.oom_message import StackFrame, clean, is_compiled, parse_frames, phase_of, trainer_of, user_frame

NANOGPT = '''Traceback (most recent call last):
  File "/home/me/nanoGPT/train.py", line 264, in <module>
    losses = estimate_loss()
  File "/usr/lib/python3.11/site-packages/torch/utils/_contextlib.py", line 115, in decorate_context
    return func(*args, **kwargs)
  File "/home/me/nanoGPT/train.py", line 224, in estimate_loss
    logits, loss = model(X, Y)
  File "/home/me/nanoGPT/model.py", line 187, in forward
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 3462, in cross_entropy
    return torch._C._nn.cross_entropy_loss(
'''


def test_phase_trainer_and_compile_mode_of_a_traceback() -> None:
    frames = parse_frames(NANOGPT)
    assert phase_of(frames) == "eval"
    assert trainer_of(frames) == "nanogpt"
    assert is_compiled(frames) is False
    inside = StackFrame("/tmp/torchinductor_me/ab/cab.py", 12, "call")
    assert is_compiled((*frames, inside)) is True
    assert is_compiled(frames[:1]) is None
    line = user_frame(frames)
    assert line is not None
    assert (line.file, line.line, line.function) == ("/home/me/nanoGPT/model.py", 187, "forward")


@pytest.mark.parametrize(("code", "file", "function", "phase"), [
    ("loss.backward()", "train.py", "main", "backward"),
    ("optimizer.step()", "train.py", "main", "step"),
    ("func(", "/x/torch/optim/adamw.py", "_multi_tensor_adamw", "step"),
    ("model.to(device)", "train.py", "<module>", "load"),
    ("return t.to(", "/x/torch/nn/modules/module.py", "convert", "load"),
    ("x = self.mlp(x)", "model.py", "forward", "forward"),
    ("logits, loss = model(X, Y)", "train.py", "<module>", "forward"),
    ("logits, loss = model(X, Y)", "train.py", "estimate_loss", "eval"),
    ("metrics = trainer.evaluate()", "run.py", "main", "eval"),
    ("state = model.state_dict()", "train.py", "main", "save"),
    ("trainer.save_model(out)", "train.py", "validate_and_save", "save"),
    ("torch.save(checkpoint, path)", "train.py", "evaluate", "save"),
    ("model.load_state_dict(torch.load(path))", "train.py", "main", "load"),
    ("optimizer.step()", "train.py", "train_and_evaluate", "step"),
    ("optimizer.load_state_dict(state)", "/x/torch/optim/optimizer.py", "load_state_dict", "load"),
    ("self.optimizer.run()", "stage3.py", "_optimizer_step", "step"),
    ("loss = criterion(net(x), y)", "train.py", "val_one_epoch", "eval"),
    ("h = hidden_states.to(torch.float32)", "llama.py", "norm", ""),
    ("batch = batch.to(device)", "train.py", "main", ""),
    ("x = 1", "x.py", "<module>", ""),
])
def test_each_phase_is_recognised(code: str, file: str, function: str, phase: str) -> None:
    assert phase_of(parse_frames(f'  File "{file}", line 1, in {function}\n    {code}\n')) == phase


def test_notebook_and_pytest_tracebacks_are_parsed() -> None:
    notebook = ("<ipython-input-116-11ebb3420695> in <module>\n     28 a\n---> 30   predictions = network(images)\n"
                "~/torch/nn/modules/module.py in _call_impl(self, *input)\n--> 722       result = self.forward()\n")
    assert [(frame.function, frame.line) for frame in parse_frames(notebook)] == [
        ("<module>", 30), ("_call_impl", 722)]
    assert [frame.line for frame in parse_frames("a/trainer.py:1412: in train\n    return inner(\n")] == [1412]


def test_tracebacks_of_ipython_8_and_rich_are_parsed() -> None:
    ipython = ("Cell In[11], line 2\n      1 #torch.cuda.empty_cache()\n----> 2 trainer_stats = trainer.train()\n\n"
               "File ~/site-packages/flair/trainer.py:624, in ModelTrainer.train_custom(self, base_path)\n"
               "    622     gradient_norm = None\n--> 624 scaler.step(self.optimizer)\n    625 scaler.update()\n")
    assert [(frame.file, frame.line, frame.function, frame.code) for frame in parse_frames(ipython)] == [
        ("Cell In[11]", 2, "", "trainer_stats = trainer.train()"),
        ("~/site-packages/flair/trainer.py", 624, "train_custom", "scaler.step(self.optimizer)")]
    rich = ("│ C:\\venv\\grad_scaler.py:290 in _maybe_opt_step        │\n│   289 │   │   if not found:        │\n"
            "│ ❱ 290 │   │   │   retval = optimizer.step(*args)   │\n│   291 │   │   return retval      │\n")
    frame, = parse_frames(clean(rich))
    assert (frame.line, frame.function, frame.code) == (290, "_maybe_opt_step", "retval = optimizer.step(*args)")


def test_only_the_last_traceback_counts() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in old\n    x\nError\n' + NANOGPT
    assert "old" not in [frame.function for frame in parse_frames(text)]
