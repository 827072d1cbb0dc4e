"""Runs in Pyodide: the site's fitgpt answers questions. SITE is its folder; QUESTIONS has [[name, query, text], …]."""

import json
import sys
import zipfile
from pathlib import Path

SITE, QUESTIONS, ANSWERS = map(Path, sys.argv[1:])

with zipfile.ZipFile(SITE / "python" / "fitgpt.zip") as packed:
    packed.extractall("/fitgpt")
sys.path.append("/fitgpt")

from fitgpt.web import api  # noqa: E402

ANSWERS.write_text(json.dumps([api.answer_json(api.ApiRequest(*question))
                               for question in json.loads(QUESTIONS.read_text())]))
