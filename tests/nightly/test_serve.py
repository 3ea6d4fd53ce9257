"""The server of docs/serve.md, started for real on a CPU: it answers with the tokens of the dense model."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.models.speaking import decoders
from twell_lab.models.tiny import EDGE

for needed in ("transformers", "tokenizers", "fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed, reason='pip install "transformers[serving]"')

ROOT = Path(__file__).resolve().parents[2]
PROMPT, TOKENS = "In the", 12


@pytest.mark.parametrize("batching", [["--continuous-batching", "--cb-num-blocks", "64"], []])
def test_a_swapped_model_is_served(tmp_path, batching):
    tokenizer = decoders.of_bytes(eos_token=EDGE, pad_token=EDGE)
    model = decoders.build("Llama", hidden_act="relu", vocab_size=len(tokenizer), max_position_embeddings=512)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
    wanted = tokenizer.decode(said, skip_special_tokens=True)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "build" / "swapped")

    script = re.search(r"```python\n(import twell_lab.*?)```", (ROOT / "docs" / "serve.md").read_text(), re.S)[1]
    told = 'print("paths:", {m.plan for m in model.modules() if hasattr(m, "plan")}, flush=True)'
    script = script.replace("return tl.sparsify(", "model = tl.sparsify(").replace('"build/swapped")', '"twell")')
    script = script.replace('"twell")', f'"twell")\n        {told}\n        return model')
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", script, "serve", "build/swapped", "--device", "cpu", "--port", str(port), *batching],
            cwd=tmp_path, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        question = {"model": "build/swapped", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        address = f"http://localhost:{port}/v1/completions"
        asked = urllib.request.Request(address, json.dumps(question).encode(), {"content-type": "application/json"})
        for _ in range(120):
            try:
                answer = json.load(urllib.request.urlopen(asked, timeout=60))
                break
            except urllib.error.URLError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(1)
    finally:
        server.terminate()
        server.wait(30)
    assert answer["choices"][0]["text"] == wanted
    assert "path='twell'" in (tmp_path / "log").read_text()
