"""What differs between ONNX Runtime's execution providers, in one table; everything else is the same code for all.

A provider is the one asked for or none: nothing here falls back to another one in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pop_runtime.checks import is_within
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import Manifest

# Operators that compute sizes and places from integers. CUDA leaves them to the CPU, since their inputs lie there.
SIZE_OPERATORS = frozenset(
    ("Add", "And", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Greater", "Identity",
     "LessOrEqual", "Mul", "Range", "ReduceSum", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze",
     "Where")
)  # fmt: skip


MOST_DEVICE = 2**31 - 1  # providers take an int32
CAPACITY = "capacity"  # name of S_max among the graphs' symbolic sizes


@dataclass(frozen=True)
class Shapes:
    """The sizes that an engine is built for."""

    prompt_lengths: tuple[int, ...]  # new tokens of one run, ascending; the last is the most it takes
    max_seq_len: int  # S_max: capacity of the KV buffers
    batch: int  # most rows


Shape = tuple[int, ...]
Profile = tuple[tuple[Shape, Shape, Shape], ...]  # smallest, most frequent and largest shape, for each range of sizes
OptionsOf = Callable[[int, str | None, dict[str, Profile]], dict[str, str]]  # of device, precision, profile by input


@dataclass(frozen=True)
class Provider:
    """One row of the table."""

    ort_name: str
    install: str  # what brings it
    memory: str  # where the KV buffers lie, as IOBinding names a device
    dialects: tuple[str, ...]  # of the bundles that it runs
    precisions: tuple[str, ...]  # that it can be told to compute in, beside the bundle's own
    runs_segments: bool  # its sessions pack or compile weights for themselves: segments hold the kept layers once
    needs_engine: bool  # building takes minutes: runs only what pop-compile made
    makes_context: bool  # compiles the graph into a binary of its own ("EP context"), instead of optimising it
    options: OptionsOf
    cpu_operators: frozenset[str] = frozenset()  # operators that may run on the CPU beside it
    plugin: str | None = None  # Python module of a provider that comes as a package of its own
    # option of a session whose runs ONNX Runtime records and replays (CUDA graphs); not beside `runs_segments`
    records_runs: str | None = None


def _no_options(device: int, precision: str | None, profiles: dict[str, Profile]) -> dict[str, str]:
    return {}


def _cuda_options(device: int, precision: str | None, profiles: dict[str, Profile]) -> dict[str, str]:
    # TF32 keeps 10 bits of every factor: "fp32" would not be what the bundle was verified as
    return {"device_id": str(device), "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}


def _tensorrt_options(device: int, precision: str | None, profiles: dict[str, Profile]) -> dict[str, str]:
    options = {"device_id": str(device)}
    if precision in ("fp16", "bf16"):
        options[f"trt_{precision}_enable"] = "1"
    return options | _profile_options("trt", profiles)


def _tensorrt_rtx_options(device: int, precision: str | None, profiles: dict[str, Profile]) -> dict[str, str]:
    options = {"device_id": str(device), "nv_use_external_data_initializer": "1"}
    if any(len(profile) > 1 for profile in profiles.values()):
        options["nv_multi_profile_enable"] = "1"
    return options | _profile_options("nv", profiles)


def _openvino_options(device: int, precision: str | None, profiles: dict[str, Profile]) -> dict[str, str]:
    options = {"device_type": "CPU" if device == 0 else f"GPU.{device - 1}"}
    if precision in ("fp32", "fp16"):
        options["precision"] = precision.upper()
    return options


def _profile_options(prefix: str, profiles: dict[str, Profile]) -> dict[str, str]:
    """Return shape profiles as the TensorRT providers read them: `name:1x7,name:1x512,...`, a name once per range."""
    if not profiles:
        return {}
    return {
        f"{prefix}_profile_{word}_shapes": ",".join(
            f"{name}:{'x'.join(map(str, shapes[index]))}" for name, profile in profiles.items() for shapes in profile
        )
        for index, word in enumerate(("min", "opt", "max"))
    }


PROVIDERS = {
    "cpu": Provider(
        "CPUExecutionProvider", "pip install 'pop-export[cpu]'", "cpu", ("ort", "standard"), (), True, False,
        False, _no_options,
    ),
    "cuda": Provider(
        "CUDAExecutionProvider", "pip install 'pop-export[gpu]' on a machine with an NVIDIA driver", "cuda",
        ("ort", "standard"), (), False, False, False, _cuda_options, SIZE_OPERATORS,
        records_runs="enable_cuda_graph",
    ),
    "tensorrt": Provider(
        "TensorrtExecutionProvider", "pip install 'pop-export[gpu]' and NVIDIA's TensorRT 10.15 or newer", "cuda",
        ("standard",), ("fp16", "bf16"), True, True, True, _tensorrt_options,
    ),
    "nv-tensorrt-rtx": Provider(
        "NvTensorRTRTXExecutionProvider", "pip install onnxruntime onnxruntime-ep-nv-tensorrt-rtx", "cuda",
        ("standard",), (), True, True, True, _tensorrt_rtx_options, plugin="onnxruntime_ep_nv_tensorrt_rtx",
    ),
    "openvino": Provider(
        "OpenVINOExecutionProvider", "pip install onnxruntime onnxruntime-ep-openvino", "cpu", ("standard",),
        ("fp32", "fp16"), True, False, True, _openvino_options, plugin="onnxruntime_ep_openvino",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where KV buffers lie, and the sizes that an engine prescribes; None: any."""

    memory: str = "cpu"  # as IOBinding names a device
    device: int = 0
    shapes: Shapes | None = None

    @property
    def longest_run(self) -> int:
        """Most new tokens of one run."""
        return sys.maxsize if self.shapes is None else self.shapes.prompt_lengths[-1]

    def check(self, batch: int, capacity: int) -> int:
        """Return the capacity that buffers get: the one asked for, or the engine's.

        Raises:
            UsageError: the engine has less room.
        """
        if self.shapes is None:
            return capacity
        for what, asked, most in (("rows", batch, self.shapes.batch), ("tokens", capacity, self.shapes.max_seq_len)):
            if asked > most:
                raise UsageError(
                    f"engine: expected at most {most} {what}, found {asked}; build a larger one: pop-compile"
                )
        return self.shapes.max_seq_len


HOST = Place()


@dataclass(frozen=True)
class Target:
    """Which provider runs a bundle, and on which of its devices."""

    ep: str = "cpu"
    device: int = 0
    cuda_graphs: bool = False  # decode steps are recorded once for each cache, and replayed

    def __post_init__(self) -> None:
        """Refuse a provider that is not in the table."""
        if self.ep not in PROVIDERS:
            raise UsageError(f"--ep: expected one of {', '.join(PROVIDERS)}, found {self.ep}")
        if self.cuda_graphs and self.provider.records_runs is None:
            able = " or ".join(name for name, provider in PROVIDERS.items() if provider.records_runs)
            raise UsageError(f"--cuda-graphs: expected --ep {able}, found {self.ep}; leave it out")
        most = 0 if self.ep == "cpu" else MOST_DEVICE
        if not is_within(self.device, 0, most):
            raise UsageError(f"--device: expected {'0' if most == 0 else '0 or more'}, found {self.device!r}")

    @property
    def provider(self) -> Provider:
        """The table's row."""
        return PROVIDERS[self.ep]


CPU = Target()


def shape_profiles(manifest: Manifest, shapes: Shapes, graph: str) -> dict[str, Profile]:
    """Return the profile of each input of a graph.

    What decode runs gets a range of its own for single tokens, which is what it is run with most of the time. The other
    range spans from one token to the longest prompt, and is tuned for the middle one of the lengths.

    Args:
        manifest: of the bundle.
        shapes: that the engine is built for.
        graph: file name of one of both graphs, or of a segment.

    Raises:
        ModelError: the manifest does not say which layers the segment has.
    """
    lengths, rows, room = shapes.prompt_lengths, shapes.batch, shapes.max_seq_len
    segment = next((segment for segment in manifest.segments if segment.graph == graph), None)
    ranges = [(1, lengths[len(lengths) // 2], lengths[-1])]
    if graph == manifest.decode_graph or (segment is not None and "decode" in segment.stages):
        ranges.insert(0, (1, 1, 1))
    profiles: dict[str, Profile] = {
        manifest.input_ids: tuple(((1, least), (rows, usual), (rows, most)) for least, usual, most in ranges),
        manifest.attention_mask: tuple(
            ((1, least), (rows, max(usual, room // 2)), (rows, room)) for least, usual, _ in ranges
        ),
    }
    layers: Iterable[int] = range(len(manifest.kv_layers))
    if segment is not None:
        layers, size = segment.layers, segment.hidden_size
        if not layers or not size:
            raise ModelError(
                f"manifest.json, {graph}: expected its layers and hidden size, found none; re-run pop-export"
            )
        if segment.hidden_in is not None:
            profiles[segment.hidden_in] = tuple(
                ((1, least, size), (rows, usual, size), (rows, most, size)) for least, usual, most in ranges
            )
    for layer in layers:
        kv = manifest.kv_layers[layer]
        for name, size in ((manifest.past_key, kv.key_head_size), (manifest.past_value, kv.value_head_size)):
            one, all_rows = (1, kv.num_heads, room, size), (rows, kv.num_heads, room, size)
            profiles[name.format(layer=layer)] = ((one, all_rows, all_rows),) * len(ranges)
    return profiles
