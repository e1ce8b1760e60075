"""What a user can ask of an export, in one frozen dataclass; `cli.py` fills it, `pipeline.py` reads it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pop_runtime.checks import check_least, shown
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Windows
from pop_runtime.threads import check_threads

DEFAULT_RATIO = 1 / 3  # the paper's choice
MIN_REFIT_LENGTH = 16  # shorter windows have no prompt and continuation worth measuring
# The least that each whole number may be, with what to say of it, and the most, beyond any model or text:
LEAST: dict[str, tuple[int, str]] = {
    "calibration_samples": (1, ""),
    "calibration_length": (4, " tokens"),
    "calibration_batch": (1, ""),
    "seed": (0, ""),
    "search_breadth": (1, ""),
    "refit_samples": (1, ""),
    "self_samples": (0, ""),
    "refit_length": (MIN_REFIT_LENGTH, " tokens"),
    "tune_steps": (0, ""),
    "sink_tokens": (0, ""),
    "boundary_tokens": (1, " (the last prompt token predicts the first new one)"),
}
MOST = 2**53 - 1  # what every reader of JSON keeps as it is
Dialect = Literal["ort", "standard"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "int8-dynamic"]
BLOCKWISE: tuple[Precision, ...] = ("int8", "int4")  # weights in blocks that share a scale
QUANTIZED: tuple[Precision, ...] = (*BLOCKWISE, "int8-dynamic")
# Of a weight:
NUM_BITS: dict[Precision, int] = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "int8-dynamic": 8}
Quantizer = Literal["gptq", "rtn", "k_quant", "hqq"]
BLOCK_SIZES = (16, 32, 64, 128, 256)  # all that ONNX Runtime's quantisers and kernels take (1.32)


@dataclass(frozen=True)
class ExportConfig:
    """Settings of one export. The defaults are those of `pop-export`."""

    model: str  # Hugging Face id, folder, .gguf file or a name from models/
    out: Path
    force: bool = False  # replace an existing bundle
    revision: str | None = None  # branch, tag or commit of a Hugging Face id; None: its default branch
    offline: bool = False  # never touch the network
    trust_remote_code: bool = False  # run Python that lies in the model's folder
    allow_pickle: bool = False  # read weights from pickle files

    calibration: Path | None = None  # reuse this calibration.json
    calibration_data: tuple[str, ...] = ()  # .txt, .jsonl or data set ids; empty: the built-in corpus
    calibration_samples: int = 32
    calibration_length: int = 256  # tokens per sample; the boundary between prompt and response lies at half of it
    calibration_batch: int = 2  #  samples per forward pass; changes speed and memory, never the scores
    fisher: Literal["sampled", "empirical"] = "sampled"
    seed: int = 0

    # Which layers the prefill graph leaves out: at most one of these four, else DEFAULT_RATIO of them.
    prune_ratio: float | None = None  # share of the layers
    prune_layers: str | None = None  # "20-29", "5,12-14" or "none"
    max_kl: float | None = None  # as many as do no more damage than this, in nats per token on text kept aside
    target_speedup: float | None = None  # as few as are predicted to make prefill this many times as fast
    # What orders the layers: gate importance (the paper), or measured damage where gates and depth disagree.
    # None: "search" with refit.
    select: Literal["gates", "search"] | None = None
    search_breadth: int = 2  # layers that search tries per step
    curve: bool = True  # measure the damage of other ratios for the report

    refit: bool = True  # fit K and V projections of skipped layers to what the full model writes
    surrogate: Literal["auto", "off"] | None = None  # linear maps in place of skipped layers; None: "auto" with refit
    refit_samples: int = 24  # windows of the corpus to fit on
    self_samples: int = 48  # and so many samples of text that the model writes itself
    refit_length: int = 512  # tokens per window; damage is measured on windows of this length as well

    tune_steps: int = 100  # of gradient descent on what the full model predicts, from the fitted K and V; 0: none

    # Measured in docs/experiments.md; the paper has 0 and 1.
    sink_tokens: int = 4  # tokens at the start of a sequence that run at full depth
    boundary_tokens: int = 64  # tokens at the end of each turn that run at full depth

    dialect: Dialect = "ort"  # of the graphs: ONNX Runtime's operators too, or those of ONNX alone
    precision: Precision = "fp32"
    block_size: int | None = None  # weights that share a scale; None: as `precision.schemes_for` chooses
    quantizer: Quantizer | None = None  # None: gptq, which fits to text, for int4; rtn for 8 bits
    symmetric: bool | None = None  # None: symmetric for int8, asymmetric for int4

    threads: int | None = None  # None: one per visible core

    def __post_init__(self) -> None:
        """Take paths as text too, and refuse values that no model could make sense of."""
        for name, hint in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _taken(_flag(name), getattr(self, name), hint))
        for name, (least, why) in LEAST.items():
            check_least(_flag(name), getattr(self, name), least, why)
            if getattr(self, name) > MOST:
                raise UsageError(f"{_flag(name)}: expected at most {MOST}, found {getattr(self, name)}; lower it")
        check_threads(self.threads, "--threads")
        self._check_plan()
        self._check_precision()
        self._check_effect()

    def _check_plan(self) -> None:
        """Refuse plans that contradict themselves."""
        ways = {
            "--prune-ratio": self.prune_ratio,
            "--prune-layers": self.prune_layers,
            "--max-kl": self.max_kl,
            "--target-speedup": self.target_speedup,
        }
        given = [flag for flag, value in ways.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)}: expected one way to choose the layers; drop the others")
        if self.prune_ratio is not None and not 0 <= self.prune_ratio < 1:
            raise UsageError(f"--prune-ratio: expected 0 <= ratio < 1, found {self.prune_ratio}")
        if self.max_kl is not None and not (math.isfinite(self.max_kl) and self.max_kl > 0):
            raise UsageError(f"--max-kl: expected a number above 0, in nats per token, found {self.max_kl}")
        if self.target_speedup is not None and not (math.isfinite(self.target_speedup) and self.target_speedup > 1):
            raise UsageError(f"--target-speedup: expected a number above 1, found {self.target_speedup}")
        if self.select == "search" and self.prune_layers is not None:
            raise UsageError("--select search and --prune-layers: the list leaves nothing to search; drop one of them")
        if self.surrogate == "auto" and not self.refit:
            raise UsageError("--surrogate auto and --no-refit: surrogates are fitted with the refit; drop one of them")

    @property
    def ratio(self) -> float:
        """Return the share of layers to skip where a ratio decides."""
        return DEFAULT_RATIO if self.prune_ratio is None else self.prune_ratio

    @property
    def windows(self) -> Windows:
        """Return the tokens of each turn that run at full depth."""
        return Windows(self.sink_tokens, self.boundary_tokens)

    @property
    def searches(self) -> bool:
        """Return whether measured damage orders the layers."""
        return self.prune_layers is None and (self.refit if self.select is None else self.select == "search")

    @property
    def uses_surrogates(self) -> bool:
        """Return whether skipped layers may get linear surrogates."""
        return self.refit and self.surrogate != "off"

    def _check_effect(self) -> None:
        """Refuse settings that others leave without effect; a 0, which asks for none, agrees with them."""
        idle: dict[str, tuple[str, ...]] = {}
        if self.calibration is not None:
            idle["--calibration"] = ("fisher",)  # the samples still say which text is verified with
        if not self.refit:
            idle["--no-refit"] = ("tune_steps", "self_samples")
        if not self.searches:
            by_list, by_gates = self.prune_layers is not None, self.select == "gates"
            cause = "--prune-layers" if by_list else "--select gates" if by_gates else "--no-refit"
            idle[cause] = (*idle.get(cause, ()), "search_breadth")
        defaults = {field.name: field.default for field in fields(self)}
        for cause, names in idle.items():
            for name in names:
                if getattr(self, name) and getattr(self, name) != defaults[name]:
                    raise UsageError(
                        f"{_flag(name)} and {cause}: the one has no effect beside the other; drop one of them"
                    )

    def _check_precision(self) -> None:
        """Refuse settings of quantisation that do not go with the precision or with each other."""
        if self.dialect == "standard" and self.precision in QUANTIZED:
            raise UsageError(
                f"--precision: expected fp32, fp16 or bf16 with --dialect standard, found {self.precision}, whose "
                "products are ONNX Runtime's own; use --dialect ort"
            )
        for flag, is_set, takers in (
            ("--block-size", self.block_size, BLOCKWISE),
            ("--symmetric", self.symmetric, BLOCKWISE),
            ("--quantizer", self.quantizer, QUANTIZED),
        ):
            if is_set is not None and self.precision not in takers:
                wanted = f"{', '.join(takers[:-1])} or {takers[-1]}"
                raise UsageError(f"{flag}: expected --precision {wanted} with it, found {self.precision}")
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise UsageError(
                f"--block-size: expected one of {', '.join(map(str, BLOCK_SIZES))}, found {self.block_size}"
            )
        if self.precision == "int8-dynamic" and self.quantizer in ("k_quant", "hqq"):
            raise UsageError(
                f"--quantizer {self.quantizer}: expected gptq or rtn with --precision int8-dynamic, whose weights have "
                "no blocks; leave it out"
            )
        if self.quantizer == "hqq" and self.precision == "int8":
            raise UsageError("--quantizer hqq: expected --precision int4 with it, found int8; leave it out")
        if self.symmetric and self.quantizer in ("k_quant", "hqq"):
            raise UsageError(
                f"--symmetric: expected --quantizer gptq or rtn with it, found {self.quantizer}, which places the zero "
                "point itself; leave --symmetric out"
            )


def _flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _taken(flag: str, value: Any, hint: Any) -> Any:
    """Return a value as its field holds it: a path from text, text from a path, one source of text as a tuple of it.

    The command line gives every value its type; from Python any value may come, and one that is taken for another
    makes a bundle that is not what its manifest says.

    Raises:
        UsageError: the value is of another type than the field's, or not among the values that it may have.
    """
    kind, *others = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if value is None and others:
        return None
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is str and isinstance(value, str | Path):
        return str(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if kind is float and isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
        return value
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str | Path) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str | Path) for item in items):
            return tuple(str(item) for item in items)
    names = {Path: "a path", str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    expected = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else names.get(kind, "texts")
    raise UsageError(f"{flag}: expected {expected}, found {shown(value)}; change it or leave it out")
