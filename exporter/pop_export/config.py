"""What a user can ask of an export, in one frozen dataclass; `cli.py` fills it, `pipeline.py` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pop_runtime.errors import UsageError

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Int4Method = Literal["rtn", "k_quant", "hqq", "gptq"]
BLOCK_SIZES = (16, 32, 64, 128, 256)  # all that ONNX Runtime's quantisers and kernels take (1.32)


@dataclass(frozen=True)
class ExportConfig:
    """Settings of one export. The defaults are those of `pop-export`."""

    model: str  # Hugging Face id, folder, .gguf file or a name from models/
    out: Path
    force: bool = False  # replace an existing bundle
    offline: bool = False  # never touch the network
    trust_remote_code: bool = False  # run Python that lies in the model's folder
    allow_pickle: bool = False  # read weights from pickle files

    calibration: Path | None = None  # reuse this calibration.json
    calibration_data: tuple[str, ...] = ()  # .txt, .jsonl or data set ids; empty: the built-in corpus
    calibration_samples: int = 48
    calibration_length: int = 256  # tokens per sample; the boundary between prompt and response lies at half of it
    calibration_batch: int = 2  #  samples per forward pass; changes speed and memory, never the scores
    fisher: Literal["sampled", "empirical"] = "sampled"
    seed: int = 0

    prune_ratio: float = 1 / 3  # share of layers that the prefill graph leaves out
    prune_layers: str | None = None  # "20-29", "5,12-14" or "none": overrides prune_ratio
    sink_tokens: int = 0  # tokens at the start of a sequence that run at full depth
    boundary_tokens: int = 1  # tokens at the end of each turn that run at full depth

    precision: Precision = "fp32"
    block_size: int | None = None  # weights that share a scale; None: DEFAULT_BLOCK_SIZE
    int4_method: Int4Method = "rtn"  # how scales are found: round to nearest, or a search
    symmetric: bool | None = None  # None: symmetric for int8, asymmetric for int4

    threads: int | None = None  # None: one per visible core

    def __post_init__(self) -> None:
        """Refuse values that no model could make sense of."""
        for name in ("calibration_samples", "calibration_length", "calibration_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, found {getattr(self, name)}")
        if self.calibration_length < 4:
            raise UsageError(f"--calibration-length: expected at least 4 tokens, found {self.calibration_length}")
        if not 0 <= self.prune_ratio < 1:
            raise UsageError(f"--prune-ratio: expected 0 <= ratio < 1, found {self.prune_ratio}")
        if self.sink_tokens < 0:
            raise UsageError(f"--sink-tokens: expected at least 0, found {self.sink_tokens}")
        if self.boundary_tokens < 1:
            raise UsageError(
                f"--boundary-tokens: expected at least 1 (the last prompt token predicts the first new one), "
                f"found {self.boundary_tokens}"
            )
        if self.seed < 0:
            raise UsageError(f"--seed: expected at least 0, found {self.seed}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads: expected at least 1, found {self.threads}")
        self._check_precision()

    def _check_precision(self) -> None:
        """Refuse settings of quantisation that do not go with the precision or with each other."""
        if self.precision not in get_args(Precision):
            raise UsageError(f"--precision: expected one of {', '.join(get_args(Precision))}, found {self.precision}")
        if self.precision not in ("int8", "int4"):
            for flag, is_set in (("--block-size", self.block_size), ("--symmetric", self.symmetric)):
                if is_set is not None:
                    raise UsageError(f"{flag}: expected --precision int8 or int4 with it, found {self.precision}")
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise UsageError(
                f"--block-size: expected one of {', '.join(map(str, BLOCK_SIZES))}, found {self.block_size}"
            )
        if self.int4_method != "rtn":
            if self.precision != "int4":
                raise UsageError(f"--int4-method: expected --precision int4 with it, found {self.precision}")
            if self.symmetric and self.int4_method != "gptq":
                raise UsageError(
                    f"--symmetric: expected --int4-method rtn or gptq with it, found {self.int4_method}, which places "
                    "the zero point itself; leave --symmetric out"
                )
