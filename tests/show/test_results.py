"""What the functions of the Python interface return prints as text."""

from __future__ import annotations

import pytest

import fitgpt

MESSAGE = ("CUDA out of memory. Tried to allocate 3.07 GiB (GPU 0; 11.65 GiB total capacity; 7.10 GiB already "
           "allocated; 1.10 GiB free; 7.30 GiB reserved in total by PyTorch)")


def test_a_fit_prints_as_the_command_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = fitgpt.fit({"n_layer": 2, "vocab_size": 65}, gpu="4070")
    assert str(result).startswith("the run on an RTX 4070: fits as given")
    assert "searched  " in str(result)
    assert repr(result).startswith("<fitgpt.fit: fits as given")
    assert result._repr_html_().startswith("<pre>the run")


def test_a_diagnosis_prints_as_the_command_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    diagnosis = fitgpt.explain(MESSAGE)
    assert str(diagnosis).startswith("Out of memory: 3.07 GiB were requested\non GPU 0; 1.10 GiB were free.\n\nwhat ")
    assert repr(diagnosis) == "<fitgpt.explain: Out of memory: 3.07 GiB were requested on GPU 0; 1.10 GiB were free.>"
    assert diagnosis._repr_html_().startswith("<pre>Out of memory")
