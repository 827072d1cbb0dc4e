"""What torch-kitsune forecasts for the recorded scripts that train a model of transformers; no GPU is needed.

    pip install --no-deps --target FOLDER torch-kitsune==0.7.0
    PYTHONPATH=FOLDER python bench/other_estimators.py -o tests/recorded/traces/kitsune.json

It gets the model, the batch, the optimizer, and the dtype that operations compute in.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CASES = Path(__file__).resolve().parent / "trace_cases"
sys.path.insert(0, str(CASES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", required=True)
    out = Path(parser.parse_args().out)
    cases = json.loads((CASES / "cases.json").read_text(encoding="utf-8"))["cases"]
    rows = [{"name": case["name"], "peak_bytes": forecast(case)} for case in cases
            if case["script"] == "language_model.py" and case["group"] == "language"]
    out.write_text(json.dumps({"what": "kitsune.predict.predict_memory of the scripts' models", "date":
                               time.strftime("%Y-%m-%d"), "torch-kitsune": version("torch-kitsune"),
                               "torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} forecasts in {out}")


def forecast(case: dict[str, Any]) -> int:
    import language_model
    from kitsune.predict import predict_memory

    sys.argv = [case["script"], *case["args"]]
    options = language_model.arguments()
    with torch.device("meta"):
        model = language_model.build_model(options)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "fp16-autocast": torch.float16}
    dtype = dtypes.get(options.precision, torch.bfloat16)
    optimizer = "sgd" if "sgd" in options.optimizer else "adam"
    return int(predict_memory(model.train(), (options.seq,), options.batch, dtype, optimizer).total_bytes)


if __name__ == "__main__":
    main()
