"""A tiny bundle made by hand, and its slow twin in numpy: what the runtime's tests run on.

The model: token + position embedding; per layer grouped-query attention and a tanh MLP, each added to the hidden state;
a head. No norms, no rotary embedding: the runtime sees only the graphs' inputs and outputs, those of a real export.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import pop_runtime
from pop_runtime.manifest import KvLayer, Manifest, Plan, Segment, Windows, describe_files, write_manifest
from pop_runtime.schedule import Stage

L, E, H, H_KV, D, V, MAX_POSITIONS = 3, 32, 4, 2, 16, 300, 64
SKIPPED = (1, 2)
END = 257
PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 250, 40)]
ATOL = 2e-3  # logits of about 13, float32 against float64
_ONNX_TYPE = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def tiny_weights(seed: int = 0, vocab_size: int = V) -> dict[str, np.ndarray]:
    """Return the float32 weights; large enough that attention is sharp and a pruned layer is missed."""
    random = np.random.default_rng(seed)

    def draw(*shape: int, std: float) -> np.ndarray:
        return (random.standard_normal(shape) * std).astype(np.float32)

    weights = {"embed": draw(vocab_size, E, std=1.0), "positions": draw(MAX_POSITIONS, E, std=0.5)}
    for layer in range(L):
        weights[f"{layer}.q"] = draw(E, H * D, std=0.15)
        weights[f"{layer}.k"] = draw(E, H_KV * D, std=0.15)
        weights[f"{layer}.v"] = draw(E, H_KV * D, std=0.3)
        weights[f"{layer}.o"] = draw(H * D, E, std=0.2)
        weights[f"{layer}.up"] = draw(E, 2 * E, std=0.3)
        weights[f"{layer}.down"] = draw(2 * E, E, std=0.2)
    weights["head"] = draw(E, vocab_size, std=0.05)
    return weights


class Twin:
    """The same model, one token after another; `pruned` tokens skip the planned layers but leave their K and V."""

    def __init__(self, weights: dict[str, np.ndarray], skipped: tuple[int, ...] = SKIPPED) -> None:
        self.weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
        self.skipped = skipped
        self.keys: list[list[np.ndarray]] = [[] for _ in range(L)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(L)]

    def feed(self, token: int, pruned: bool) -> np.ndarray:
        """Return the logits [V] after one more token."""
        weights = self.weights
        hidden = weights["embed"][token] + weights["positions"][len(self.keys[0])]  # [E]
        for layer in range(L):
            self.keys[layer].append((hidden @ weights[f"{layer}.k"]).reshape(H_KV, D))
            self.values[layer].append((hidden @ weights[f"{layer}.v"]).reshape(H_KV, D))
            if pruned and layer in self.skipped:
                continue
            query = (hidden @ weights[f"{layer}.q"]).reshape(H, D)
            keys = np.repeat(np.array(self.keys[layer]), H // H_KV, axis=1)  # [T, H, D]
            values = np.repeat(np.array(self.values[layer]), H // H_KV, axis=1)
            scores = np.einsum("hd,thd->ht", query, keys) / np.sqrt(D)
            weight = np.exp(scores - scores.max(axis=1, keepdims=True))
            weight /= weight.sum(axis=1, keepdims=True)
            hidden = hidden + np.einsum("ht,thd->hd", weight, values).reshape(-1) @ weights[f"{layer}.o"]
            hidden = hidden + np.tanh(hidden @ weights[f"{layer}.up"]) @ weights[f"{layer}.down"]
        return hidden @ weights["head"]

    def greedy(self, prompt: list[int], num_new: int, pruned: list[bool] | None = None) -> list[int]:
        """Return greedy tokens after a prompt; `pruned` tells its pruned positions (None: all but the last)."""
        pruned = [True] * (len(prompt) - 1) + [False] if pruned is None else pruned
        for token, skip in zip(prompt, pruned, strict=True):
            logits = self.feed(token, skip)
        tokens: list[int] = []
        for _ in range(num_new):
            tokens.append(int(logits.argmax()))
            logits = self.feed(tokens[-1], pruned=False)
        return tokens


class _Graph:
    """Collects the nodes and weights of one graph; every weight lies in one shared external file."""

    def __init__(self, weights: dict[str, np.ndarray], offsets: dict[str, int], dtype: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._weights, self._offsets, self._dtype = weights, offsets, dtype

    def op(
        self, kind: str, inputs: list[str], outputs: int = 1, names: list[str] | None = None, **attributes: Any
    ) -> Any:
        names = names or [f"{kind}_{len(self.nodes)}_{index}" for index in range(outputs)]
        domain = attributes.pop("domain", "")
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0] if len(names) == 1 else names

    def ints(self, values: Any, onnx_type: int = TensorProto.INT64) -> str:
        array = np.array(values, np.int64 if onnx_type == TensorProto.INT64 else np.int32)
        name = f"const_{len(self.constants)}"
        self.constants[name] = helper.make_tensor(name, onnx_type, array.shape, array.reshape(-1).tolist())
        return name

    def weight(self, name: str) -> str:
        if name not in self.constants:
            array = self._weights[name].astype(self._dtype)
            tensor = TensorProto(name=name, data_type=_ONNX_TYPE[self._dtype], dims=array.shape)
            tensor.data_location = TensorProto.EXTERNAL
            where = {"location": "weights.bin", "offset": self._offsets[name], "length": array.nbytes}
            for key, value in where.items():
                tensor.external_data.add(key=key, value=str(value))
            self.constants[name] = tensor
        return name


def _heads(graph: _Graph, flat: str) -> str:
    """[B, S, H_kv * D] -> [B, H_kv, S, D]."""
    return graph.op("Transpose", [graph.op("Reshape", [flat, graph.ints([0, 0, H_KV, D])])], perm=[0, 2, 1, 3])


def _build(
    graph: _Graph, skipped: tuple[int, ...], has_head: bool, layers: range, hidden_in: str | None
) -> str:  # fmt: skip
    """Write the nodes of one graph or segment and return the name of its last hidden states."""
    num_new = graph.op("Shape", ["input_ids"], start=1, end=2)  # [1]
    length = graph.op("ReduceSum", ["attention_mask", graph.ints([1])], keepdims=0)  # [B]
    past = graph.op("Sub", [length, num_new])  # [B]
    total = graph.op(
        "Squeeze", [graph.op("Cast", [graph.op("Shape", ["attention_mask"], start=1, end=2)], to=TensorProto.INT32)]
    )
    last = graph.op("Cast", [graph.op("Sub", [length, graph.ints([1])])], to=TensorProto.INT32)  # [B]
    steps = graph.op("Range", [graph.ints(0), graph.op("Squeeze", [num_new]), graph.ints(1)])  # [S]
    positions = graph.op("Add", [graph.op("Unsqueeze", [past, graph.ints([1])]), steps])  # [B, S]
    hidden = hidden_in or graph.op(
        "Add",
        [
            graph.op("Gather", [graph.weight("embed"), "input_ids"]),
            graph.op("Gather", [graph.weight("positions"), positions]),
        ],
    )  # [B, S, E]
    for layer in layers:
        pasts = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        presents = [f"present.{layer}.key", f"present.{layer}.value"]
        key = graph.op("MatMul", [hidden, graph.weight(f"{layer}.k")])
        value = graph.op("MatMul", [hidden, graph.weight(f"{layer}.v")])
        if layer in skipped:
            for old, flat, new in zip(pasts, (key, value), presents, strict=True):
                graph.op("TensorScatter", [old, _heads(graph, flat), past], names=[new], axis=2, mode="linear")
            continue
        query = graph.op("MatMul", [hidden, graph.weight(f"{layer}.q")])
        graph.op(
            "GroupQueryAttention",
            [query, key, value, *pasts, last, total],
            names=[f"attention_{layer}", *presents],
            domain="com.microsoft",
            num_heads=H,
            kv_num_heads=H_KV,
            do_rotary=0,
        )
        attended = graph.op("MatMul", [f"attention_{layer}", graph.weight(f"{layer}.o")])
        hidden = graph.op("Add", [hidden, attended])
        up = graph.op("Tanh", [graph.op("MatMul", [hidden, graph.weight(f"{layer}.up")])])
        hidden = graph.op("Add", [hidden, graph.op("MatMul", [up, graph.weight(f"{layer}.down")])])
    if has_head:
        final = graph.op("Gather", [hidden, graph.ints([-1])], axis=1)  # [B, 1, E]
        graph.op("MatMul", [final, graph.weight("head")], names=["logits"])
    return str(hidden)


def save_graph(
    path: Path,
    weights: dict[str, np.ndarray],
    offsets: dict[str, int],
    skipped: tuple[int, ...],
    dtype: str,
    has_head: bool,
    layers: range = range(L),
    hidden_in: str | None = None,
    hidden_out: str | None = None,
) -> None:
    """Write one graph, or a segment of some layers."""
    graph = _Graph(weights, offsets, dtype)
    last_hidden = _build(graph, skipped, has_head, layers, hidden_in)
    kind, kv_shape = _ONNX_TYPE[dtype], ["batch", H_KV, "capacity", D]
    names = [f"{layer}.{part}" for layer in layers for part in ("key", "value")]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
        *(helper.make_tensor_value_info(f"past_key_values.{name}", kind, kv_shape) for name in names),
    ]
    outputs = [helper.make_tensor_value_info(f"present.{name}", kind, kv_shape) for name in names]
    if has_head:
        shape = ["batch", 1, weights["head"].shape[1]]
        outputs.insert(0, helper.make_tensor_value_info("logits", kind, shape))
    if hidden_in is not None:
        inputs.append(helper.make_tensor_value_info(hidden_in, kind, ["batch", "new", E]))
    if hidden_out is not None:
        graph.op("Identity", [last_hidden], names=[hidden_out])
        outputs.append(helper.make_tensor_value_info(hidden_out, kind, ["batch", "new", E]))
    proto = helper.make_model(
        helper.make_graph(graph.nodes, path.stem, inputs, outputs, list(graph.constants.values())),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)],
        ir_version=11,
    )
    path.write_bytes(proto.SerializeToString())


def save_segments(
    folder: Path, weights: dict[str, np.ndarray], offsets: dict[str, int], skipped: tuple[int, ...], dtype: str
) -> tuple[Segment, ...]:
    """Write the segments of both graphs, one for each layer, and return them.

    In prefill the last layer hands on nothing, and a skipped one what it was given, but for the first: the embedding.
    """
    segments = []
    for layer in range(L):
        is_first, is_last = layer == 0, layer == L - 1
        hidden_in, hidden_out = None if is_first else f"hidden_{layer}", None if is_last else f"hidden_{layer + 1}"
        passed_on = hidden_out if is_first else None
        kinds: list[tuple[str, tuple[Stage, ...], tuple[int, ...], str | None]] = [
            ("kept", ("prefill", "decode"), (), hidden_out)
        ]
        if is_last or layer in skipped:  # nothing reads what the last layer would leave of a prompt
            kinds = [("skipped", ("prefill",), (layer,), passed_on), ("full", ("decode",), (), hidden_out)]
        for kind, stages, left_out, out in kinds:
            name, has_head = f"segment-{layer}-{kind}.onnx", is_last and "decode" in stages
            save_graph(
                folder / name, weights, offsets, left_out, dtype, has_head, range(layer, layer + 1), hidden_in, out
            )
            segments.append(Segment(name, stages, hidden_in, out))
    return tuple(segments)


def make_bundle(
    folder: Path,
    weights: dict[str, np.ndarray] | None = None,
    *,
    dtype: str = "float32",
    skipped: tuple[int, ...] = SKIPPED,
    segmented: bool = False,
    text_files: dict[str, str] | None = None,
    **fields: Any,
) -> Path:
    """Write a whole bundle, with segments if wanted, and return its folder; `fields` replace those of the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or tiny_weights()
    offsets, blob = {}, b""
    for name, weight in weights.items():
        offsets[name] = len(blob)
        blob += weight.astype(dtype).tobytes()
        blob += bytes(-len(blob) % 4096)
    (folder / "weights.bin").write_bytes(blob)
    save_graph(folder / "decode.onnx", weights, offsets, (), dtype, has_head=True)
    save_graph(folder / "prefill.onnx", weights, offsets, skipped, dtype, has_head=False)
    segments = save_segments(folder, weights, offsets, skipped, dtype) if segmented else ()
    for name, text in (text_files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    known = {
        "tokenizer": "tokenizer.json",
        "chat_template": "chat_template.jinja",
        "generation_config": "generation_config.json",
        "tokenizer_config": "tokenizer_config.json",
    }
    manifest = Manifest(
        model={"name": "tiny"},
        vocab_size=weights["head"].shape[1],
        max_positions=MAX_POSITIONS,
        plan=Plan(L, skipped, "user"),
        windows=Windows(),
        kv_dtype=dtype,
        kv_layers=(KvLayer(H_KV, D, D),) * L,
        precision=dtype,
        eos_token_ids=(END,),
        bos_token_id=256,
        pad_token_id=258,
        tokenizer=None,
        chat_template=None,
        generation_config=None,
        segments=segments,
    )
    found = {field: name for field, name in known.items() if (folder / name).exists()}
    graphs = ["prefill.onnx", "decode.onnx", *(segment.graph for segment in segments)]
    names = [*graphs, "weights.bin", *found.values()]
    manifest = dataclasses.replace(manifest, **{**found, "files": describe_files(folder, names), **fields})
    write_manifest(folder, manifest)
    return folder


def with_generation_config(**settings: Any) -> dict[str, str]:
    """Return the `text_files` entry of a generation config."""
    return {"generation_config.json": json.dumps(settings)}


def ids_of(generation: pop_runtime.Generation) -> list[int]:
    """Run a generation to its end and return the ids it yielded."""
    return [token.id for token in generation]
