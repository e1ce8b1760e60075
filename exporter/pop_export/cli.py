"""`pop-export`: arguments in, a bundle and one summary out."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pop_export.config import DEFAULT_RATIO, Dialect, ExportConfig, Precision, Quantizer
from pop_export.extras import imports_for
from pop_runtime.command import run_command
from pop_runtime.manifest import Windows
from pop_runtime.prompt_work import PromptWork, speedup_limit
from pop_runtime.version import add_version_flag

EXAMPLES = """\
examples:
  pop-export --model smollm2-135m --out out/smollm2            the default model; no account, no hub
  pop-export --model ./my-llama --out out/llama --prune-ratio 0.25
  pop-export --model model.gguf --out out/m --prune-layers 20-29
  pop-export --model ./m --out out/m --calibration-data notes.txt chats.jsonl
  pop-export --model ./m --out out/m --target-speedup 1.7 --search-breadth 4   the least damaging plan that is so fast
  pop-export --model ./m --out out/m --no-refit --sink-tokens 0 --boundary-tokens 1         the method as published
  pop-export --model ./m --out out/m --dialect standard --precision fp16           for TensorRT and other runtimes
  pop-export --model ./m --out out/m2 --calibration out/m/calibration.json --prune-layers none

exit codes: 0 done, 1 stdout cannot be written, 2 usage, 3 model or bundle, 4 backend or
device, 5 a parity or quality gate failed
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser; defaults are those of `ExportConfig`."""
    defaults = {name: field.default for name, field in ExportConfig.__dataclass_fields__.items()}
    parser = argparse.ArgumentParser(
        prog="pop-export",
        description="Export a decoder language model as a pruned prefill graph and a full decode graph over one set "
        "of weights. The layers that the prompt does not need are found by calibration.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="X", help="a Hugging Face id or folder, a .gguf file, or a known name: "
        "smollm2-135m, gemma3-270m")  # fmt: skip
    add("--out", required=True, type=Path, metavar="DIR", help="the bundle to make")
    add("--force", action="store_true", help="replace the bundle that is already there")
    add("--json", action="store_true", help="end stdout with one JSON object: what report.json holds")
    add("--threads", type=int, metavar="N", help="threads to use (default: one per visible core)")

    add_version_flag(parser)
    add_checkpoint_flags(parser.add_argument_group("checkpoint"))

    calibration = parser.add_argument_group("calibration")
    add = calibration.add_argument
    add("--calibration", type=Path, metavar="FILE", help="reuse this calibration.json of the same model")
    add("--calibration-data", nargs="+", default=(), metavar="DATA",
        help=".txt, .jsonl (\"text\" or chat \"messages\") or data set ids (default: documentation text that ships "
        "with Python)")  # fmt: skip
    add("--calibration-samples", type=int, metavar="N", help="windows of text (default %(default)s)")
    add("--calibration-length", type=int, metavar="N", help="tokens per window (default %(default)s)")
    add("--fisher", choices=("sampled", "empirical"),
        help="targets sampled from the model (the paper) or the true next tokens (default %(default)s)")  # fmt: skip
    add("--seed", type=int, help="of everything drawn at random (default %(default)s)")

    plan = parser.add_argument_group(
        "which layers the prompt skips",
        f"at most one of the first four; without any, a third of the layers ({DEFAULT_RATIO:.2f})",
    )
    add = plan.add_argument
    add("--prune-ratio", type=float, metavar="R", help="this share of the layers, the least important first")
    add("--prune-layers", metavar="LIST", help='these layers: "20-29", "5,12-14" or "none"')
    add("--max-kl", type=float, metavar="X",
        help="as many layers as do no more damage than X: mean KL divergence to the full model in nats per token, "
        "measured on text kept aside (0.01 is hardly to be noticed, 0.1 is)")  # fmt: skip
    add("--target-speedup", type=float, metavar="R",
        help="as few layers as make the prefill of 1024 tokens R times as fast, by a count of operations")  # fmt: skip
    add("--select", choices=("gates", "search"),
        help="what orders the layers: gate importance (the paper), or, where gates and depth disagree, damage measured "
        "for the time that it saves, some 20 s a layer (default: search, gates with --no-refit)")  # fmt: skip
    add("--search-breadth", type=int, metavar="N", help="layers that search tries per step (default %(default)s)")
    add("--no-curve", dest="curve", action="store_false",
        help="do not measure the damage of other ratios for the report")  # fmt: skip

    closer = parser.add_argument_group("how close the pruned prefill stays to the full model")
    add = closer.add_argument
    add("--refit", action=argparse.BooleanOptionalAction,
        help="fit the K and V projections of skipped layers, in the prefill graph only, to what the full model writes; "
        "--no-refit gives the published method (default: refit)")  # fmt: skip
    add("--surrogate", choices=("auto", "off"),
        help="give skipped layers that lie before kept ones a linear map, where text kept aside gains by it "
        "(default: auto, off with --no-refit)")  # fmt: skip
    add("--refit-samples", type=int, metavar="N", help="windows of text to fit on (default %(default)s)")
    add("--self-samples", type=int, metavar="N",
        help="samples of text to fit on that the model writes itself, 0 for none (default %(default)s)")  # fmt: skip
    add("--refit-length", type=int, metavar="N",
        help="tokens per window, to fit on and to measure damage with (default %(default)s)")  # fmt: skip
    add("--tune-steps", type=int, metavar="N",
        help="steps that move the fitted K and V to where the full model predicts after a pruned prompt what it does "
        "after a full one; more steps, more time and less damage, 0 for none (default %(default)s)")  # fmt: skip
    add("--sink-tokens", type=int, metavar="N",
        help="first tokens of a sequence that run at full depth (default %(default)s)")  # fmt: skip
    add("--boundary-tokens", type=int, metavar="N",
        help="last tokens of each prompt that run at full depth (default %(default)s)")  # fmt: skip

    precision = parser.add_argument_group("precision and operators")
    add = precision.add_argument
    add("--dialect", choices=get_args(Dialect),
        help="ort: with ONNX Runtime's own operators, the fastest on a CPU; standard: those of ONNX opset 24 alone, "
        "for TensorRT and any other ONNX runtime (default %(default)s)")  # fmt: skip
    add("--precision", choices=get_args(Precision),
        help="of the weights: 32 or 16 bits, or blocks of 8 or 4 bits; int8-dynamic multiplies in integers, for the "
        "fastest prefill on a CPU (default %(default)s)")  # fmt: skip
    add("--block-size", type=int, metavar="N",
        help="int8, int4: weights that share a scale: 16 to 256 (default 32)")  # fmt: skip
    symmetry = precision.add_mutually_exclusive_group()
    symmetry.add_argument("--symmetric", dest="symmetric", action="store_true", default=None,
        help="int8, int4: no zero point per block (default for int8); int4 with gptq then decodes fastest, at twice "
        "the damage")  # fmt: skip
    symmetry.add_argument("--asymmetric", dest="symmetric", action="store_false", default=None,
        help="int8, int4: a zero point per block (default for int4)")  # fmt: skip
    add("--quantizer", choices=get_args(Quantizer),
        help="int8, int4, int8-dynamic: find scales from the weights alone, rounding to nearest (rtn, the default for "
        "8 bits) or by ONNX Runtime's k_quant (int8, int4) and hqq (int4); or fit weights to text layer after layer "
        "(gptq, for int4 the default, takes minutes)")  # fmt: skip
    parser.set_defaults(**{name: defaults[name] for name in defaults if name not in ("model", "out")})
    return parser


def add_checkpoint_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that say how a checkpoint is read: the same for every command that reads one."""
    add = parser.add_argument
    add("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face id (default: its default branch)")
    add("--offline", action="store_true", help="never touch the network")
    add("--trust-remote-code", action="store_true", help="run Python code that lies in the model's folder")
    add("--allow-pickle", action="store_true", help="read weights from pickle files")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = vars(parser().parse_args(argv))
    as_json = arguments.pop("json")
    logging.basicConfig(level=logging.WARNING, format="pop-export: warning: %(message)s")
    signal.signal(signal.SIGTERM, _interrupt)

    def work() -> None:
        config = ExportConfig(**{**arguments, "calibration_data": tuple(arguments["calibration_data"])})
        with imports_for("exporting"):
            from pop_export.pipeline import export  # torch takes seconds to import: not for --help or a typing error

        bundle = export(config)
        print(json.dumps(bundle.report) if as_json else summary(bundle.folder, bundle.report))

    return run_command("pop-export", work, "interrupted; nothing was written")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def summary(folder: Path, report: dict[str, Any]) -> str:
    """Return what a person wants to know of a finished export."""
    plan, speed = report["plan"], report["speed"]
    quality = report["quality"]
    damage = "damage was not measured: its prompts lie within the windows"
    if quality is not None:
        chosen = quality["chosen"]
        damage = (
            f"damage on text kept aside: KL {chosen['kl_mean_nats']:.3f} nats per token, "
            f"same first choice at {chosen['top1_agreement']:.1%} of {chosen['num_positions']} positions"
        )
    full, pruned = (PromptWork(**report["work"][prefill]) for prefill in ("full", "pruned"))
    limit = speedup_limit(full, pruned, Windows(**report["windows"]), speed["num_prompt_tokens"])
    return "\n".join(
        (
            f"{folder}: {len(plan['skipped_layers'])} of {plan['num_layers']} layers skipped in prefill: "
            f"{', '.join(map(str, plan['skipped_layers'])) or 'none'}; refitted: {len(plan['refitted_layers'])}, "
            f"with a surrogate: {len(plan['surrogate_layers'])}",
            damage,
            f"prompt of {speed['num_prompt_tokens']} tokens: {speed['full_prefill_ms']:.0f} ms full, "
            f"{speed['pruned_turn_ms']:.0f} ms pruned between its windows: {speed['turn_speedup']:.2f} x, counting "
            f"work allows {limit:.2f} x",
            *_precision_lines(report),
            f'try it: pop-run {folder} --prompt "Explain in two sentences why the sky is blue."',
        )
    )


def _precision_lines(report: dict[str, Any]) -> list[str]:
    """Return what was verified, against what, and what fewer bits cost."""
    checks, damage, precision = report["verification"]["checks"], report["precision_damage"], report["precision"]
    rounded = [check for check in checks if check["arithmetic"] == "int8 activations"]
    proofs = [check for check in checks if check not in rounded]
    worst = max(check["largest_difference"] for check in proofs)
    twin = "PyTorch" if damage is None else f"PyTorch in fp32 with the weights as {precision} stores them"
    kernels = ", kernels exact" if rounded else ""
    lines = [f"verified: logits within {worst:.1g} of {twin} in {len(proofs)} comparisons{kernels}"]
    if rounded:
        worst, largest = (max(check[key] for check in rounded) for key in ("largest_difference", "largest_logit"))
        lines.append(
            f"as it runs, with kernels that round activations to 8 bits: within {worst:.2g} of the same in "
            f"{len(rounded)} comparisons; the largest logit is {largest:.3g}"
        )
    if damage is not None:
        lines.append(
            f"KL to the checkpoint, nats per token: {damage['quantisation_kl_nats']:.4f} by {precision} alone, "
            f"{damage['pruning_kl_nats']:.4f} by the skipped layers alone, {damage['both_kl_nats']:.4f} by both"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
