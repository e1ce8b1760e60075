"""Make what the peers of `pop-bench` load, from a checkpoint that pop-export reads, and print the flag for it.

    python benchmarks/peer_models.py --model smollm2-135m --out build/peers
    pop-bench out/smollm2 --peers "$(python benchmarks/peer_models.py --model smollm2-135m --out build/peers)"

A Hugging Face folder in fp32 and one in bf16 for transformers, one graph per precision by onnxruntime-genai's own
builder, one for OpenVINO GenAI with `--optimum-cli PATH`, and for llama.cpp, where the checkpoint is a GGUF, the same
in the types that it is fastest with; that takes llama-cpp-python, without it the checkpoint itself is named.
What is there already is left as it is. optimum-intel 2.2 wants an older transformers than pop-export does, so it goes
into an environment of its own: python -m venv V && V/bin/pip install torch==2.13.0 optimum-intel accelerate.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

from pop_export.checkpoint import load_checkpoint
from pop_export.locate import locate

BUILDER = "onnxruntime_genai.models.builder"
GENAI_OPTIONS = {
    "fp32": ["prune_lm_head=true"],  # logits of the last position alone, as ours
    # blocks, kernels and quantised embedding as pop-export chooses them
    "int8": ["prune_lm_head=true", "accuracy_level=4", "block_size=32", "op_types_to_quantize=MatMul/Gather"],
    "int4": ["prune_lm_head=true", "accuracy_level=4", "block_size=32", "op_types_to_quantize=MatMul/Gather"],
}
# Both are repacked for AVX2; a Q4_1, which SmolLM2's checkpoint is, takes twice the time for a prompt.
LLAMA_TYPES = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}


def main() -> None:
    """Make the models that are not there and print the value of `--peers`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("build/peers"))
    parser.add_argument("--genai", default="fp32,int4,int8", help="precisions for onnxruntime-genai; empty for none")
    parser.add_argument("--optimum-cli", type=Path, metavar="PATH", help="of optimum-intel, for OpenVINO GenAI")
    arguments = parser.parse_args()
    folders = {name: arguments.out / f"hf-{name}" for name in ("fp32", "bf16")}
    if not all(folder.is_dir() for folder in folders.values()):
        save_hugging_face(arguments.model, folders)
    peers = [f"transformers={folder}" for folder in folders.values()]
    for precision in filter(None, arguments.genai.split(",")):
        folder = arguments.out / f"genai-{precision}"
        if not folder.is_dir():
            build_genai(folders["fp32"], folder, precision)
        peers.append(f"onnxruntime-genai={folder}")
    if arguments.optimum_cli is not None:
        folder = arguments.out / "openvino-int8"
        if not folder.is_dir():
            build_openvino(arguments.optimum_cli, folders["fp32"], folder)
        peers.append(f"openvino-genai={folder}")
    file = locate(arguments.model, offline=False, trust_remote_code=False, allow_pickle=False).path
    if file.suffix == ".gguf":
        peers += [f"llama-cpp={path}" for path in requantized(file, arguments.out)]
    print(",".join(peers))


def requantized(source: Path, out: Path) -> list[Path]:
    """Return GGUF files of a checkpoint in `LLAMA_TYPES`, or the checkpoint if llama-cpp-python is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return [source]
    import llama_cpp

    files = [out / f"llama-{name}.gguf" for name in LLAMA_TYPES]
    for file, kind in zip(files, LLAMA_TYPES.values(), strict=True):
        if not file.is_file():
            parameters = llama_cpp.llama_model_quantize_default_params()
            parameters.ftype, parameters.allow_requantize = getattr(llama_cpp, kind), True
            part = file.with_suffix(".part")
            if llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.byref(parameters)):
                raise SystemExit(f"{source}: llama.cpp could not write it as {kind}; see what it printed above")
            part.rename(file)
    return files


def save_hugging_face(name: str, folders: dict[str, Path]) -> None:
    """Write the checkpoint as Hugging Face folders. A model read from GGUF refuses to be saved; its copy does not."""
    checkpoint = load_checkpoint(name)
    config = type(checkpoint.model.config).from_dict(checkpoint.model.config.to_dict())
    config.__dict__.pop("quantization_config", None)
    model = type(checkpoint.model)(config)
    model.load_state_dict(checkpoint.model.state_dict())
    model.tie_weights()
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model.to(dtype).save_pretrained(folders[kind])
        checkpoint.tokenizer.save_pretrained(folders[kind])


def build_genai(source: Path, target: Path, precision: str) -> None:
    """Let onnxruntime-genai build its own graph of a Hugging Face folder; what it prints goes to stderr."""
    command = [sys.executable, "-m", BUILDER, "-m", str(source), "-o", str(target), "-p", precision, "-e", "cpu"]
    subprocess.run([*command, "--extra_options", *GENAI_OPTIONS[precision]], check=True, stdout=sys.stderr)


def build_openvino(optimum_cli: Path, source: Path, target: Path) -> None:
    """Let optimum-intel convert a Hugging Face folder, weights in 8 bits per channel; what it prints goes to stderr."""
    command = [optimum_cli, "export", "openvino", "-m", source, "--task", "text-generation-with-past"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # packages are its own
    subprocess.run(
        [*command, "--weight-format", "int8", target], check=True, stdout=sys.stderr, env=environment
    )  # fmt: skip


if __name__ == "__main__":
    main()
